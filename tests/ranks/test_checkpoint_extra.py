"""What is saved as `extra` comes back as it was, whatever its owner holds when a run is resumed."""

from __future__ import annotations

import json
import logging
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.checkpointed import SLICED, made, train
from harness.ranks import ranks
from harness.sharded import mesh_of, shard, stack, whole
from torch import nn
from torch.distributed.tensor import DTensor

from mics_dtensor.checkpoint import placement
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.manifest import Manifest, files_of
from mics_dtensor.errors import CheckpointError


class Anything:
    """Has the state that it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class LazyEma:
    """Holds nothing until its first update, as many averages do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.shadow: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name not in self.shadow:
                self.shadow[name] = parameter.detach().clone()
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@ranks(4, timeout_s=110)
def test_an_average_that_is_empty_at_first_is_resumed_on_every_layout(tmp_path: Path) -> None:
    for kind in ("", SLICED):
        folder = tmp_path / f"run{kind}"
        model, optimizer = made(2, 2, kind=kind)
        ema = LazyEma(model)
        for step in range(2):
            train(model, optimizer, step)
            ema.update()
        options = CheckpointOptions(asynchronous=kind == SLICED)
        with Checkpoints(
            folder, model=model, optimizer=optimizer, extra={"ema": ema}, options=options
        ) as its:
            its.save(1)
        for layout in ((2, 2), (4, 1), (1, 4)):
            other, others = made(*layout, kind=kind, seed=3)
            found = LazyEma(other)
            Checkpoints(folder, model=other, optimizer=others, extra={"ema": found}).resume()
            assert found.shadow.keys() == ema.shadow.keys()
            for name, parameter in other.named_parameters():
                its_value: Any = found.shadow[name]
                assert its_value.placements == parameter.placements  # type: ignore[attr-defined]
                assert torch.equal(whole(its_value), whole(ema.shadow[name]))
            train(other, others, 2)
            found.update()  # it can go on


@ranks(4, timeout_s=110)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_that_was_saved_comes_back_as_it_was(tmp_path: Path, asynchronous: bool) -> None:
    """Numbers as keys, empty containers, kinds of mappings, tuples, lists around tensors, alone."""
    model, optimizer = made(2, 2)
    rank = dist.get_rank()
    ordered = OrderedDict([("b", torch.ones(2)), ("a", torch.zeros(3, dtype=torch.int64))])
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]  # as nn.Module's has
    saved: dict[str, Any] = {
        "hist": {"loss": {1: 0.5, 2: 0.25, -3: None}, (4, 5): "both", None: True, "empty": {}},
        "ordered": ordered,
        "lists": [[], [{}], [torch.arange(4), {"x": (1, 2)}], "text", [1, 2]],
        "nothing": {},
        "alone": torch.full((2,), 7.0, dtype=torch.float64),
        "number": 3,
        f"of rank {rank}": {"seed": rank},
    }
    for step, own in enumerate((None, {}, {"hist": {"loss": {1: 9.0, 7: 9.0}}, "lists": [1]})):
        folder = tmp_path / str(step)
        extra: Any = {name: Anything(value) for name, value in saved.items()}
        options = CheckpointOptions(asynchronous=asynchronous)
        with Checkpoints(
            folder, model=model, optimizer=optimizer, extra=extra, options=options
        ) as its:
            its.save(step)
        fresh: Any = {name: Anything({} if own is None else own.get(name, {})) for name in saved}
        Checkpoints(folder, model=model, optimizer=optimizer, extra=fresh).resume()
        for name, value in saved.items():
            assert alike(fresh[name].state, value), (name, fresh[name].state)
        assert fresh["ordered"].state._metadata == {"version": 2}


