"""Optimizer states over the replicas: what explain says is what a real step does, and how much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import Collectives, count_collectives, sent_bytes
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, shard, stack
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mics_dtensor import apply_mics, explain, gradient_accumulation
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.topology import Topology

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def counted_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Collectives:
    """The second of two optimizer steps: what only the first forward does is over."""
    for _ in range(2):
        with count_collectives() as counted:
            with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
                model(batch(0, dist.get_rank(), width=64)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    return counted


def boundary_bytes(told: Comparison) -> int:
    """Between nodes, of the second hop and what follows the step."""
    names = ("boundary", "gather of slices")
    stages = [stage for stage in told.traffic.stages if stage.name.startswith(names)]
    return sum(stage.inter_node_bytes for stage in stages)


@ranks(8, timeout_s=110)
def test_explain_counts_both_halves_and_they_are_an_all_reduce_or_three_quarters() -> None:
    for partition_size, ranks_per_node, masters in (
        (2, 2, "fp32"),
        (2, 2, "sharded"),
        (2, 4, "fp32"),  # two replicas in each node: in stages
    ):
        topology = Topology.uniform(world_size=8, ranks_per_node=ranks_per_node)
        options: dict[str, Any] = {"mp_policy": BF16} if masters == "sharded" else {}
        model = shard(stack(64, out=64), mesh_of(8 // partition_size, partition_size), **options)
        apply_mics(model, topology=topology)
        plain = boundary_bytes(explain(model, num_micro_steps=1))
        optimizer = ReplicaShardedOptimizer(model, torch.optim.SGD, master_weights=masters)
        told = explain(model, num_micro_steps=1)
        counted = counted_step(model, optimizer)
        assert counted.by_kind == told.collectives
        real = sent_bytes(counted, topology)
        assert (told.inter_node_bytes, told.intra_node_bytes) == pytest.approx(real, rel=1e-3)
        assert boundary_bytes(told) == plain * (0.75 if masters == "sharded" else 1)
        assert "gather of slices" in str(told)
