"""Between which bounds the numbers of a run lie. Pure: no torch, no torchtitan.

What is not a number (nan) lies nowhere, infinity only where it has a meaning, and a key that
another one switches off may say anything. tests/unit/test_config_bounds.py holds that every
numeric key has a bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import value_at
from mics_dtensor.train.values import shown

LARGEST = sys.float_info.max  # infinity is above


@dataclass(frozen=True)
class Bound:
    """What is said of the numbers that may be, and which they are."""

    words: str
    least: float
    most: float = LARGEST
    also: int | None = None
    """A number outside that has a meaning: -1 or 0."""
    needs: tuple[str, ...] = ()
    """Switches; where all are off nobody reads the key."""

    def holds(self, value: float) -> bool:
        """Whether the number may be."""
        return value == self.also or self.least <= value <= self.most

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError for a number that may not be; what is no number is not looked at."""
        if isinstance(value, int | float) and not self.holds(value):
            raise ConfigError(f"{name} = {shown(value)}; it must be {self.words}")

    def of(self, *needs: str) -> Bound:
        """The same, read only with one of these switches."""
        return replace(self, needs=needs)


COUNT = Bound("1 or more", 1)
COUNT_OR_NONE = Bound("0 or more", 0)
COUNT_OR_REST = Bound("-1, or 1 or more", 1, also=-1)
NOT_NEGATIVE = Bound("0 or more, and finite", 0)
POSITIVE = Bound("more than 0, and finite", math.ulp(0.0))
SHARE = Bound("from 0 to 1", 0, 1)
DECAY = Bound("0 or more, and less than 1", 0, math.nextafter(1.0, 0.0))
NORM = Bound("more than 0; inf clips nothing", math.ulp(0.0), math.inf)

VALIDATION = "validation.enable"
TRACES, SNAPSHOTS = "profiling.enable_profiling", "profiling.enable_memory_snapshot"

BOUNDS: Mapping[str, Bound] = {
    "model.n_layers": COUNT,
    "model.num_mtp_layers": COUNT_OR_NONE,
    "model.non_blocking_capacity_factor": POSITIVE,
    "training.local_batch_size": COUNT,
    "training.global_batch_size": COUNT_OR_REST,
    "training.seq_len": COUNT,
    "training.max_norm": NORM,
    "training.steps": COUNT,
    "training.gc_freq": COUNT,
    "training.dataloader.num_workers": COUNT_OR_NONE,
    "training.dataloader.prefetch_factor": COUNT,
    "parallelism.data_parallel_replicate_degree": COUNT_OR_REST,
    "parallelism.data_parallel_shard_degree": COUNT_OR_REST,
    "parallelism.tensor_parallel_degree": COUNT,
    "parallelism.pipeline_parallel_degree": COUNT,
    "parallelism.pipeline_parallel_first_stage_less_layers": COUNT_OR_NONE,
    "parallelism.pipeline_parallel_last_stage_less_layers": COUNT_OR_NONE,
    "parallelism.pipeline_parallel_layers_per_stage": COUNT,
    "parallelism.pipeline_parallel_microbatch_size": COUNT,
    "parallelism.context_parallel_degree": COUNT,
    "parallelism.expert_parallel_degree": COUNT,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.eps": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": COUNT_OR_NONE,
    "lr_scheduler.total_steps": COUNT,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    "loss.num_chunks": COUNT,
    "checkpoint.interval": COUNT,
    "checkpoint.keep_latest_k": Bound("0 (all), or 2 or more", 2, also=0),
    "checkpoint.load_step": Bound("-1 (the latest), or 0 or more", 0, also=-1),
    "metrics.log_freq": COUNT,
    "profiling.profile_freq": COUNT.of(TRACES, SNAPSHOTS),
    "profiling.profiler_active": COUNT.of(TRACES),
    "profiling.profiler_warmup": COUNT_OR_NONE.of(TRACES),
    "profiling.profiler_repeat": COUNT_OR_NONE.of(TRACES),  # 0: to the end
    "profiling.profiler_skip_first": COUNT_OR_NONE.of(TRACES),
    "profiling.profiler_skip_first_wait": COUNT_OR_NONE.of(TRACES),
    "profiling.memory_snapshot_freq": COUNT.of(SNAPSHOTS),
    "profiling.memory_snapshot_max_entries": COUNT.of(SNAPSHOTS),
    "activation_checkpoint.memory_budget": SHARE,
    "comm.init_timeout_seconds": COUNT,
    "comm.train_timeout_seconds": COUNT,
    "comm.trace_buf_size": COUNT_OR_NONE,
    "validation.local_batch_size": COUNT.of(VALIDATION),
    "validation.seq_len": COUNT.of(VALIDATION),
    "validation.freq": COUNT.of(VALIDATION),
    "validation.steps": COUNT_OR_REST.of(VALIDATION),
    "validation.dataloader.num_workers": COUNT_OR_NONE.of(VALIDATION),
    "validation.dataloader.prefetch_factor": COUNT.of(VALIDATION),
    "debug.seed": Bound("a number of 64 bits", -(2**63), 2**64 - 1),
    "mics.partition_size": COUNT,
    "mics.ranks_per_node": COUNT,
    "mics.bucket_size_bytes": COUNT,
    "mics.check_replicas_every": Bound("0 (never), or 1 or more", 0),
}

OF_A_GROUP = {
    "lr": NOT_NEGATIVE,
    "beta1": DECAY,
    "beta2": DECAY,
    "betas": DECAY,
    "eps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
}
"""The same in the tables of optimizer.param_groups, which param_groups.py looks at."""


def refuse_numbers(config: RunConfig) -> None:
    """Raises ConfigError for the first number that can mean nothing."""
    for name, bound in BOUNDS.items():
        if not bound.needs or any(value_at(config, switch) for switch in bound.needs):
            bound.check(name, value_at(config, name))
    profiling = config.profiling
    traced = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < traced:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq} is shorter than profiler_warmup + "
            f"profiler_active = {profiling.profiler_warmup} + {profiling.profiler_active} steps of "
            f"it; write profile_freq = {traced} or more"
        )
