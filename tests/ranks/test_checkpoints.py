"""Checkpoints on real ranks: one copy written, each byte read once, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.checkpointed import SLICED, made, same, train, values
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import mesh_of, said_by_all, shard
from torch import nn
from torch.serialization import get_crc32_options

from mics_dtensor.checkpoint import reading
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.digest import Digest
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.owner import Claim, Process
from mics_dtensor.checkpoint.placement import without_crc32_of_values
from mics_dtensor.errors import CheckpointError, CommunicationError


class Layers(nn.Module):
    """Square layers alone."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def reads_counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank reads of each file of a checkpoint."""
    found: dict[str, int] = {}
    real = reading.read_whole

    def counted(path: Path, digest: Digest | None = None) -> memoryview:
        data = real(path, digest)
        found[path.name] = found.get(path.name, 0) + len(data)
        return data

    reading.read_whole = counted
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
    lengths = [info.length for info in metadata.storage_data.values()]
    assert sum(by_rank.values()) == sum(-(-length // 64) * 64 for length in lengths)
    assert all(info.offset % 64 == 0 for info in metadata.storage_data.values())
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


def test_the_crc32_of_others_is_left_out_no_longer_than_a_save() -> None:
    def fails() -> None:
        with without_crc32_of_values():
            assert not get_crc32_options()
            raise OSError("full")

    assert get_crc32_options()
    with pytest.raises(OSError, match="full"):
        fails()
    assert get_crc32_options()


@ranks(4, timeout_s=110)
def test_an_asynchronous_save_holds_the_values_of_its_step(tmp_path: Path) -> None:
    for kind in ("", SLICED):
        folder = tmp_path / f"async{kind}"
        model, optimizer = made(2, 2, kind=kind)
        train(model, optimizer, 0)
        options = CheckpointOptions(asynchronous=True)
        with Checkpoints(folder, model=model, optimizer=optimizer, options=options) as its:
            its.save(1)
            train(model, optimizer, 1)
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
    assert sorted(p.name for p in folder.iterdir()) == ["step-1", "step-4"]


@ranks(4)
def test_a_run_that_was_taken_over_stops_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    its = Checkpoints(tmp_path, model=model, optimizer=optimizer)
    its.save(1)
    if dist.get_rank() == 0:
        Claim(Process("elsewhere", "another", 1, "1"), str(tmp_path)).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"taken over by process 1 of elsewhere, a later run"):
        its.save(2)
    again = Checkpoints(tmp_path, model=model, optimizer=optimizer)  # a restart never waits
    again.save(2)
    again.close()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


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


@contextmanager
def disk_watched() -> Iterator[list[tuple[float, str, str]]]:
    """When this rank puts what on the disk, and what it renames."""
    found: list[tuple[float, str, str]] = []
    real = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = path.stat().st_size
        real[0](descriptor)
        name = path.name.removesuffix(".tmp")  # DCP writes .metadata under another name first
        found.append((time.monotonic(), "synced", f"{name} {size}"))

    def renamed(path: Path, to: Path) -> Path:
        found.append((time.monotonic(), "renamed", f"{path.name} {to.name}"))
        return real[1](path, to)

    os.fsync, Path.rename = synced, renamed  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        os.fsync, Path.rename = real  # type: ignore[method-assign]


@pytest.mark.skipif(sys.platform != "linux", reason="reads names in /proc")
@ranks(4, timeout_s=110)
def test_all_is_on_the_disk_before_it_has_its_name_and_the_old_goes_after(tmp_path: Path) -> None:
    """A machine that loses its power keeps what was synced, in no other order than this."""
    model, optimizer = made(2, 2)
    options = CheckpointOptions(keep_last=1)
    its = Checkpoints(tmp_path / "run", model=model, optimizer=optimizer, options=options)
    its.save(1)
    with disk_watched() as mine:
        its.save(2)
    events = [event[1:] for event in sorted(chain.from_iterable(said_by_all(mine)))]
    named = events.index(("renamed", "step-2.partial step-2"))
    before, after = events[:named], [(what, of.split()[0]) for what, of in events[named + 1 :]]
    folder = tmp_path / "run" / "step-2"
    of_all = {file.name: file.size_bytes for file in Manifest.read(folder).files}
    of_all["manifest.json"] = (folder / "manifest.json").stat().st_size
    for name, size_bytes in of_all.items():
        assert ("synced", f"{name} {size_bytes}") in before, (name, before)
    # The folder last, which holds their names.
    assert before[-2][1].startswith("manifest.json ")
    assert before[-1][1].startswith("step-2.partial ")
    assert after == [("synced", "run"), ("renamed", "step-1")]  # to step-1.deleted


def edit_schema(folder: Path) -> None:
    its = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(its | {"schema": 99}))


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
    with pytest.raises(CheckpointError, match=r"step-1/manifest.json has schema 99"):
        loading.resume()
    if dist.get_rank() == 0:
        (folder / "step-1" / "manifest.json").write_text("{")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole, so the run cannot"):
        loading.resume()
    assert Checkpoints(tmp_path / "new", model=other, optimizer=others).resume() is None


