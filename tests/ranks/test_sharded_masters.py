"""bf16 shards, and the fp32 weights only in the slices: the same training as fp32 shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, shard, stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from mics_dtensor import gradient_accumulation
from mics_dtensor.errors import ConfigError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of

SHARDED: dict[str, Any] = {"master_weights": "sharded", "lr": 1e-2, "weight_decay": 0.1}


def bf16_stack(mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return shard(stack(), mesh, mp_policy=policy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 20) -> list[float]:
    losses = []
    for step in range(num_steps):
        with gradient_accumulation(model, num_micro_steps=3) as accumulation:
            for micro in range(3):
                with accumulation.micro_step():
                    x = batch(step, micro, dist.get_rank())
                    loss = (model(x) - x[:, :3]).square().mean()
                    loss.backward()
                    losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@ranks(4)
def test_losses_and_weights_are_those_of_fp32_shards_bit_for_bit() -> None:
    mesh = mesh_of(2, 2)
    for reduce_dtype in (torch.float32, None):
        plain = bf16_stack(mesh, reduce_dtype)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        model = bf16_stack(mesh, reduce_dtype)
        optimizer = ReplicaShardedOptimizer(model, torch.optim.AdamW, **SHARDED)
        model.to(torch.bfloat16)  # the master was taken before the cast
        assert train(model, optimizer) == train(plain, reference)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert local_of(mine).dtype == torch.bfloat16
            assert torch.equal(local_of(mine), local_of(theirs).bfloat16())
        locals_ = [local_of(p.detach()) for p in model.parameters()]
        assert equal_over(locals_, mesh.get_group("replicate"))


@ranks(2)
def test_a_master_follows_weights_that_somebody_writes_and_keeps_its_bits_elsewhere() -> None:
    model = bf16_stack(mesh_of(2, 1), torch.float32)
    optimizer = ReplicaShardedOptimizer(model, torch.optim.AdamW, **SHARDED)
    with pytest.raises(ConfigError, match=r"model\.to\(torch\.bfloat16\)"):
        optimizer.step()
    model.to(torch.bfloat16)
    train(model, optimizer, 3)
    masters = {p: s["master"].flat.clone() for p, s in optimizer.state.items()}
    bias = model.head.bias
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["head.bias"] = torch.full_like(state["head.bias"], 3.0)
    model.load_state_dict(state)
    optimizer.step()  # without gradients
    for parameter, states in optimizer.state.items():
        now = states["master"].flat
        if parameter is bias:
            assert bool((now == 3.0).all())
        else:
            assert torch.equal(now, masters[parameter])
