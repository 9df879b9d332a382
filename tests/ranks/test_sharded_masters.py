"""bf16 shards, and the fp32 weights only in the slices: the same training as fp32 shards."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, said_by_all, shard, stack, whole
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate

from mics_dtensor import gradient_accumulation
from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of

SHARDED: dict[str, Any] = {"master_weights": "sharded", "lr": 1e-2, "weight_decay": 0.1}


def bf16_stack(
    mesh: DeviceMesh, reduce_dtype: torch.dtype | None, param_dtype: Any = torch.bfloat16
) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    return shard(stack(), mesh, mp_policy=policy)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 20,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    losses = []
    for step in range(num_steps):
        with gradient_accumulation(model, num_micro_steps=3) as accumulation:
            for micro in range(3):
                with accumulation.micro_step():
                    x = batch(step, micro, dist.get_rank()).to(dtype)
                    loss = (model(x) - x[:, :3]).square().mean()
                    loss.backward()
                    losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@ranks(4, timeout_s=110)
def test_losses_and_weights_are_those_of_fp32_shards_bit_for_bit() -> None:
    mesh = mesh_of(2, 2)
    for reduce_dtype in (torch.float32, None):
        plain = bf16_stack(mesh, reduce_dtype)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        model = bf16_stack(mesh, reduce_dtype)
        optimizer = ReplicaShardedOptimizer(model, torch.optim.AdamW, **SHARDED)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # after the master
        assert train(model, optimizer) == train(plain, reference)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert local_of(mine).dtype == torch.bfloat16
            assert torch.equal(local_of(mine), local_of(theirs).bfloat16())
        locals_ = [local_of(p.detach()) for p in model.parameters()]
        assert equal_over(locals_, mesh.get_group("replicate"))


@ranks(2, timeout_s=110)
def test_a_master_follows_weights_that_somebody_writes_and_keeps_its_bits_elsewhere() -> None:
    model = bf16_stack(mesh_of(2, 1), torch.float32, param_dtype=None)  # cast by hand
    optimizer = ReplicaShardedOptimizer(model, torch.optim.AdamW, **SHARDED)
    with pytest.raises(ConfigError, match=r"model\.to\(torch\.bfloat16\)"):
        optimizer.step()
    model.to(torch.bfloat16)
    train(model, optimizer, 3, torch.bfloat16)
    masters = {name: its.flat.clone() for name, its in model.state_dict().items()}
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    optimizer.step()  # without gradients
    for name, its in model.state_dict().items():
        if name == "head.bias":
            assert bool((its.flat == 3.0).all())
        else:
            assert torch.equal(its.flat, masters[name])


def made(shape: tuple[int, int], kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = bf16_stack(mesh_of(*shape), torch.float32)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if kind == "plain":
        return model, torch.optim.AdamW(model.parameters(), **options)
    return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, master_weights=kind, **options)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states as whole tensors, by torch's own gathering."""
    options = StateDictOptions(full_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    found = dict(weights)
    for name, its in states["state"].items():
        found |= {f"{name}.{key}": value for key, value in its.items()}
    for value in found.values():
        assert type(value) is torch.Tensor
    return found


def same_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with gradient_accumulation(model, num_micro_steps=1) as accumulation, accumulation.micro_step():
        model(batch(3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(4, timeout_s=110)
def test_masters_are_saved_under_the_names_of_the_model_and_move_between_layouts() -> None:
    kinds = [("sharded", (2, 2)), ("sharded", (4, 1)), ("fp32", (2, 2)), ("plain", (1, 4))]
    for kind, shape in kinds:
        model, optimizer = made(shape, kind)
        train(model, optimizer, 2)
        path = said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
        with count_collectives() as counted:
            states = get_state_dict(model, optimizer)
        assert counted.by_kind == {}
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = [its for its in metadata.values() if isinstance(its, TensorStorageMetadata)]
        assert {its.properties.dtype for its in tensors} == {torch.float32}
        before = held(model, optimizer)
        for other_kind, other_shape in kinds:
            other, its = made(other_shape, other_kind)
            states = get_state_dict(other, its)
            holder = {"model": states[0], "optimizer": states[1]}
            dcp.load(holder, checkpoint_id=path)
            set_state_dict(
                other,
                its,
                model_state_dict=holder["model"],
                optim_state_dict=holder["optimizer"],
            )
            found = held(other, its)
            assert found.keys() == before.keys()
            for name, value in found.items():
                assert torch.equal(value, before[name]), (kind, other_kind, name)
            if other_kind == "sharded":  # what is trained next is rounded from what was loaded
                for name, parameter in other.named_parameters():
                    assert torch.equal(whole(parameter), before[name].bfloat16()), name
            if kind == other_kind == "sharded":
                same_data(other, its)
        same_data(model, optimizer)
        if kind == "sharded":
            other, its = made(shape, kind)
            set_model_state_dict(
                other, before_weights(before, other), options=StateDictOptions(full_state_dict=True)
            )
            for name, value in get_model_state_dict(
                other, options=StateDictOptions(full_state_dict=True)
            ).items():
                assert torch.equal(value, before[name]), name


def before_weights(found: dict[str, torch.Tensor], model: nn.Module) -> dict[str, Any]:
    return {name: found[name].clone() for name, _ in model.named_parameters()}


@ranks(2, timeout_s=110)
def test_saving_in_the_background_and_loading_into_the_state_dict_alone() -> None:
    model, optimizer = made((2, 1), "sharded")
    train(model, optimizer, 1)
    path = said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    before = {name: its.flat.clone() for name, its in model.state_dict().items()}
    its_own = dist.new_group()  # its thread would meet training in the world's
    pending = dcp.async_save(model.state_dict(), checkpoint_id=path, process_group=its_own)
    train(model, optimizer, 1)  # while it is written
    pending.result()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    with pytest.raises(CheckpointError, match=r"model\.load_state_dict"):
        optimizer.step()
    model.load_state_dict(state)
    for name, its in model.state_dict().items():
        assert torch.equal(its.flat, before[name])
    optimizer.step()


@ranks(4, timeout_s=110)
def test_hooks_that_compute_with_the_state_dict_are_given_whole_weights() -> None:
    """As torchtitan's fused projections do: halves under names of their own, and back."""

    def split(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        both = state.pop(f"{prefix}linear.weight")
        both = both.redistribute(both.device_mesh, [Replicate()] * both.device_mesh.ndim)
        state[f"{prefix}upper"], state[f"{prefix}lower"] = both[:2], both[2:]

    def merge(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        parts = [state.pop(f"{prefix}{name}") for name in ("upper", "lower")]
        state[f"{prefix}linear.weight"] = torch.cat(parts)

    def hooked() -> tuple[Any, torch.optim.Optimizer]:
        model, optimizer = made((2, 2), "sharded")
        layer: Any = model.layers[0]
        layer.register_state_dict_post_hook(split)
        layer.register_load_state_dict_pre_hook(merge)
        return model, optimizer

    model, optimizer = hooked()
    train(model, optimizer, 2)
    path = said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    dcp.save(model.state_dict(), checkpoint_id=path)
    other, its = hooked()
    state = other.state_dict()
    assert {"layers.0.upper", "layers.0.lower"} < state.keys()
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    for mine, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert mine.dtype == torch.float32
        both = (getattr(value, "flat", None) for value in (mine, theirs))
        a, b = (whole(v) if f is None else f for v, f in zip((mine, theirs), both, strict=True))
        assert torch.equal(a, b)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(theirs))
    its.step()
