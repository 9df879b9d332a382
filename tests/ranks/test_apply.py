"""apply_mics installs stages where a shard group spans nodes, once, and the same on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import Stack, batch, mesh_of, said_by_all, shard, stack, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from mics_dtensor import HierarchicalAllGather, HierarchicalReduceScatter, apply_mics
from mics_dtensor.apply import stage_groups
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import units_of

TWO_NODES = Topology.uniform(world_size=4, ranks_per_node=2)


@contextmanager
def groups_made() -> Iterator[list[list[int]]]:
    """The ranks of every process group that is made."""
    made: list[list[int]] = []
    new_group = dist.new_group

    def counted(members: list[int], *args: object, **kwargs: object) -> object:
        made.append(list(members))
        return new_group(members, *args, **kwargs)

    with mock.patch.object(dist, "new_group", counted):
        yield made


def step(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of a step, whole."""
    model.zero_grad()
    model(batch(dist.get_rank())).sum().backward()
    return [whole(p.grad) for p in model.parameters()]


def plain_step(**options: object) -> list[torch.Tensor]:
    return step(shard(stack(), mesh_of(1, 4), **options))


def expect_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True)
    )


@ranks(4)
def test_twice_is_once_before_and_after_a_forward() -> None:
    model, theirs = shard(stack(), mesh_of(1, 4)), plain_step()
    with groups_made() as made:
        apply_mics(model, topology=TWO_NODES)
        assert made == [[0, 2], [1, 3], [0, 1], [2, 3]]  # one set for all units
        collectives = [(unit.all_gather, unit.reduce_scatter) for unit in units_of(model)]
        expect_close(step(model), theirs)
        apply_mics(model, topology=TWO_NODES)
        assert len(made) == 4
    assert collectives == [(unit.all_gather, unit.reduce_scatter) for unit in units_of(model)]
    assert all(
        isinstance(gather, HierarchicalAllGather) and isinstance(reduce, HierarchicalReduceScatter)
        for gather, reduce in collectives
    )
    assert len(stage_groups(model)) == 2
    expect_close(step(model), theirs)
    late = shard(stack(), mesh_of(1, 4))
    step(late)
    apply_mics(late, topology=TWO_NODES)
    with count_collectives() as counted:
        expect_close(step(late), theirs)
    assert counted.num("all_gather", ranks=range(4)) == len(list(late.parameters()))  # `whole`
    pair = (dist.get_rank() % 2, dist.get_rank() % 2 + 2)
    # Three units, each reduced; two are gathered twice, the root stays gathered.
    assert counted.num("all_to_all", ranks=pair) == 3 + 5


@ranks(4)
def test_around_a_checkpoint(tmp_path: Path) -> None:
    """Saved from a model with the stages, loaded before and after they are installed."""
    saved = shard(Stack(5, 1), mesh_of(1, 4))  # every rank has the seed of the harness
    apply_mics(saved, topology=TWO_NODES)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=False)
    theirs = step(saved)
    for apply_first in (True, False):
        model = shard(stack(depth=1, seed=5), mesh_of(1, 4))
        if apply_first:
            apply_mics(model, topology=TWO_NODES)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        if not apply_first:
            apply_mics(model, topology=TWO_NODES)
        assert units_of(model)[0].all_gather.stages.num_nodes == 2
        assert all(torch.equal(a, b) for a, b in zip(step(model), theirs, strict=True))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@ranks(4)
def test_a_group_inside_a_node_is_left_as_torch_made_it() -> None:
    """The very objects, and operator for operator the step of plain HSDP."""
    plain, ours = shard(stack(), mesh_of(2, 2)), shard(stack(), mesh_of(2, 2))
    before = [(unit.all_gather, unit.reduce_scatter) for unit in units_of(ours)]
    with groups_made() as made:
        apply_mics(ours, topology=TWO_NODES)
    assert made == []
    assert before == [(unit.all_gather, unit.reduce_scatter) for unit in units_of(ours)]
    assert stage_groups(ours) == []
    ran = []
    for model in (plain, ours):
        with Operators() as operators:
            model(batch(dist.get_rank())).sum().backward()
        ran.append(operators.names)
    assert ran[0] == ran[1]
    assert len(ran[0]) > 20