@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(4, timeout_s=110)
def test_what_is_saved_after_going_back_stays_and_is_resumed_from(
    tmp_path: Path, asynchronous: bool
) -> None:
    model, optimizer = made(2, 2)
    options = CheckpointOptions(keep_last=2, asynchronous=asynchronous)
    with Checkpoints(tmp_path, model=model, optimizer=optimizer) as first:
        at_step = {}
        for step in (1, 2, 3, 4):
            train(model, optimizer, step)
            first.save(step)
            at_step[step] = values(model)
    with Checkpoints(tmp_path, model=model, optimizer=optimizer, options=options) as again:
        again.load(1)
        assert same(values(model), at_step[1])
        train(model, optimizer, 7)  # another branch
        again.save(2)
        again.wait()
        branch = values(model)
        assert not same(branch, at_step[2])
        assert said_by_all(sorted(path.name for path in tmp_path.glob("step-*"))) == (
            [["step-2", "step-4"]] * 4
        )
        assert (manifest := again.resume()) is not None
        assert manifest.step == 2
        assert same(values(model), branch)
        data = next((tmp_path / "step-2").glob("*.distcp"))
        again.load(4)  # still there, and older
        dist.barrier()
        if dist.get_rank() == 0:
            data.write_bytes(b"")
        dist.barrier()
        assert (manifest := again.resume()) is not None
        assert manifest.step == 4
        assert same(values(model), at_step[4])