def alike(one: Any, other: Any) -> bool:
    """To the type of each container and key, and in this order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one], [(type(key), key) for key in other]
        return keys[0] == keys[1] and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@ranks(4, timeout_s=110)
def test_an_optimizer_in_extra_goes_on_with_its_states(tmp_path: Path) -> None:
    """A second optimizer, new at resume, whose states are by number."""

    def optimizers(model: nn.Module) -> tuple[Any, Any]:
        parameters = list(model.parameters())
        return (
            torch.optim.SGD(parameters[:2], lr=1e-2, momentum=0.9),
            torch.optim.AdamW(parameters[2:], lr=1e-2),
        )

    def steps(model: nn.Module, both: tuple[Any, Any], *numbers: int) -> None:
        for number in numbers:
            train(model, both[0], number)
            torch.manual_seed(number)
            for parameter in both[1].param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter) * (number + 1)
            both[1].step()
            both[1].zero_grad()

    straight, _ = made(2, 2)
    both = optimizers(straight)
    steps(straight, both, 0, 1, 2)
    model, _ = made(2, 2)
    both = optimizers(model)
    steps(model, both, 0, 1)
    Checkpoints(tmp_path, model=model, optimizer=both[0], extra={"adamw": both[1]}).save(2)
    model, _ = made(2, 2, seed=5)
    both = optimizers(model)
    Checkpoints(tmp_path, model=model, optimizer=both[0], extra={"adamw": both[1]}).resume()
    steps(model, both, 2)
    for mine, theirs in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(theirs))


@ranks(4, timeout_s=110)
def test_names_inside_that_differ_from_rank_to_rank_come_back_on_all(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    rank = dist.get_rank()
    loader: Any = Anything({f"rank {rank}": {"at": 10 + rank, "rest": [rank] * rank}})
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra={"data": loader}).save(1)
    found: Any = Anything({})
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra={"data": found}).resume()
    assert found.state == {f"rank {r}": {"at": 10 + r, "rest": [r] * r} for r in range(4)}


@ranks(4, timeout_s=110)
def test_what_could_not_come_back_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = made(2, 2)
    rank = dist.get_rank()
    part = next(model.parameters()).detach()
    for state, words in (
        ({1: 0, "1": 1}, r"two values of extra\.it would both be called extra\.it\.1 in a"),
        ({"a": {"b": 0}, "a.b": 1}, r"would both be called extra\.it\.a\.b"),
        ({"pair": (part, part)}, r"extra\.it\.pair is a tuple that holds parts of distributed"),
        ({(lambda: 0): 1}, r"the keys of a state_dict in `extra` cannot be written"),
        ({"x": rank if rank != 2 else torch.ones(1)}, r"extra\.it\.x is another kind .* on rank 2"),
    ):
        its = Checkpoints(
            tmp_path / "run", model=model, optimizer=optimizer, extra={"it": Anything(state)}
        )
        with pytest.raises(CheckpointError, match=words):
            its.save(1)
        dist.barrier()
        assert not (tmp_path / "run" / "step-1").exists()
        assert not (tmp_path / "run" / "step-1.partial").exists()


@ranks(4, timeout_s=110)
def test_a_distributed_value_like_no_parameter_needs_a_place(tmp_path: Path) -> None:
    """Another model's, say: it loads into one that is there, and else is refused with its name."""
    model, optimizer = made(2, 2)
    other: Any = shard(stack(7), mesh_of(2, 2))
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra={"d": other}).save(1)
    again: Any = shard(stack(7, seed=3), mesh_of(4, 1))
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra={"d": again}).resume()
    for mine, theirs in zip(again.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(theirs))
    nothing: Any = {"d": Anything({})}
    loading = Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=nothing)
    with pytest.raises(CheckpointError, match=r"extra\.d\.\S+ is a distributed tensor \[7.* lies"):
        loading.resume()
    assert isinstance(next(other.parameters()), DTensor)


@ranks(4, timeout_s=110)
def test_what_is_there_on_one_side_alone_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made(2, 2)
    a: Any = {"a": Anything({"x": 1})}
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=a).save(1)
    for state in ({"y": 1}, {}):
        more: Any = a | {"b": Anything(state)}
        loading = Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=more)
        with pytest.raises(CheckpointError, match=r"other things in `extra`: it lacks extra\.b;"):
            loading.resume()
    with caplog.at_level(logging.WARNING):
        Checkpoints(tmp_path, model=model, optimizer=optimizer).resume()
    said = [record.getMessage() for record in caplog.records]
    assert (dist.get_rank() == 0) == any("no rank has given it: a" in words for words in said)


@ranks(4, timeout_s=110)
def test_a_checkpoint_without_outlines_loads_into_what_is_there(tmp_path: Path) -> None:
    """As versions before wrote them: what is not there is refused, and nothing is lost unsaid."""
    model, optimizer = made(2, 2)

    def extra(state: Any) -> Any:
        return {"it": Anything(state)}

    real = placement.merged
    placement.merged = lambda _: None  # type: ignore[assignment]
    try:
        its = extra({"hist": {1: 0.5}, "t": torch.ones(2)})
        Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=its).save(1)
    finally:
        placement.merged = real
    if dist.get_rank() == 0:  # the names of this rank's own outlines go too
        path = tmp_path / "step-1"
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data.pop("extra:", None)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        manifest = Manifest.read(path)
        files = files_of(path, [file.name for file in manifest.files])
        written = json.loads((path / "manifest.json").read_text())
        written["files"] = [vars(file) for file in files]
        (path / "manifest.json").write_text(json.dumps(written))
    dist.barrier()
    found = extra({"hist": {1: 9.0}, "t": torch.zeros(2)})
    Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=found).resume()
    assert alike(found["it"].state, {"hist": {1: 0.5}, "t": torch.ones(2)})
    for state in ({}, {"t": torch.zeros(2)}):
        loading = Checkpoints(tmp_path, model=model, optimizer=optimizer, extra=extra(state))
        with pytest.raises(CheckpointError, match=r"it also has extra\.it\.hist\.1.* earlier vers"):
            loading.resume()
