"""Optimizer states in slices, through torch.distributed.checkpoint, between layouts and back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, said_by_all, shard, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mics_dtensor import gradient_accumulation
from mics_dtensor.errors import CheckpointError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 9), nn.Linear(9, 17)])
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.one


def made(replicate: int, partition: int, *, plain: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = shard(Uneven(), mesh_of(replicate, partition))
    if plain:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
            model(batch(step)).square().mean().backward()  # the same on every rank
        optimizer.step()
        optimizer.zero_grad()


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    path = Path(said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0])
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = get_state_dict(model, optimizer)
    holder = {"model": states[0], "optimizer": states[1]}
    dcp.load(holder, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=holder["model"],
        optim_state_dict=holder["optimizer"],
    )


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every state as one tensor, gathered by hand."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for parameter, states in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = states[key]
            if isinstance(optimizer, ReplicaShardedOptimizer):
                total = torch.full(parameter.shape, float("nan"))
                at = 0
                parts = []
                for offsets, sizes in value.boxes:
                    numel = torch.Size(sizes).numel()
                    parts.append((offsets, value.flat[at : at + numel].view(sizes).clone()))
                    at += numel
                for theirs in said_by_all(parts):
                    for offsets, part in theirs:
                        box = zip(offsets, part.shape, strict=True)
                        total[tuple(slice(a, a + n) for a, n in box)] = part
            else:
                total = whole(value)
            found[f"{names[parameter]}.{key}"] = total
        found[f"{names[parameter]}.step"] = states["step"].clone()
    return found


@ranks(4, timeout_s=110)
def test_every_layout_loads_every_other_and_goes_on_alike() -> None:
    layouts = {"(2, 2)": (2, 2), "(4, 1)": (4, 1), "(1, 4)": (1, 4), "plain": (2, 2)}
    for source in layouts:
        model, optimizer = made(*layouts[source], plain=source == "plain")
        train(model, optimizer, 0, 3)
        path, states = save(model, optimizer), whole_states(model, optimizer)
        for target in layouts:
            other, its = made(*layouts[target], plain=target == "plain")
            load(path, other, its)
            found = whole_states(other, its)
            assert found.keys() == states.keys()
            for name, state in states.items():
                assert torch.equal(found[name], state), (source, target, name)
            train(other, its, 3, 5)
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert whole(mine).shape == whole(theirs).shape
        train(model, optimizer, 3, 5)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.allclose(whole(mine), whole(theirs), rtol=1e-5), (source, target)


@ranks(4, timeout_s=110)
def test_whole_tensors_are_gathered_or_loaded_when_torch_is_asked_for_them() -> None:
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        model, optimizer = made(2, 2)
        train(model, optimizer, 0, 2)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        right = whole_states(model, optimizer)
        if dist.get_rank() == 0 or not cpu_offload:
            for name, its in states["state"].items():
                for key, value in its.items():
                    assert type(value) is torch.Tensor
                    assert torch.equal(value, right[f"{name}.{key}"])
        if cpu_offload:
            continue
        other, its = made(4, 1)
        set_optimizer_state_dict(other, its, states, options=options)
        for name, value in whole_states(other, its).items():
            assert torch.equal(value, right[name]), name


@ranks(4, timeout_s=110)
def test_saving_in_the_background_and_without_communication() -> None:
    model, optimizer = made(2, 2)
    train(model, optimizer, 0, 2)
    with count_collectives() as counted:
        states = optimizer.state_dict()
    assert counted.by_kind == {}
    before = whole_states(model, optimizer)
    path = Path(said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0])
    names = get_optimizer_state_dict(model, optimizer)
    pending = dcp.async_save({"optimizer": names}, checkpoint_id=path)
    train(model, optimizer, 2, 3)  # while it is written
    pending.result()
    other, its = made(2, 2)
    holder = {"optimizer": get_optimizer_state_dict(other, its)}
    dcp.load(holder, checkpoint_id=path)
    set_state_dict(
        other, its, model_state_dict=other.state_dict(), optim_state_dict=holder["optimizer"]
    )
    for name, state in whole_states(other, its).items():
        assert torch.equal(state, before[name])
    other, its = made(4, 1)
    with pytest.raises(CheckpointError, match="another layout"):
        its.load_state_dict(states)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 18), nn.Linear(18, 9)
        self.layers: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * 1.0  # no view, which FSDP2 warns of


def feedforward(*shape: int) -> tuple[nn.Module, Any]:
    """With (replicate, shard, tp) its products are tensor parallel; with two sizes they are not."""
    torch.manual_seed(0)
    model = Feedforward()
    mesh = mesh_of(*shape)
    if len(shape) == 3:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["replicate", "shard"]
    fully_shard(model, mesh=mesh)
    return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)


@ranks(8, timeout_s=110)
def test_tensor_parallel_states_move_to_a_layout_without_it_and_back() -> None:
    """Nine rows of a tensor-parallel part over two shards; the other layout has no such parts."""
    for source, target in (((2, 2, 2), (4, 2)), ((4, 2), (2, 2, 2))):
        model, optimizer = feedforward(*source)
        train(model, optimizer, 0, 3)
        path, right = save(model, optimizer), whole_states(model, optimizer)
        other, its = feedforward(*target)
        load(path, other, its)
        back, backs = feedforward(*source)
        load(save(other, its), back, backs)
        for there, optimizer_there in ((other, its), (back, backs)):
            found = whole_states(there, optimizer_there)
            assert found.keys() == right.keys()
            for name, state in right.items():
                assert torch.equal(found[name], state), (source, target, name)
            for mine, theirs in zip(there.parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(mine), whole(theirs)), (source, target)
        for each, its_optimizer in ((model, optimizer), (other, its)):
            train(each, its_optimizer, 3, 5)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.allclose(whole(mine), whole(theirs), rtol=1e-5, atol=1e-7)
