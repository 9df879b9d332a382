"""The counter is exact: known calls one by one, plain FSDP2 as formulas of the number of units."""

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

WIDTH = 8  # a unit is one WIDTH x WIDTH matrix of fp32
UNIT_BYTES = WIDTH * WIDTH * 4


def sharded_model(mesh: DeviceMesh, *, num_units: int, reshard: bool) -> nn.Module:
    """`num_units` units of one matrix each, and a root unit that owns nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_units)))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def forward_backward(model: nn.Module) -> None:
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, WIDTH)).square().sum().backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("num_units", [1, 3])
@ranks(2)
def test_fsdp_on_one_axis(num_units: int, reshard: bool) -> None:
    model = sharded_model(init_device_mesh("cpu", (2,)), num_units=num_units, reshard=reshard)
    for _ in range(3):  # CommDebugMode fails on the second
        with count_collectives() as count:
            forward_backward(model)
        gathers = num_units * (2 if reshard else 1)
        assert count.by_kind == {"all_gather": gathers, "reduce_scatter": num_units}
        assert count.bytes_by_kind == {
            "all_gather": gathers * UNIT_BYTES,
            "reduce_scatter": num_units * UNIT_BYTES,
        }
        assert {call.ranks for call in count.calls} == {(0, 1)}


@pytest.mark.parametrize("num_units", [1, 3])
@ranks(4)
def test_hsdp_on_two_axes(num_units: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh, num_units=num_units, reshard=True)
    rank = dist.get_rank()
    partition_group = (rank - rank % 2, rank - rank % 2 + 1)
    replication_group = (rank % 2, rank % 2 + 2)
    for _ in range(2):
        with count_collectives() as count:
            forward_backward(model)
        assert count.by_kind == {
            "all_gather": 2 * num_units,
            "reduce_scatter": num_units,
            "all_reduce": num_units,
        }
        assert count.num("all_gather", ranks=partition_group) == count.all_gathers
        assert count.num("reduce_scatter", ranks=partition_group) == count.reduce_scatters
        assert count.num("all_reduce", ranks=replication_group) == count.all_reduces
        assert count.num("all_reduce", ranks=partition_group) == 0
        assert count.message_bytes("all_gather") == 2 * num_units * UNIT_BYTES
        assert count.message_bytes("reduce_scatter") == num_units * UNIT_BYTES
        assert count.message_bytes("all_reduce") == num_units * UNIT_BYTES // 2


@ranks(4)
def test_micro_steps_without_an_all_reduce_are_seen() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh, num_units=3, reshard=True)
    counts = []
    for last in (False, False, True):
        model.set_requires_all_reduce(last)
        with count_collectives() as count:
            forward_backward(model)
        counts.append((count.reduce_scatters, count.all_reduces))
    assert counts == [(3, 0), (3, 0), (3, 3)]


CALLS = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(6)), 24),
    "broadcast": (lambda: dist.broadcast(torch.ones(6, dtype=torch.bfloat16), src=1), 12),
    "all_to_all": (lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6)), 24),
    "reduce": (lambda: dist.reduce(torch.ones(6), dst=0), 24),
    "barrier": (lambda: dist.barrier(), 0),
    "all_gather": (lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3)), 24),
}
FUNCTIONAL = torch.ops._c10d_functional  # what DTensor and compiled code call
FUNCTIONAL_CALLS = {
    "all_reduce": (lambda: FUNCTIONAL.all_reduce(torch.ones(6), "sum", world()), 24),
    "all_gather": (lambda: FUNCTIONAL.all_gather_into_tensor(torch.ones(3), 2, world()), 24),
    "reduce_scatter": (
        lambda: FUNCTIONAL.reduce_scatter_tensor(torch.ones(6), "sum", 2, world()),
        24,
    ),
}


def world() -> str:
    return dist.group.WORLD.group_name


@ranks(2)
def test_each_kind_and_its_bytes() -> None:
    for calls in (CALLS, FUNCTIONAL_CALLS):
        for kind, (call, message_bytes) in calls.items():
            with count_collectives() as count:
                result = call()
            if calls is FUNCTIONAL_CALLS:
                FUNCTIONAL.wait_tensor(result)
            assert count.by_kind == {kind: 1}
            assert count.bytes_by_kind == {kind: message_bytes}
            assert count.calls[0].ranks == (0, 1)


@ranks(2)
def test_the_collectives_of_dtensor_are_seen() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    with count_collectives() as count:
        whole.redistribute(placements=[Replicate()]).to_local().sum().item()
    assert count.by_kind == {"all_gather": 1}
    assert count.bytes_by_kind == {"all_gather": 64}


@ranks(2)
def test_nothing_is_counted_after_the_context() -> None:
    with count_collectives() as count:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    assert count.by_kind == {"barrier": 1}
