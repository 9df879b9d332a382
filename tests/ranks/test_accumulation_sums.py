"""Sums over micro-steps and ranks are those of one process (hazards 1.1-1.5, 1.10, 1.11, 1.18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import (
    Plan,
    Shape,
    Sharding,
    Toy,
    assert_gradients,
    assert_replicas_equal,
    flat_shapes,
    mesh_of,
    right_gradients,
    shard_toy,
)
from harness.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mics_dtensor.accumulate import gradient_accumulation

Units = Mapping[str, Mapping[str, Shape]]
SAME = {"u": {"a": (4, 4), "b": (4, 4), "c": (4, 4)}}
ODD = {"u": {"a": (5, 3), "b": (7,), "c": (1,)}}
APART = {"u": {"a": (4, 4)}, "v": {"b": (3,)}, "w": {"c": (1, 2)}}
OVERLAP: dict[str, Any] = {"overlap_boundary": True, "bucket_size_bytes": 1}

# What each micro-step uses, by letter; "-" is a micro-step without a backward.
ORDERS = ("a b", "ab a", "b ab b", "a b c", "c - ab", "abc a b c abc", "b b b b a")


def plan_of(order: str, units: Units) -> Plan:
    """Values that differ on every rank, micro-step and parameter; multiples of 8, hence exact."""
    name_of = {name: f"{unit}.{name}" for unit, its in units.items() for name in its}

    def plan(rank: int, micro_step: int) -> dict[str, float]:
        letters = order.split()[micro_step].strip("-")
        return {
            name_of[name]: 8.0 * (1 + (rank + 2 * micro_step + ord(name)) % 5) for name in letters
        }

    return plan


def step(model: Toy, plan: Plan, num_micro_steps: int, **options: Any) -> None:
    rank = dist.get_rank()
    with gradient_accumulation(model, num_micro_steps=num_micro_steps, **options) as accumulation:
        for micro_step in range(num_micro_steps):
            with accumulation.micro_step():
                if use := plan(rank, micro_step):
                    model(use).backward()


def check(
    units: Units,
    sharding: Sharding,
    mesh: DeviceMesh,
    plans: Mapping[str, Plan],
    *,
    dtype: torch.dtype = torch.float32,
    rtol: float = 0.0,
    **options: Any,
) -> None:
    """One model runs all plans, one after the other: nothing of one leaks into the next."""
    model = Toy(units, dtype)
    shard_toy(model, sharding, mesh)
    for order, plan in plans.items():
        num_micro_steps = len(order.split())
        step(model, plan, num_micro_steps, **options)
        right = right_gradients(
            flat_shapes(units), plan, num_micro_steps=num_micro_steps, divisor=sharding.divisor
        )
        what = (order, sharding, options, dtype)
        assert_gradients(model.named(), right, rtol=rtol, what=what)
        assert_replicas_equal(list(model.parameters()), mesh)
        model.zero_grad()


def orders_of(units: Units) -> dict[str, Plan]:
    return {order: plan_of(order, units) for order in ORDERS}


@ranks(4)
def test_the_rows_of_the_table() -> None:
    """1.1, 1.2, 1.3 with their own numbers: x = 1, then x = 10, on (2, 2)."""
    mesh = mesh_of(2, 2)
    ones: Plan = lambda _, k: {"u.a": 1.0} if k == 0 else {"u.b": 10.0}  # noqa: E731
    both: Plan = lambda _, k: {"u.a": 1.0, "u.b": 1.0} if k == 0 else {"u.a": 1.0}  # noqa: E731
    apart: Plan = lambda _, k: {"u.a": 1.0, "v.b": 1.0} if k == 0 else {"u.a": 1.0}  # noqa: E731
    check(SAME, Sharding(), mesh, {"1.1 row": ones})
    check(ODD, Sharding(), mesh, {"1.2 row": both})
    check(APART, Sharding(), mesh, {"1.3 row": apart, "again": lambda _, __: {"v.b": 1.0}})


@ranks(4, timeout_s=120)
def test_every_order_of_use_on_every_mesh() -> None:
    for replicate, shard in ((2, 2), (1, 4), (4, 1)):
        sharding, mesh = Sharding(replicate, shard), mesh_of(replicate, shard)
        for units in (SAME, ODD, APART):
            check(units, sharding, mesh, orders_of(units))
            check(units, sharding, mesh, orders_of(units), **OVERLAP)


@ranks(4, timeout_s=120)
def test_every_dtype() -> None:
    """1.5 and its family; sums are fp32, and each `.grad` has the parameter's dtype."""
    mesh, bf16 = mesh_of(2, 2), torch.bfloat16
    for dtype, param_dtype, reduce_dtype in (
        (torch.float32, bf16, torch.float32),
        (torch.float32, bf16, None),
        (torch.float32, None, bf16),
        (bf16, None, torch.float32),
        (bf16, None, None),
    ):
        sharding = Sharding(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        for units in (ODD, APART):
            check(units, sharding, mesh, orders_of(units), dtype=dtype)
            check(units, sharding, mesh, orders_of(units), dtype=dtype, **OVERLAP)


@ranks(4, timeout_s=120)
def test_every_divide_factor() -> None:
    """1.11: None is the mean, a factor divides the sum, on any number of shards."""
    for replicate, shard in ((2, 2), (4, 1), (1, 4)):
        mesh = mesh_of(replicate, shard)
        for factor, force_sum in ((None, True), (1, True), (2, True), (4, True), (300, True)):
            sharding = Sharding(replicate, shard, divide_factor=factor, force_sum=force_sum)
            rtol = 1e-6 if factor == 300 else 0.0
            for options in ({}, OVERLAP):
                check(ODD, sharding, mesh, orders_of(ODD), rtol=rtol, **options)
    # Without force-sum gloo can only average: the factor that equals the shard size.
    sharding = Sharding(divide_factor=2)
    check(ODD, sharding, mesh_of(2, 2), orders_of(ODD))


@ranks(4)
def test_half_precision_on_the_wire_does_not_divide_twice() -> None:
    """fp16 makes FSDP2 divide before and after: with one shard it did so beside the factor."""
    for replicate, shard in ((2, 2), (4, 1)):
        for factor in (None, 2, 4):
            sharding = Sharding(replicate, shard, reduce_dtype=torch.float16, divide_factor=factor)
            check(ODD, sharding, mesh_of(replicate, shard), orders_of(ODD), rtol=1e-3)


@ranks(4)
def test_a_long_sum_of_narrow_gradients_keeps_every_bit() -> None:
    """1.10: parameters in bf16, x = 256, then eight times 1: 264, where bf16 would stay at 256."""
    for reduce_dtype in (torch.float32, None):
        sharding = Sharding(reduce_dtype=reduce_dtype)
        model = Toy({"u": {"a": (3,)}}, torch.bfloat16)
        shard_toy(model, sharding)
        step(model, lambda _, k: {"u.a": 1.0 if k else 256.0}, 9)
        gradient = model.units["u"].a.grad.full_tensor()
        assert gradient.dtype == torch.bfloat16
        assert gradient[0].item() == 264.0


@ranks(4, timeout_s=120)
def test_ranks_that_use_different_parameters() -> None:
    """1.18: a on one replica, b on the other; and on the ranks of one partition group."""
    mesh = mesh_of(2, 2)
    for units in (SAME, ODD):
        plans: dict[str, Plan] = {
            "by replica": lambda r, k: {"u.a": 8.0 + k} if r < 2 else {"u.b": 80.0},
            "by shard": lambda r, k: {"u.a": 8.0 * (k + 1)} if r % 2 else {"u.b": 80.0},
            "by rank": lambda r, k: {f"u.{'abc'[(r + k) % 3]}": 8.0 * (r + 1)},
            "on one rank": lambda r, _: {"u.a": 8.0, "u.c": 16.0} if r == 3 else {"u.a": 8.0},
        }
        for options in ({}, OVERLAP, {"bucket_size_bytes": 1}):
            check(units, Sharding(), mesh, plans, **options)
            narrow = Sharding(reduce_dtype=torch.float32)
            check(units, narrow, mesh, plans, dtype=torch.bfloat16, **options)
    # A unit that one replica sends as FSDP2 laid it out, padding and all, and the other as zeros.
    two = {"u": {"a": (5, 3), "b": (7,)}, "v": {"c": (3,), "d": (5,)}}
    padded: dict[str, Plan] = {
        "by replica": lambda r, _: {"u.a": 8.0, "u.b": 8.0} if r < 2 else {"v.c": 8.0, "v.d": 16.0},
    }
    check(two, Sharding(), mesh, padded, bucket_size_bytes=1)
    check(two, Sharding(), mesh, padded, **OVERLAP)
    whole_unit: dict[str, Plan] = {
        "by replica": lambda r, _: {"u.a": 8.0, "v.b": 8.0} if r < 2 else {"w.c": 16.0},
    }
    for options in ({}, OVERLAP, {"bucket_size_bytes": 1}):
        check(APART, Sharding(), mesh, whole_unit, **options)


@ranks(4)
def test_the_numbers_of_row_18() -> None:
    model = Toy({"u": {"a": (1,), "b": (1,), "c": (1,)}})
    shard_toy(model, Sharding())
    step(model, lambda r, _: {"u.a": 1.0} if r < 2 else {"u.b": 10.0}, 1)
    got = {name: p.grad for name, p in model.named().items()}
    assert got["u.a"].full_tensor().item() == 0.5  # type: ignore[union-attr]
    assert got["u.b"].full_tensor().item() == 5.0  # type: ignore[union-attr]
    assert got["u.c"] is None


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (6, 1)])
@ranks(6, timeout_s=120)
def test_three_replicas(shape: tuple[int, int]) -> None:
    mesh = mesh_of(*shape)
    for factor in (None, 1):
        sharding = Sharding(*shape, divide_factor=factor, force_sum=True)
        for options in ({}, OVERLAP):
            check(ODD, sharding, mesh, orders_of(ODD), rtol=1e-6, **options)


