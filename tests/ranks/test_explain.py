"""What explain says is what a real step does: every collective, and the bytes of the messages."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness.counting import Collectives, count_collectives, sent_bytes
from harness.ranks import ranks
from harness.sharded import Stack, batch, mesh_of, shard, stack
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from mics_dtensor import apply_mics, explain, gradient_accumulation
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.topology import Topology

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def even() -> Stack:
    """Rows that divide by 8, so that nothing is padded."""
    return stack(8, out=8)


@contextmanager
def counted_step(model: nn.Module, num_micro_steps: int, **options: int) -> Iterator[Collectives]:
    """The collectives of an optimizer step, a step having run before."""
    for first in (True, False):
        with (
            count_collectives() as counted,
            gradient_accumulation(
                model, num_micro_steps=num_micro_steps, **options
            ) as accumulation,
        ):
            for micro in range(num_micro_steps):
                with accumulation.micro_step():
                    model(batch(micro, dist.get_rank(), width=8)).sum().backward()
        if not first:
            yield counted
        model.zero_grad()


def expect_as_explained(model: nn.Module, topology: Topology, num_micro_steps: int) -> Comparison:
    for bucket_size_bytes in (2**20, 1):
        said = explain(model, num_micro_steps=num_micro_steps, bucket_size_bytes=bucket_size_bytes)
        with counted_step(model, num_micro_steps, bucket_size_bytes=bucket_size_bytes) as counted:
            assert counted.by_kind == said.collectives, (counted.by_kind, said.collectives)
            real = sent_bytes(counted, topology)
            told = said.inter_node_bytes, said.intra_node_bytes
            assert told == pytest.approx(real, abs=4), (told, real)  # all rows divide
    return said


@ranks(8, timeout_s=120)
def test_counts_and_bytes_are_those_of_a_real_step() -> None:
    for partition_size, ranks_per_node, num_micro_steps, options in (
        (2, 4, 3, {}),  # inside the node
        (4, 2, 1, {}),  # two nodes, and two replicas
        (4, 2, 3, {"reshard_after_forward": False}),
        (4, 2, 2, {"reshard_after_forward": 2}),  # gathers again inside the node
        (8, 2, 2, {"mp_policy": BF16}),  # four nodes, one replica
        (8, 1, 2, {}),  # one rank a node: flat
        (1, 4, 2, {}),  # nothing but replicas
    ):
        topology = Topology.uniform(world_size=8, ranks_per_node=ranks_per_node)
        model = shard(even(), mesh_of(8 // partition_size, partition_size), **options)
        apply_mics(model, topology=topology)
        expect_as_explained(model, topology, num_micro_steps)


@ranks(8)
def test_other_kinds_of_models() -> None:
    topology = Topology.uniform(world_size=8, ranks_per_node=4)
    frozen = even()
    frozen.layers[0].requires_grad_(False)
    frozen.layers[1].linear.requires_grad_(False)
    model = shard(frozen, mesh_of(2, 4))
    apply_mics(model, topology=topology)
    expect_as_explained(model, topology, 2)

    model = fully_shard(nn.Sequential(nn.Linear(8, 8), by_column_of(8)), mesh=mesh_of(1, 8))
    apply_mics(model, topology=topology)
    expect_as_explained(model, topology, 1)

    mesh = mesh_of(2, 2, 2)
    split = even()
    for layer in split.layers:
        parallelize_module(layer, mesh["tp"], {"linear": RowwiseParallel()})
    model = shard(split, mesh["replicate", "shard"])
    apply_mics(model, topology=topology)
    said = explain(model, num_micro_steps=2)
    assert {unit.shard.num_groups for unit in said.units} == {4}
    assert {(u.replicate.num_nodes, u.replicate.num_groups) for u in said.units} == {(2, 4)}


def by_column_of(width: int) -> nn.Module:
    layer = nn.Linear(width, 9, bias=False)  # rows do not divide by 8, columns do
    return fully_shard(layer, mesh=mesh_of(1, 8), shard_placement_fn=lambda _: Shard(1))


@ranks(4)
def test_without_the_stages_and_beside_plain_fsdp() -> None:
    topology = Topology.uniform(world_size=4, ranks_per_node=2)
    model = shard(stack(), mesh_of(1, 4))
    flat = explain(model, num_micro_steps=2, topology=topology, two_hop=False)
    assert flat.collectives == {"all_gather": 10, "reduce_scatter": 6}
    assert flat.traffic.inter_node_bytes == flat.plain_fsdp.inter_node_bytes
    apply_mics(model, topology=topology)
    staged = explain(model, num_micro_steps=2, two_hop=False)
    assert staged.plain_fsdp == flat.plain_fsdp
    assert 3 * staged.inter_node_bytes == 2 * flat.inter_node_bytes  # (p - 1)/p to (n - 1)/n