@ranks(4)
def test_parts_of_which_each_rank_holds_its_own() -> None:
    """As of a pipeline: ranks 0, 1 hold one part, ranks 2, 3 another; all make all groups."""
    topology = Topology.uniform(world_size=4, ranks_per_node=1)
    meshes = DeviceMesh("cpu", torch.tensor([[[0, 1]], [[2, 3]]]), mesh_dim_names=("pp", "a", "b"))
    parts = [shard(stack(), meshes["a", "b"]), shard(stack(seed=1), meshes["a", "b"])]
    with groups_made() as made:
        apply_mics(parts, topology=topology)  # one rank a node: no stages
    assert made == []
    orders = said_by_all(_groups_of_a_pipeline())
    assert all(order == orders[0] for order in orders)
    assert orders[0] == [[0, 2], [1, 3], [0, 1], [2, 3]]


def _groups_of_a_pipeline() -> list[list[int]]:
    """Ranks 0 to 3 hold a part over all of them, and ranks 0 and 1 one more of their own."""
    parts = [shard(stack(), mesh_of(1, 4))]
    pairs = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))
    if dist.get_rank() < 2:
        parts.append(shard(stack(depth=1), pairs))
    with groups_made() as made:
        apply_mics(parts, topology=TWO_NODES)
        step(parts[0])
    return made


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.expert = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


@ranks(8)
def test_every_group_of_a_module_gets_stages_of_its_own() -> None:
    """Per-parameter meshes, as expert parallelism makes them: the experts over half the ranks."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        pytest.skip("torch < 2.13 has one mesh a module")
    names = ("replicate", "shard")
    over_all = DeviceMesh("cpu", torch.arange(8).view(1, 8), mesh_dim_names=names)["shard"]
    halves = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=names)["shard"]
    torch.manual_seed(0)
    model = Experts()
    of_experts = {id(p) for p in model.expert.parameters()}

    infos = {
        of: FSDPMeshInfo(mesh=m, shard_mesh_dim=0) for of, m in ((True, halves), (False, over_all))
    }

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[id(parameter) in of_experts])

    fully_shard(model, mesh=over_all, shard_placement_fn=place)
    apply_mics(model, topology=Topology.uniform(world_size=8, ranks_per_node=2))
    units = units_of(model)
    spans = sorted((u.all_gather.stages.num_nodes, len(u.all_gather.stages.ranks)) for u in units)
    assert spans == [(2, 4), (4, 8)]
    torch.manual_seed(0)
    alone, data = Experts(), batch(0)
    model(data).sum().backward()
    alone(data).sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(whole(ours.grad), theirs.grad, rtol=1e-5, atol=1e-6)


@ranks(4)
def test_integer_reshard_gathers_the_second_time_inside_the_node() -> None:
    model = shard(stack(), mesh_of(1, 4), reshard_after_forward=2)
    apply_mics(model, topology=TWO_NODES)
    theirs = plain_step(reshard_after_forward=2)
    for _ in range(2):
        expect_close(step(model), theirs)
    model.zero_grad()
    with count_collectives() as counted:
        model(batch(dist.get_rank())).sum().backward()
    rank = dist.get_rank()
    # Three units; between nodes a gather of the forward, and a reduction, each an exchange.
    assert counted.num("all_to_all", ranks=(rank % 2, rank % 2 + 2)) == 3 + 3
    # Inside the node a gather in the forward, and one in the backward.
    assert counted.num("all_gather", ranks=(rank // 2 * 2, rank // 2 * 2 + 1)) == 3 + 3
    assert counted.num("all_gather", ranks=range(4)) == 0
