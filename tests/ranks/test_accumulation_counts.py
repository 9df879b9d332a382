"""Exact numbers of collectives, as formulas of the number of units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import Collectives, count_collectives
from harness.models import Sharding, Toy, mesh_of, shard_toy
from harness.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mics_dtensor.accumulate import gradient_accumulation

NUM_LAYERS = 3
AGREEMENT = 2  # messages: in the partition group, and over the replicas


def model_of(mesh: Any, reshard: bool | int, num_sharded: int) -> nn.Module:
    """`num_sharded` layers are units of their own; the root holds the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(NUM_LAYERS)))
    for layer in model[:num_sharded]:
        shard_toy(layer, Sharding(reshard=reshard), mesh)
    shard_toy(model, Sharding(reshard=reshard), mesh)
    return model


def steps(model: nn.Module, **options: Any) -> list[list[Collectives]]:
    """Five steps of three micro-steps; what each micro-step called."""
    seen: list[list[Collectives]] = []
    for step in range(5):
        seen.append([])
        with gradient_accumulation(model, num_micro_steps=3, **options) as accumulation:
            for k in range(3):
                with count_collectives() as count, accumulation.micro_step():
                    x = torch.full((2, 6), 1.0 + dist.get_rank() + k + step)
                    model(x).square().mean().backward()
                seen[-1].append(count)
        model.zero_grad()
    return seen


@pytest.mark.parametrize("reshard", [True, False, 2])
@ranks(4, timeout_s=120)
def test_every_collective_of_every_micro_step(reshard: bool | int) -> None:
    one_axis = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    for mesh in (one_axis, mesh_of(2, 2), mesh_of(1, 4)):
        if reshard == 2 and mesh.size(-1) == 2:
            continue  # as many ranks as shards: the same as True
        for num_sharded in (NUM_LAYERS, NUM_LAYERS - 1, 1):
            model = model_of(mesh, reshard, num_sharded)
            units = num_sharded + (num_sharded < NUM_LAYERS)
            root_reshards = num_sharded < NUM_LAYERS and reshard is not False
            again = (num_sharded + root_reshards) if reshard is not False else 0
            replicas = mesh.size(0) if mesh.ndim == 2 else 1
            bucketed = 1 if replicas > 1 else 0
            unit_by_unit = units if replicas > 1 else 0
            for size, messages in ((25 * 2**20, bucketed), (1, unit_by_unit)):
                agreement = AGREEMENT if replicas > 1 else 1
                expected = [
                    {"all_gather": units + again, "reduce_scatter": units, "all_reduce": hop}
                    for hop in (0, 0, messages + agreement)
                ]
                for number, step in enumerate(steps(model, bucket_size_bytes=size)):
                    if reshard is False:  # gathered once, and kept until an optimizer step
                        continue
                    got = [_kinds(count) for count in step]
                    assert got == expected, (mesh, num_sharded, size, number, got)


@ranks(4)
def test_a_micro_step_is_plain_hsdp_without_its_all_reduces() -> None:
    """The same calls, of the same bytes, in the same groups and order, but for the all-reduces."""
    for reshard in (True, False):
        mesh = mesh_of(2, 2)
        plain, ours = model_of(mesh, reshard, NUM_LAYERS), model_of(mesh, reshard, NUM_LAYERS)
        with count_collectives() as theirs:
            for _ in range(15):
                plain(torch.ones(2, 6)).square().mean().backward()
        mine = [call for step in steps(ours) for count in step for call in count.calls]
        without = [call for call in theirs.calls if call.kind != "all_reduce"]
        assert [call for call in mine if call.kind != "all_reduce"] == without
        assert sum(call.kind == "all_reduce" for call in theirs.calls) == 15 * NUM_LAYERS
        sent = [call for call in mine if call.kind == "all_reduce"]
        assert len(sent) == 5 * (1 + AGREEMENT)


@ranks(4)
def test_the_message_is_the_shards_in_the_dtype_asked_for() -> None:
    """fp32 by default, bf16 with second_hop_dtype; 3 layers of 6 * 6 + 6, two shards."""
    for dtype, itemsize in ((None, 4), (torch.bfloat16, 2)):
        seen = steps(model_of(mesh_of(2, 2), True, NUM_LAYERS), second_hop_dtype=dtype)
        biggest = max(c.message_bytes for c in seen[-1][-1].calls if c.kind == "all_reduce")
        assert biggest == 3 * (6 * 6 + 6) // 2 * itemsize


@ranks(4)
def test_overlap_adds_no_message() -> None:
    seen = steps(model_of(mesh_of(2, 2), True, NUM_LAYERS), overlap_boundary=True)
    assert [count.all_reduces for count in seen[-1]] == [0, 0, 1 + AGREEMENT]


@ranks(4)
def test_the_first_message_leaves_before_the_agreement() -> None:
    """Once it has been sent, as all replicas know; what nobody used is sent as zeros once at most,
    and its gradient is none. Units lie reversed: v, then u.
    """
    model = Toy({"u": {"a": (9, 3)}, "v": {"c": (2, 1)}})
    shard_toy(model, Sharding(), mesh_of(2, 2))
    seen: list[list[str]] = []
    for used in (("u.a", "v.c"), ("u.a", "v.c"), ("u.a",), ("u.a",), ("v.c",), ("u.a", "v.c")):
        model.zero_grad()
        with (
            gradient_accumulation(model, num_micro_steps=1, bucket_size_bytes=1) as accumulation,
            count_collectives() as count,
            accumulation.micro_step(),
        ):
            model({name: 8.0 + dist.get_rank() for name in used}).backward()
        names = {4: "v", 4 * (3 + 2): "agreement"}  # three numbers, and one a parameter
        sizes = [c.message_bytes for c in count.calls if c.kind == "all_reduce"]
        seen.append([names.get(size, "u") for size in sizes])
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name.removeprefix("units.") in used), name
    agreed = ["agreement", "agreement"]
    assert seen == [
        [*agreed, "v", "u"],
        ["v", *agreed, "u"],
        ["v", *agreed, "u"],  # zeros
        [*agreed, "u"],
        [*agreed, "v"],
        ["v", *agreed, "u"],
    ]


def _kinds(count: Collectives) -> dict[str, int]:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert set(count.by_kind) <= set(kinds)
    return {kind: count.num(kind) for kind in kinds}