@ranks(4, timeout_s=110)
def test_another_model_is_refused_with_names(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    Checkpoints(tmp_path / "new", model=model, optimizer=optimizer).save(0)
    train(model, optimizer, 0)
    Checkpoints(tmp_path, model=model, optimizer=optimizer).save(1)
    torch.manual_seed(0)
    longer: Any = shard(Layers(12), mesh_of(2, 2))
    wider, wider_optimizer = made(2, 2, last=19)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    for other, its, words in (
        (wider, wider_optimizer, r"another model: .*layers.1.weight \[17, 9\], not \[19, 9\]"),
        (
            longer,
            None,
            r"another model: it lacks layers.10.bias, .* and 10 more; it also has one, seen; of an",
        ),
        (
            model,
            sgd,
            r"another optimizer, .*: it also has optimizer.state.layers.0.bias.exp_avg, .* and 5 "
            r"more; its weights can be loaded alone",
        ),
    ):
        before = values(other)
        with pytest.raises(CheckpointError, match=f"step-1 is of {words}"):
            Checkpoints(tmp_path, model=other, optimizer=its).load(1)
        assert same(values(other), before)
    words = r"another optimizer, .*: it lacks optimizer\.param_groups\.layers.*\.dampening, .*betas"
    with pytest.raises(CheckpointError, match=words):  # and it has no states to be known by
        Checkpoints(tmp_path / "new", model=model, optimizer=sgd).load(0)


@ranks(2, timeout_s=110)
def test_another_optimizer_or_extra_is_called_that_and_the_weights_load(tmp_path: Path) -> None:
    model, optimizer = made(1, 2)
    train(model, optimizer, 0)
    Checkpoints(tmp_path, model=model, optimizer=optimizer).save(1)
    first = next(model.parameters()).requires_grad_(False)
    fewer = torch.optim.AdamW([p for p in model.parameters() if p is not first])
    with pytest.raises(CheckpointError, match=r"of one that trains other parameters: it also has "):
        Checkpoints(tmp_path, model=model, optimizer=fewer).load(1)
    with pytest.raises(CheckpointError, match=r"other things in `extra`: it lacks extra\.zz"):
        Checkpoints(
            tmp_path, model=model, optimizer=optimizer, extra={"zz": Refusing(saves=True)}
        ).load(1)
    saved = values(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    Checkpoints(tmp_path, model=model).load(1)
    assert same(values(model), saved)

    early = Layers()
    before = torch.optim.AdamW(early.parameters())
    its = Checkpoints(tmp_path / "other", model=shard(early, mesh_of(1, 2)), optimizer=before)
    with pytest.raises(CheckpointError, match=r"holds \d+ parameters that are not the model's"):
        its.save(1)
    assert not (tmp_path / "other").exists()


class Refusing:
    """Has no state on one rank alone, or cannot take one up there."""

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves

    def state_dict(self) -> dict[str, int]:
        if not self._saves and dist.get_rank() == 1:
            raise ValueError("none yet")
        return {"a": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not now")


@ranks(4, timeout_s=110)
def test_what_cannot_be_saved_or_found_is_refused_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    run = tmp_path / "run"

    def checkpoints(folder: Path, **more: Any) -> Checkpoints:
        return Checkpoints(folder, model=model, optimizer=optimizer, **more)

    def refused(words: str, act: Callable[[], object], kind: Any = CheckpointError) -> None:
        before = sorted(tmp_path.rglob("*"))
        dist.barrier()
        with pytest.raises(kind, match=words):
            act()
        dist.barrier()
        assert sorted(tmp_path.rglob("*")) == before

    its = checkpoints(run)
    its.save(1)
    if dist.get_rank() == 0:
        (tmp_path / "file").touch()
        (run / "step-2").touch()
    dist.barrier()
    other = tmp_path / "file" if dist.get_rank() == 3 else run
    saves, loads = {"it": Refusing(saves=False)}, {"it": Refusing(saves=True)}
    late = CheckpointOptions(asynchronous=True)
    refused("step-2 is a file, in the way of a folder", lambda: its.save(2))
    refused("file is a file, in the way of a fol", lambda: checkpoints(tmp_path / "file").save(1))
    refused("step is -1; give a whole number", lambda: its.save(-1))
    refused("step is 1.0; give a whole number", lambda: its.save(1.0))  # type: ignore[arg-type]
    refused("file is a file; name the folder that", checkpoints(tmp_path / "file").resume)
    refused("step-1 is itself a checkpoint; .* it: .*/run$", checkpoints(run / "step-1").resume)
    refused("rank 0 loads .*run/step-1, and rank 3 .*file/", lambda: checkpoints(other).load(1))
    for options in (CheckpointOptions(), late):
        failing = checkpoints(run, extra=saves, options=options)
        refused(r"none yet \(on rank 1\)$", lambda its=failing: its.save(3))
    checkpoints(run, extra=loads).save(4)
    kind = ValueError if dist.get_rank() == 1 else CommunicationError
    refused("not now", lambda: checkpoints(run, extra=loads).load(4), kind)
    assert its.resume() is not None


@ranks(4, timeout_s=110)
def test_slices_of_states_are_in_no_single_group(tmp_path: Path) -> None:
    model, optimizer = made(2, 2, kind=SLICED)
    train(model, optimizer, 0)
    options = CheckpointOptions(placement="partition_group")
    its = Checkpoints(tmp_path, model=model, optimizer=optimizer, options=options)
    with pytest.raises(CheckpointError, match="is held by rank 2, outside of the first"):
        its.save(1)
    assert list(tmp_path.iterdir()) == []
