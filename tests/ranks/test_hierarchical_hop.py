"""Where a node holds several replicas, the second hop crosses nodes with the node's own sum."""

import torch
import torch.distributed as dist
from harness.counting import Collectives, count_collectives
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, shard, stack, whole
from torch import nn

from mics_dtensor import apply_mics, gradient_accumulation
from mics_dtensor.apply import stage_groups
from mics_dtensor.mesh import ranks_of
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import local_of, units_of


def accumulated(model: nn.Module, **options: object) -> Collectives:
    """The collectives of a step of two micro-steps, with other data everywhere."""
    with (
        count_collectives() as counted,
        gradient_accumulation(model, num_micro_steps=2, **options) as accumulation,
    ):
        for micro in range(2):
            with accumulation.micro_step():
                model(batch(micro, dist.get_rank())).sum().backward()
    return counted


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter.grad) for parameter in model.parameters()]


@ranks(8, timeout_s=120)
def test_equals_the_flat_hop_and_crosses_with_a_part() -> None:
    for partition_size, ranks_per_node in ((1, 2), (1, 4), (2, 4)):
        topology = Topology.uniform(world_size=8, ranks_per_node=ranks_per_node)
        for options in (
            {},
            {"bucket_size_bytes": 1},
            {"bucket_size_bytes": 1, "overlap_boundary": True},
        ):
            flat, ours = (
                shard(stack(), mesh_of(8 // partition_size, partition_size)) for _ in "ab"
            )
            apply_mics(flat, topology=topology, hierarchical=False)
            apply_mics(ours, topology=topology)
            accumulated(flat, **options)
            counted = accumulated(ours, **options)
            for a, b in zip(gradients(flat), gradients(ours), strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            (group,) = {id(u.replicate_group): u.replicate_group for u in units_of(ours)}.values()
            assert equal_over([local_of(p.grad) for p in ours.parameters()], group)
            crossing = {
                (call.kind, len(call.ranks))
                for call in counted.calls  # the partition groups lie inside the nodes
                if len({topology.node_of(rank) for rank in call.ranks}) > 1
            }
            agreement = ("all_reduce", 8 // partition_size)
            assert crossing == {("all_reduce", topology.num_nodes), agreement}, crossing


@ranks(4)
def test_made_once_and_only_where_a_node_holds_several_replicas() -> None:
    two_nodes = Topology.uniform(world_size=4, ranks_per_node=2)
    model = shard(stack(), mesh_of(4, 1))
    apply_mics(model, topology=two_nodes)
    once = stage_groups(model)
    rank = dist.get_rank()
    assert [ranks_of(group) for group in once] == [
        (rank % 2, rank % 2 + 2),  # across nodes
        (rank // 2 * 2, rank // 2 * 2 + 1),  # within the node
    ]
    apply_mics(model, topology=two_nodes)
    assert stage_groups(model) == once
    apply_mics(model, topology=two_nodes, hierarchical=False)
    assert stage_groups(model) == []
    one_replica_a_node = shard(stack(), mesh_of(2, 2))
    apply_mics(one_replica_a_node, topology=two_nodes)
    assert stage_groups(one_replica_a_node) == []
