"""The systems beside each other: how each shards, reduces and accumulates."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.bound import bound_of_stages
from benchmarks.phases import Phases
from benchmarks.stages import counted_stages
from benchmarks.workload import Linears
from mics_dtensor import (
    Layout,
    Topology,
    apply_mics,
    clip_grad_norm_,
    explain,
    gloo,
    gradient_accumulation,
    init_mesh,
)
from mics_dtensor.plan.options import WHOLE_BLOCK_BYTES
from mics_dtensor.sharded_states import MasterWeights, ReplicaShardedOptimizer


@dataclass(frozen=True)
class Recipe:
    """How a system trains. Its `configuration` stands in the results file."""

    over_all_ranks: bool = False  # plain FSDP2 on a one-axis mesh
    hierarchical: bool = False
    reshard: bool = True  # False: parameters stay gathered from the forward to the backward
    two_hop: bool = False  # False: FSDP2 all-reduces in every micro-step
    node_local_backward: bool = False
    overlap_boundary: bool = False
    bucket_size_bytes: int | None = None
    whole_block_bytes: int = WHOLE_BLOCK_BYTES  # of gloo.py
    master_weights: MasterWeights | None = None  # optimizer states over the replicas
    param_dtype: torch.dtype | None = None  # in which parameters are gathered; sums are fp32

    @property
    def configuration(self) -> dict[str, object]:
        """In words that its own documentation uses."""
        if self.over_all_ranks:
            return {
                "fully_shard": "mesh of one axis over all ranks",
                "reshard_after_forward": self.reshard,
            }
        its: dict[str, object] = {
            "fully_shard": "mesh (replicate, shard)",
            "reshard_after_forward": self.reshard,
            "apply_mics": self.options_of_mics if self._is_mics else None,
            "gradient_accumulation": self.options_of_accumulation if self.two_hop else None,
        }
        if self.master_weights is not None:
            its["ReplicaShardedOptimizer"] = {"master_weights": self.master_weights}
        if self.whole_block_bytes != WHOLE_BLOCK_BYTES:
            its["whole_block_bytes"] = self.whole_block_bytes
        if self.param_dtype is not None:
            its["param_dtype"] = str(self.param_dtype)
        return its

    @property
    def options_of_mics(self) -> dict[str, bool]:
        """What `apply_mics` is told."""
        local = {"node_local_backward": True} if self.node_local_backward else {}
        return {"hierarchical": self.hierarchical, **local}

    @property
    def options_of_accumulation(self) -> dict[str, Any]:
        """What `gradient_accumulation` is told beside the number of micro-steps."""
        options: dict[str, Any] = {}
        if self.overlap_boundary:
            options["overlap_boundary"] = True
        if self.bucket_size_bytes is not None:
            options["bucket_size_bytes"] = self.bucket_size_bytes
        return options

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Gradients are reduced in fp32 in any case."""
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=torch.float32)

    @property
    def _is_mics(self) -> bool:
        return self.hierarchical or self.two_hop


RECIPES = {
    "fsdp2": Recipe(over_all_ranks=True),
    "hsdp": Recipe(),
    "hsdp-no-reshard": Recipe(reshard=False),
    "mics": Recipe(hierarchical=True, two_hop=True),
    "mics-node-local": Recipe(hierarchical=True, two_hop=True, node_local_backward=True),
    "mics-overlap": Recipe(hierarchical=True, two_hop=True, overlap_boundary=True),
    "mics-overlap-no-reshard": Recipe(
        hierarchical=True, two_hop=True, overlap_boundary=True, reshard=False
    ),
    "mics-own-messages": Recipe(hierarchical=True, two_hop=True, bucket_size_bytes=1),
    "mics-one-message": Recipe(hierarchical=True, two_hop=True, bucket_size_bytes=1 << 40),
    "mics-at-once": Recipe(hierarchical=True, two_hop=True, whole_block_bytes=1 << 40),
    "mics-block-by-block": Recipe(hierarchical=True, two_hop=True, whole_block_bytes=-1),
    "mics-no-hierarchy": Recipe(two_hop=True),
    "mics-no-2hop": Recipe(hierarchical=True),
    "mics-slices": Recipe(hierarchical=True, two_hop=True, master_weights="fp32"),
    "mics-bf16": Recipe(hierarchical=True, two_hop=True, param_dtype=torch.bfloat16),
    "mics-slices-bf16": Recipe(
        hierarchical=True, two_hop=True, master_weights="sharded", param_dtype=torch.bfloat16
    ),
}


class Training:
    """One system with a model of its own. Building it and each step are collective."""

    def __init__(
        self, system: str, workload: Linears, *, partition_nodes: float, topology: Topology
    ) -> None:
        self._recipe = recipe = RECIPES[system]
        self.configuration = recipe.configuration
        self._workload = workload
        self._topology = topology
        partition_size = round(partition_nodes * topology.ranks_per_node)
        self.model = workload.model()
        if recipe.over_all_ranks:
            mesh = init_device_mesh("cpu", (topology.world_size,), mesh_dim_names=("shard",))
        else:
            layout = Layout(topology=topology, partition_size=partition_size)
            mesh = init_mesh(layout, device_type="cpu")
        for module in (*workload.units(self.model), self.model):
            fully_shard(
                module, mesh=mesh, mp_policy=recipe.policy, reshard_after_forward=recipe.reshard
            )
        if recipe.hierarchical or recipe.two_hop:
            apply_mics(self.model, topology=topology, **recipe.options_of_mics)
        if recipe.master_weights is None:
            self._optimizer = workload.optimizer(self.model)
        else:
            self._optimizer = ReplicaShardedOptimizer(
                self.model,
                torch.optim.SGD,
                master_weights=recipe.master_weights,
                **workload.optimizer_options,
            )
        self._batches = list(workload.batches(dist.get_rank()))

    def bound_of_stages(self) -> dict[str, int]:
        """The least that a step must send between nodes with this sharding."""
        micro_steps = self._workload.micro_steps
        told = explain(self.model, num_micro_steps=micro_steps, topology=self._topology)
        return bound_of_stages(told.units, micro_steps=micro_steps)

    def step(self, phases: Phases) -> float:
        """One optimizer step; the gradient norm before clipping."""
        with mock.patch.object(gloo, "WHOLE_BLOCK_BYTES", self._recipe.whole_block_bytes):
            return self._step(phases)

    def _step(self, phases: Phases) -> float:
        two_hop = self._recipe.two_hop
        accumulation = (
            gradient_accumulation(
                self.model,
                num_micro_steps=len(self._batches),
                **self._recipe.options_of_accumulation,
            )
            if two_hop
            else nullcontext()
        )
        with accumulation as micro_steps:
            for batch in self._batches:
                with micro_steps.micro_step() if micro_steps else nullcontext():
                    phases.begin("forward")
                    loss = self._workload.loss(self.model, batch)
                    phases.begin("backward")
                    loss.backward()
                    phases.begin("boundary")
        phases.begin("optimizer")
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        phases.begin("before")
        return norm

    def count_step(self, phases: Phases) -> None:
        """One step, counted stage by stage."""
        with counted_stages([self.model], phases):
            self.step(phases)

    def _clip(self) -> float:
        parameters = list(self.model.parameters())
        if self._recipe.two_hop:
            return clip_grad_norm_(parameters, max_norm=1.0).item()
        norm = nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
