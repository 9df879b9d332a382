"""Sums over micro-steps and ranks are those of one process (hazards 1.1-1.5, 1.10, 1.11, 1.18)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from harness.models import (
    Plan,
    Shape,
    Sharding,
    Toy,
    assert_gradients,
    flat_shapes,
    mesh_of,
    right_gradients,
    shard_toy,
)

from mics_dtensor.accumulate import gradient_accumulation

Units = Mapping[str, Mapping[str, Shape]]
ONE_UNIT = {"u": {"a": (4, 4), "b": (4, 4), "c": (4, 4)}}
OTHER_SHAPES = {"u": {"a": (5, 3), "b": (7,), "c": (1,)}}
APART = {"u": {"a": (4, 4)}, "v": {"b": (3,)}, "w": {"c": (1, 2)}}
WAYS = (  # of opening the context; every sum must be the same in all
    {},
    {"overlap_boundary": True},
    {"bucket_size_bytes": 1},
    {"overlap_boundary": True, "bucket_size_bytes": 1},
)


def run(model: Toy, plan: Plan, num_micro_steps: int, **options: object) -> None:
    rank = dist.get_rank()
    with gradient_accumulation(
        model,
        num_micro_steps=num_micro_steps,
        **options,  # type: ignore[arg-type]
    ) as accumulation:
        for micro_step in range(num_micro_steps):
            with accumulation.micro_step():
                if use := plan(rank, micro_step):
                    model(use).backward()


def check(units: Units, sharding: Sharding, plan: Plan, num_micro_steps: int) -> None:
    """Two steps, so that nothing of the first leaks into the second."""
    mesh = mesh_of(sharding.replicate, sharding.shard)
    for options in WAYS:
        model = Toy(units)
        shard_toy(model, sharding, mesh)
        named = model.named()
        right = right_gradients(
            flat_shapes(units), plan, num_micro_steps=num_micro_steps, divisor=sharding.divisor
        )
        for step in range(2):
            run(model, plan, num_micro_steps, **options)
            what = (units, sharding, num_micro_steps, options, step)
            assert_gradients(
                named, right, what=what, rtol=0 if sharding.divisor in (1, 2, 4, 8) else 2e-2
            )
            model.zero_grad()