@ranks(8, timeout_s=120)
def test_eight_ranks() -> None:
    for shape in ((2, 4), (4, 2)):
        for options in ({}, OVERLAP):
            check(ODD, Sharding(*shape), mesh_of(*shape), orders_of(ODD), **options)


@ranks(8, timeout_s=120)
def test_tensor_parallel_underneath() -> None:
    """(2, 2, 2), sizes 4, 6 and 16, some weights under tensor parallel and some not."""
    mesh = mesh_of(2, 2, 2)
    position = dist.get_rank() // 2  # of the data: the two ranks of tensor parallel share it
    for size in (4, 6, 16):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))
        tensor_parallel = ColwiseParallel(output_layouts=_replicated())
        parallelize_module(model[0], mesh["tp"], tensor_parallel)
        shard_toy(model, Sharding(), mesh["replicate", "shard"])
        data = torch.randn(4, 3, 2, size, generator=torch.Generator().manual_seed(size))
        for place in range(4):
            for micro_step in range(3):
                (plain(data[place, micro_step]).square().sum() / 4).backward()
        with gradient_accumulation(model, num_micro_steps=3) as accumulation:
            for micro_step in range(3):
                with accumulation.micro_step():
                    model(data[position, micro_step]).square().sum().backward()
        for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = mine.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(gradient, right.grad, rtol=1e-4, atol=1e-5)


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
