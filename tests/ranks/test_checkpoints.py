"""Checkpoints on real ranks: exact between shapes, one copy written, each byte read once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, said_by_all, shard, whole
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mics_dtensor import ReplicaShardedOptimizer, gradient_accumulation
from mics_dtensor.checkpoint import reading
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.errors import CheckpointError
from mics_dtensor.upstream import local_of

SLICED, TENSOR_PARALLEL, FEED = "sliced", "tensor parallel", "feed"


class Uneven(nn.Module):
    """Rows that no number of shards divides, a buffer, a scalar-like parameter."""

    def __init__(self, last: int = 17) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 9), nn.Linear(9, last)])
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.one


class Layers(nn.Module):
    """Square layers alone."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """What tensor parallelism cuts, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 8), nn.Linear(8, 5), nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


class Feed(nn.Module):
    """For two ranks of tensor parallelism, or for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def made(
    replicate: int, partition: int, *, kind: str = "", seed: int = 0, last: int = 17
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    if kind == TENSOR_PARALLEL:
        mesh = mesh_of(replicate, partition, 2)
        feed: Any = Feed()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(feed.layers[0], mesh["tp"], plan)
        model = shard(feed, mesh["replicate", "shard"])
    else:
        model = shard(Feed() if kind == FEED else Uneven(last), mesh_of(replicate, partition))
    if kind == SLICED:
        return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    rank = dist.get_rank() // 2  # two ranks of tensor parallelism read the same
    for step in steps:
        with gradient_accumulation(model, num_micro_steps=2) as accumulation:
            for micro in range(2):
                with accumulation.micro_step():
                    model(batch(step, micro, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(value).clone() for name, value in named}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def states_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Of this rank: shards, or pieces."""
    found = {}
    for key, its in optimizer.state_dict()["state"].items():
        for name, value in its.items():
            flat = getattr(value, "flat", value)
            found[key, name] = local_of(flat).clone()
    return found


def saved_and_loaded(folder: Path, layouts: list[tuple[int, int, str]]) -> None:
    """From each layout into each other, and back: parameters and moments equal."""
    models = {layout: made(*layout[:2], kind=layout[2]) for layout in layouts}
    its = {at: Checkpoints(folder / str(at), model=m, optimizer=o) for at, (m, o) in models.items()}
    for seed, (source, (model, optimizer)) in enumerate(models.items()):
        train(model, optimizer, seed, seed + 1)
        weights, states = values(model), states_of(optimizer)
        its[source].save(seed)
        for target, (other, others) in models.items():
            if target == source:
                continue
            train(other, others, 9)
            there = Checkpoints(folder / str(source), model=other, optimizer=others)
            assert there.load(seed).step == seed
            assert same(values(other), weights)
            # The states too: saved from there they are, piece by piece, what was saved here.
            its[target].save(seed)
            train(model, optimizer, 8)
            Checkpoints(folder / str(target), model=model, optimizer=optimizer).load(seed)
            assert same(values(model), weights)
            assert same(states_of(optimizer), states), (source, target)


@ranks(4, timeout_s=110)
def test_saved_on_any_shape_loaded_on_any_other(tmp_path: Path) -> None:
    saved_and_loaded(tmp_path, [(2, 2, ""), (1, 4, ""), (2, 2, SLICED)])


@ranks(4, timeout_s=110)
def test_with_tensor_parallel_and_without(tmp_path: Path) -> None:
    saved_and_loaded(tmp_path, [(1, 2, TENSOR_PARALLEL), (2, 1, TENSOR_PARALLEL), (2, 2, FEED)])


