"""What a run is: the tables of its TOML as frozen dataclasses. No torch, no torchtitan.

Field names are the file's names and defaults are torchtitan 0.2.2's; `keys(RunConfig)` yields every
key with its meaning and unit. What becomes of each key is in `keys_0_2.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from mics_dtensor.plan.options import BUCKET_SIZE_BYTES
from mics_dtensor.train.key import Key, key, keys
from mics_dtensor.train.tables_job import (
    Job,
    Loss,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
    Validation,
)
from mics_dtensor.train.tables_services import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    Experimental,
    FaultTolerance,
    MemoryEstimation,
    Metrics,
    Override,
    Profiling,
    Quantize,
)

__all__ = ["Key", "Mics", "RunConfig", "config_keys"]


@dataclass(frozen=True, kw_only=True)
class Mics:
    """[mics]: partition groups, the second hop, optimizer states over the replicas."""

    partition_size: int | str | None = key(
        None,
        'shards of a parameter: a number, "node", or "auto" (the planner\'s choice on `cluster`); '
        "not given, [parallelism] decides",
        unit="ranks",
    )
    hierarchical: bool = key(True, "gather between nodes first where a group spans several")
    ranks_per_node: int | None = key(
        None, "ranks of a fast domain; not given, as many as the launcher started on a host"
    )
    bucket_size_bytes: int = key(
        BUCKET_SIZE_BYTES, "units below this share a message at the boundary", unit="bytes"
    )
    overlap_boundary: bool = key(False, "messages of the boundary leave during the last backward")
    check_replicas_every: int = key(
        0, "check that replicas are equal after every so many steps; 0 is never", unit="steps"
    )
    second_hop_dtype: Literal["bfloat16", "float32"] | None = key(
        None, "dtype of the boundary's messages; not given, that of the gradients' reduction"
    )
    node_local_backward: bool = key(
        False, "what the forward gathers stays cut inside a node, for the backward"
    )
    optimizer_over_replicas: bool = key(
        False, "shard optimizer states over the replicas: 1/R of their memory, the same training"
    )
    checkpoint_placement: Literal["spread", "partition_group"] = key(
        "spread", "who writes a checkpoint: all ranks, or those of one partition group a whole copy"
    )
    master_weights: Literal["fp32", "sharded"] = key(
        "fp32",
        'with optimizer_over_replicas: the shards are fp32, or ("sharded") of '
        "mixed_precision_param, and the fp32 weights in the slices alone",
    )
    overlap_update: bool = key(
        False,
        "with optimizer_over_replicas: updated slices travel beside the next forward, which waits "
        "for a unit's own before it gathers the unit",
    )
    cluster: str | None = key(
        None, 'cluster that the planner reckons with: a preset, or a file that ends in ".toml"'
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, in the file's names."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    loss: Loss = field(default_factory=Loss)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
    quantize: Quantize = field(default_factory=Quantize)
    override: Override = field(default_factory=Override)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    experimental: Experimental = field(default_factory=Experimental)
    mics: Mics = field(default_factory=Mics)


@cache
def config_keys() -> Mapping[str, Key]:
    """Every key by its dotted name, in the order of the tables above."""
    return {each.name: each for each in keys(RunConfig)}
