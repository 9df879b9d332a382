"""What cannot be trained right is refused on every rank, before a group is made."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, said_by_all, shard, stack, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from mics_dtensor import apply_mics, explain, gradient_accumulation, synchronize_replicas
from mics_dtensor.errors import AccumulationError, ConfigError
from mics_dtensor.mesh import init_mesh
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import units_of

FOUR = Topology.uniform(world_size=4, ranks_per_node=2)


def refusal(model: nn.Module, topology: Topology, **options: bool) -> str:
    """What apply_mics says on this rank; nothing was made or changed."""
    before = [(unit.all_gather, unit.reduce_scatter) for unit in units_of(model)]
    with (
        mock.patch.object(dist, "new_group", side_effect=AssertionError("made a group")),
        pytest.raises(ConfigError) as caught,
    ):
        apply_mics(model, topology=topology, **options)
    assert before == [(unit.all_gather, unit.reduce_scatter) for unit in units_of(model)]
    dist.barrier()  # all are here: nobody hangs
    return str(caught.value)


@ranks(4)
def test_meshes() -> None:
    permuted = DeviceMesh(
        "cpu", torch.tensor([[0, 2, 1, 3]]), mesh_dim_names=("replicate", "shard")
    )
    said = refusal(shard(stack(), permuted), FOUR)
    assert "order [0, 2, 1, 3]" in said, said
    assert "process group has [0, 1, 2, 3]" in said
    assert "make the mesh with ascending ranks (init_mesh does)" in said

    permuted = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("replicate", "s"))
    said = refusal(shard(stack(), permuted), FOUR)
    assert f"order [{dist.get_rank() % 2 + 2}, {dist.get_rank() % 2}]" in said, said

    scattered = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("r", "s"))
    said = refusal(shard(stack(), scattered), FOUR)
    beside = 1 - dist.get_rank() % 2
    assert f"leaves [{beside}] there to another group" in said, said

    swapped = DeviceMesh(
        "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp_shard", "dp_replicate")
    )
    said = refusal(shard(stack(), swapped), FOUR)
    assert "reads a 2-D mesh as (replicate, shard)" in said
    assert "pass mesh['dp_replicate', 'dp_shard']" in said


@ranks(4)
def test_models_and_topologies() -> None:
    assert refusal(stack(), FOUR).startswith("the model has no FSDP units: call")
    model = shard(stack(), mesh_of(1, 4))
    said = refusal(model, Topology.uniform(world_size=8, ranks_per_node=4))
    assert said.startswith("the topology is of 8 ranks, but 4 are running; give Topology.uniform(")
    said = refusal(model, 2)  # type: ignore[arg-type]
    assert said.startswith("topology is no Topology but 2: give Topology.detect(), or")
    with pytest.raises(ConfigError, match="layout is no Layout but a DeviceMesh: give Layout"):
        init_mesh(mesh_of(1, 4), device_type="cpu")  # type: ignore[arg-type]
    interleaved = Topology(nodes=((0, 2), (1, 3)))
    said = refusal(model, interleaved)
    assert "order the ranks node by node" in said


def shard_alone() -> nn.Module:
    return shard(stack(), mesh_of(1, 4))


@ranks(6)
def test_a_group_that_crosses_nodes_unevenly() -> None:
    mesh = mesh_of(2, 3)
    said = refusal(shard(stack(), mesh), Topology.uniform(world_size=6, ranks_per_node=2))
    assert "lies on the nodes as [[0, 1], [2]]" in said or "[[3], [4, 5]]" in said, said
    assert "choose another partition_size" in said


@ranks(4)
def test_the_refusal_of_one_rank_is_that_of_all() -> None:
    model = shard_alone()
    if dist.get_rank() == 2:
        model = stack()
    said = said_by_all(refusal(model, FOUR))
    assert said[2].startswith("the model has no FSDP units")
    assert all(said[rank] == f"{said[2]} (said by rank 2)" for rank in (0, 1, 3))

    model = shard_alone()
    if dist.get_rank() == 1:
        own = units_of(model)[0]
        own.set_collectives(_Foreign(), own.reduce_scatter)
    said = said_by_all(refusal(model, FOUR))
    assert "already has collectives of its own (_Foreign, DefaultReduceScatter)" in said[0]

    per_node = 2 if dist.get_rank() else 1
    said = said_by_all(
        refusal(shard_alone(), Topology.uniform(world_size=4, ranks_per_node=per_node))
    )
    assert said[0] == said[3]
    assert "2 nodes of 2 ranks, hierarchical=True | 4 nodes of 1 ranks" in said[0]
    said = said_by_all(refusal(shard_alone(), FOUR, hierarchical=dist.get_rank() == 3))
    assert "hierarchical=False | 2 nodes of 2 ranks, hierarchical=True" in said[0]


class _Foreign:
    """A collective that is not torch's."""