@pytest.mark.matrix
@ranks(8, timeout_s=500)
def test_every_shape_of_eight_ranks(tmp_path: Path) -> None:
    plain = [(r, 8 // r, "") for r in (1, 2, 4, 8)]
    saved_and_loaded(tmp_path, [*plain, (2, 4, SLICED), (4, 2, SLICED), (8, 1, SLICED)])
    feed = [(1, 8, FEED), (4, 2, FEED)]
    tensor_parallel = [(r, 4 // r, TENSOR_PARALLEL) for r in (1, 2, 4)]
    saved_and_loaded(tmp_path / "tp", [*tensor_parallel, *feed])


@ranks(4, timeout_s=110)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for replicate, partition, kind in ((2, 2, ""), (1, 4, ""), (2, 2, SLICED)):
        folder = tmp_path / f"{replicate} {partition} {kind}"
        straight, its = made(replicate, partition, kind=kind)
        train(straight, its, 0, 1, 2, 3)
        model, optimizer = made(replicate, partition, kind=kind)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        train(model, optimizer, 0, 1)
        scheduler.last_epoch = 7
        Checkpoints(folder, model=model, optimizer=optimizer, extra={"lr": scheduler}).save(2)
        model, optimizer = made(replicate, partition, kind=kind, seed=5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        found = Checkpoints(folder, model=model, optimizer=optimizer, extra={"lr": scheduler})
        manifest = found.resume()
        assert manifest is not None
        assert (manifest.step, manifest.contents, scheduler.last_epoch) == (2, "training", 7)
        train(model, optimizer, 2, 3)
        assert same(values(model), values(straight))


@contextmanager
def reads_counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank reads of each file of a checkpoint."""
    found: dict[str, int] = {}
    real = reading.read_whole

    def counted(path: Path, *, hashed: bool) -> Any:
        data = real(path, hashed=hashed)
        found[path.name] = found.get(path.name, 0) + len(data[0])
        return data

    reading.read_whole = counted  # type: ignore[assignment]
    try:
        yield found
    finally:
        reading.read_whole = real


@ranks(8, timeout_s=110)
@pytest.mark.parametrize("placement", ["spread", "partition_group"])
def test_one_copy_is_written_and_each_byte_read_once(tmp_path: Path, placement: str) -> None:
    torch.manual_seed(0)
    model: Any = shard(Layers(), mesh_of(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    options = CheckpointOptions(placement=placement)  # type: ignore[arg-type]
    checkpoints = Checkpoints(tmp_path, model=model, optimizer=optimizer, options=options)
    checkpoints.save(1)
    manifest = Manifest.read(tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    numel = sum(p.numel() for p in model.parameters())
    in_chunks = sum(
        chunk.sizes.numel() * its.properties.dtype.itemsize
        for name, its in metadata.state_dict_metadata.items()
        for chunk in getattr(its, "chunks", ())
        if not name.endswith(".step")
    )
    assert in_chunks == 3 * 4 * numel  # weights and two moments, fp32, once
    by_rank = {file.name: file.size_bytes for file in manifest.files if file.name != ".metadata"}
    assert sum(by_rank.values()) == sum(i.length for i in metadata.storage_data.values())
    writers = {int(name.split("_")[2]) for name in by_rank}
    if placement == "spread":
        assert writers == set(range(8))
        payload = dict.fromkeys(by_rank, 0)
        for index, info in metadata.storage_data.items():
            if index.fqn.endswith(("weight", "exp_avg", "exp_avg_sq")):
                payload[info.relative_path] += info.length
        assert max(payload.values()) < 1.3 * sum(payload.values()) / 8
    else:
        assert writers == {0, 1}  # the first partition group

    for replicate, partition in ((4, 2), (1, 8), (8, 1), (2, 4)):
        other: Any = shard(Layers(), mesh_of(replicate, partition))
        loaded = Checkpoints(tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
        with reads_counted() as mine, count_collectives() as counted:
            loaded.load(1)
        total: dict[str, int] = {}
        for of_rank in said_by_all(mine):
            for name, num_bytes in of_rank.items():
                total[name] = total.get(name, 0) + num_bytes
        assert total == {file.name: file.size_bytes for file in manifest.files}
        moved = "all_to_all" in counted.by_kind
        assert not moved or (replicate, partition) != (4, 2)  # readers have what they need
        assert same(values(other), values(model))


@ranks(4, timeout_s=110)
def test_an_asynchronous_save_holds_the_values_of_its_step(tmp_path: Path) -> None:
    for kind in ("", SLICED):
        folder = tmp_path / f"async{kind}"
        model, optimizer = made(2, 2, kind=kind)
        train(model, optimizer, 0, 1)
        options = CheckpointOptions(asynchronous=True)
        with Checkpoints(folder, model=model, optimizer=optimizer, options=options) as its:
            before = values(model)
            its.save(2)
            with torch.no_grad():  # at once, while it is written
                for parameter in model.parameters():
                    parameter.zero_()
                model.seen.fill_(9)  # type: ignore[operator,union-attr]
            train(model, optimizer, 2)
        straight, optimizer = made(2, 2, kind=kind)
        train(straight, optimizer, 0, 1, 2)
        model, optimizer = made(2, 2, kind=kind, seed=4)
        Checkpoints(folder, model=model, optimizer=optimizer).load(2)
        assert same(values(model), before)
        train(model, optimizer, 2)
        assert same(values(model), values(straight))


@ranks(4, timeout_s=110)
def test_an_error_in_the_background_reaches_the_loop_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    folder = tmp_path / "run"
    options = CheckpointOptions(asynchronous=True)
    its = Checkpoints(folder, model=model, optimizer=optimizer, options=options)
    its.save(1)
    its.wait()
    if dist.get_rank() == 0:
        (folder / "step-2").touch()  # in the way of the rename
        folder.joinpath("step-2").chmod(0o600)
    dist.barrier()
    real = Manifest.write
    Manifest.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[method-assign]
    try:
        its.save(2)
        train(model, optimizer, 0)
        with pytest.raises(CheckpointError, match="step-2 was not written: rank 0: No space left"):
            its.save(3)
    finally:
        Manifest.write = real  # type: ignore[method-assign]
    its.save(4)
    its.close()
    dist.barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["step-1", "step-2", "step-4"]


@ranks(4, timeout_s=110)
def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    for kind in ("", SLICED):
        straight, optimizer = made(2, 2, kind=kind)
        train(straight, optimizer, 0)
        model, optimizer = made(2, 2, kind=kind)
        Checkpoints(tmp_path / kind, model=model, optimizer=optimizer).save(0)
        train(model, optimizer, 0)
        assert same(values(model), values(straight))
        model, optimizer = made(2, 2, kind=kind, seed=3)
        Checkpoints(tmp_path / kind, model=model, optimizer=optimizer).load(0)
        train(model, optimizer, 0)
        assert same(values(model), values(straight))


def edit_schema(folder: Path) -> None:
    its = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(its | {"schema": 2}))


def flip(folder: Path) -> None:
    (file,) = folder.glob("__2_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@ranks(4, timeout_s=110)
def test_what_is_damaged_is_refused_by_name_and_passed_over(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    folder = tmp_path / "run"
    its = Checkpoints(folder, model=model, optimizer=optimizer)
    for step in (1, 2, 3, 4, 5):
        its.save(step)
        train(model, optimizer, step)
    if dist.get_rank() == 0:
        flip(folder / "step-5")
        (folder / "step-4" / "__1_0.distcp").write_bytes(b"short")
        (folder / "step-3" / "__3_0.distcp").unlink()
        (folder / "step-2" / "manifest.json").unlink()
        (folder / "step-6.partial").mkdir()
    dist.barrier()
    other, others = made(4, 1, seed=9)
    loading = Checkpoints(folder, model=other, optimizer=others)
    before = values(other)
    for step, words in {
        5: "step-5/__2_0.distcp has other bytes than were written",
        4: "step-4/__1_0.distcp has 5 bytes",
        3: "step-3/__3_0.distcp is missing",
        2: "step-2 has no manifest.json: either it was never completed",
        6: "step-6 does not exist",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            loading.load(step)
        assert same(values(other), before)
    manifest = loading.resume()
    assert manifest is not None
    assert manifest.step == 1
    if dist.get_rank() == 0:
        edit_schema(folder / "step-1")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step-1/manifest.json has schema 2"):
        loading.resume()
    if dist.get_rank() == 0:
        (folder / "step-1" / "manifest.json").write_text("{")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole, so the run cannot"):
        loading.resume()
    assert Checkpoints(tmp_path / "new", model=other, optimizer=others).resume() is None


@ranks(4, timeout_s=110)
def test_another_model_is_refused_with_names(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    Checkpoints(tmp_path, model=model, optimizer=optimizer).save(1)
    torch.manual_seed(0)
    longer: Any = shard(Layers(12), mesh_of(2, 2))
    wider, wider_optimizer = made(2, 2, last=19)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    for other, its, words in (
        (wider, wider_optimizer, r"layers.1.weight \[17, 9\], not \[19, 9\]"),
        (
            longer,
            None,
            r"it lacks layers.10.bias, .* and 10 more; it also has one, seen; of another",
        ),
        (model, sgd, r"it also has optimizer.state.layers.0.bias.exp_avg, .* and 5 more"),
    ):
        before = values(other)
        with pytest.raises(CheckpointError, match=f"step-1 is of another model: .*{words}"):
            Checkpoints(tmp_path, model=other, optimizer=its).load(1)
        assert same(values(other), before)


@ranks(4, timeout_s=110)
def test_slices_of_states_are_in_no_single_group(tmp_path: Path) -> None:
    model, optimizer = made(2, 2, kind=SLICED)
    train(model, optimizer, 0)
    options = CheckpointOptions(placement="partition_group")
    its = Checkpoints(tmp_path, model=model, optimizer=optimizer, options=options)
    with pytest.raises(CheckpointError, match="is held by rank 2, outside of the first"):
        its.save(1)
    assert list(tmp_path.iterdir()) == []
