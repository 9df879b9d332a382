"""A drawn case of gradient accumulation, and how a rank runs and checks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.models import (
    Shape,
    Sharding,
    Toy,
    Use,
    assert_gradients,
    assert_replicas_equal,
    flat_shapes,
    mesh_of,
    pattern,
    right_gradients,
    shard_toy,
)
from mics_dtensor.accumulate import gradient_accumulation


@dataclass(frozen=True)
class Case:
    """One or more optimizer steps of one model on one mesh."""

    sharding: Sharding
    dtype: torch.dtype  # of the parameters
    units: dict[str, dict[str, Shape]]
    # [step][micro-step][rank]: parameter name -> value; 0 runs the unit without the parameter.
    steps: list[list[list[Use]]]
    entry: dict[str, int] = field(default_factory=dict)  # gradients found at entry, first step
    backwards: int = 1  # per micro-step; each with the whole of what it uses
    overlap: bool = False
    bucket_size_bytes: int = 25 * 2**20
    announced: bool = True


@lru_cache
def mesh_for(replicate: int, shard: int) -> DeviceMesh:
    """Meshes live as long as the ranks: every case of one shape shares its groups."""
    return mesh_of(replicate, shard)


def run_case(case: Case) -> None:
    """Run on every rank, and compare every gradient with what one process would have."""
    rank, shapes = dist.get_rank(), flat_shapes(case.units)
    mesh = mesh_for(case.sharding.replicate, case.sharding.shard)
    model = Toy(case.units, case.dtype)
    shard_toy(model, case.sharding, mesh)
    named = model.named()
    for number, micro_steps in enumerate(case.steps):
        entry = case.entry if number == 0 else {}
        for name, value in entry.items():
            named[name].grad = _gradient(named[name], shapes[name], value)
        with gradient_accumulation(
            model,
            num_micro_steps=len(micro_steps) if case.announced else None,
            overlap_boundary=case.overlap,
            bucket_size_bytes=case.bucket_size_bytes,
        ) as accumulation:
            for position, uses in enumerate(micro_steps):
                last = None if case.announced else position == len(micro_steps) - 1
                # A unit that a rank runs without its parameters must be in its backward all the
                # same: that much FSDP2 needs of the ranks of a partition group.
                model.grad_input = any(0 in use.values() for use in uses)
                with accumulation.micro_step(last=last):
                    for _ in range(case.backwards):
                        loss = model(uses[rank])
                        if loss.requires_grad:
                            loss.backward()
        right = right_gradients(
            shapes,
            lambda rank, k, micro_steps=micro_steps: micro_steps[k][rank],
            num_micro_steps=len(micro_steps),
            divisor=case.sharding.divisor / case.backwards,
        )
        for name, value in entry.items():
            mine = pattern(shapes[name]).double() * value
            right[name] = mine if (other := right[name]) is None else mine + other
        assert_gradients(named, right, rtol=_tolerance(case), what=f"step {number}")
        for parameter in named.values():
            assert parameter.grad is None or parameter.grad.dtype == case.dtype
        assert_replicas_equal(list(named.values()), mesh)
        model.zero_grad()


def _gradient(parameter: torch.Tensor, shape: Shape, value: float) -> torch.Tensor:
    """The shard of value * pattern that belongs to this rank."""
    from torch.distributed.tensor import distribute_tensor

    assert isinstance(parameter, DTensor)
    whole = (pattern(shape) * value).to(parameter.dtype)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _tolerance(case: Case) -> float:
    """Zero where every number on the way is exact: small multiples over powers of two."""
    sharding = case.sharding
    exact = float(sharding.divisor).is_integer() and int(sharding.divisor) in (1, 2, 4, 8, 16)
    narrow = torch.bfloat16 in (case.dtype, sharding.param_dtype, sharding.reduce_dtype)
    if exact:
        return 0.0
    return 2e-2 if narrow else 1e-6