@ranks(4)
def test_another_topology_than_that_of_the_stages() -> None:
    model = shard_alone()
    apply_mics(model, topology=FOUR)
    for topology, hierarchical in (
        (Topology.uniform(world_size=4, ranks_per_node=4), True),
        (Topology.uniform(world_size=4, ranks_per_node=1), True),
        (FOUR, False),
    ):
        said = refusal(model, topology, hierarchical=hierarchical)
        assert "has hierarchical collectives of another apply_mics" in said


@ranks(4)
def test_without_stages_it_is_audited_and_remembered() -> None:
    model = shard_alone()
    apply_mics(model, topology=FOUR, hierarchical=False)
    assert all(unit.has_default_collectives for unit in units_of(model))
    assert explain(model, num_micro_steps=1).collectives["all_gather"] > 0
    with pytest.raises(ConfigError, match="does not know the nodes of the ranks: call apply_mics"):
        explain(shard_alone(), num_micro_steps=1)
    scalar, mesh = nn.Module(), mesh_of(1, 4)
    scalar.one = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar"):  # in torch's own words
        fully_shard(scalar, mesh=mesh)


@ranks(4)
def test_a_trained_parameter_that_no_unit_holds() -> None:
    """Its gradient would stay that of one rank, and the replicas part in silence."""
    model = stack()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    shard(model, mesh_of(2, 2), ignored_params={model.scale})
    said = refusal(model, FOUR)
    assert said.startswith("scale requires a gradient, but no FSDP unit holds it"), said
    with pytest.raises(AccumulationError, match="scale requires a gradient"):
        gradient_accumulation(model, num_micro_steps=1).__enter__()
    model.scale.requires_grad_(False)
    apply_mics(model, topology=FOUR)
    with gradient_accumulation(model, num_micro_steps=1) as accumulation, accumulation.micro_step():
        model(batch(dist.get_rank())).sum().backward()


def replace(model: nn.Module) -> None:
    """As loaders do that assign to the module."""
    linear = model.layers[1].linear
    linear.weight = nn.Parameter(linear.weight.detach().clone())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of one step, whole."""
    model.zero_grad()
    with gradient_accumulation(model, num_micro_steps=1) as accumulation, accumulation.micro_step():
        model(batch(dist.get_rank())).sum().backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


@ranks(4)
def test_a_parameter_that_was_replaced_is_taken_up_before_the_first_forward() -> None:
    wanted = gradients(shard(stack(), mesh_of(2, 2)))
    for prepare in (apply_mics, synchronize_replicas, None):  # whatever comes first
        model = shard(stack(), mesh_of(2, 2))
        replace(model)
        if prepare is not None:
            prepare(model, **({"topology": FOUR} if prepare is apply_mics else {}))
        assert all(map(torch.equal, gradients(model), wanted))


@ranks(4)
def test_a_parameter_that_was_replaced_later_is_refused() -> None:
    """FSDP2 goes on with the one before, and the one that the optimizer has is not trained."""
    model = shard(stack(), mesh_of(2, 2))
    gradients(model)
    replace(model)
    said = refusal(model, FOUR)
    assert said.startswith("layers.1.linear.weight was replaced in its module, and unit layers.1")
    with pytest.raises(AccumulationError, match="still holds the one before"):
        gradient_accumulation(model, num_micro_steps=1).__enter__()
    model.to("cpu")  # as the sentence says
    wanted = gradients(shard(stack(), mesh_of(2, 2)))
    assert all(map(torch.equal, gradients(model), wanted))


@ranks(4)
def test_a_parameter_is_held_in_every_form_that_its_module_shows() -> None:
    """Gathered, cut to a smaller group after the forward, tied, and on one rank alone."""
    model = shard(stack(), mesh_of(1, 4), reshard_after_forward=2)
    for step in range(2):
        model(batch(dist.get_rank(), step)).sum()  # leaves it cut
        apply_mics(model, topology=FOUR)
        for unit in reversed(list(model.modules())):
            if isinstance(unit, FSDPModule):
                unit.unshard()
        apply_mics(model, topology=FOUR)
        model.reshard()
    tied = stack(width=3)
    tied.layers[0].linear.weight = tied.head.weight
    fully_shard([tied.layers[0].linear, tied.head], mesh=mesh_of(2, 2))
    apply_mics(fully_shard(tied, mesh=mesh_of(2, 2)), topology=FOUR)
    alone = stack()
    alone.register_parameter("scale", nn.Parameter(torch.ones(1)))
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("other", "shard"))["shard"]
    with (
        gradient_accumulation(
            shard(alone, mesh, ignored_params={alone.scale}), num_micro_steps=1
        ) as accumulation,
        accumulation.micro_step(),
    ):
        alone(batch(0)).sum().backward()
