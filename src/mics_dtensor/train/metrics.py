"""What a run tells: torchtitan's line, metrics.jsonl with what was sent, and how long it takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims

from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.train.pipeline import IN_A_V, rank_of_loss

SCHEMA = 1
PROGRESS_EVERY_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What stays the same from line to line of metrics.jsonl, and where the file lies."""

    run_id: str
    traffic: Comparison
    dump_folder: str

    @property
    def path(self) -> Path:
        """The file, which is appended to: a resumed run goes on in it under another run_id."""
        return Path(self.dump_folder) / "metrics.jsonl"


def config_of(config: MetricsProcessor.Config) -> MicsMetrics.Config:
    """The settings of torchtitan's metrics, for ours."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return MicsMetrics.Config(**values)


class MicsMetrics(MetricsProcessor):
    """torchtitan's metrics (line, TensorBoard, W&B), and a JSON object a logged step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's own settings; ours need none."""

    def __init__(
        self, config: Config, *, parallel_dims: ParallelDims, pp_schedule: str, **built: Any
    ) -> None:
        # torchtitan knows one schedule that runs in a V, and knows it by this spelling alone.
        in_a_v = pp_schedule.lower() in IN_A_V
        schedule = "ZBVZeroBubble" if in_a_v else pp_schedule
        super().__init__(config, parallel_dims=parallel_dims, pp_schedule=schedule, **built)
        self.record: Record | None = None
        self.tells = dist.get_rank() == rank_of_loss(
            schedule, world_size=parallel_dims.world_size, stages=parallel_dims.pp
        )
        self._knows_peak = math.isfinite(self.gpu_peak_flops)
        if not self._knows_peak:
            # torchtitan's only way to say "no MFU" instead of a number that is wrong.
            self.has_quantization = True

    def record_to(self, record: Record) -> None:
        """Write a line to `record.path` for each step that is logged from now on."""
        self.record = record

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Print and record a step. Called on every rank, with what the ranks agreed on."""
        elapsed_s = time.perf_counter() - self.time_last_log
        per_rank = self.ntokens_since_last_log / (
            elapsed_s * self.parallel_dims.non_data_parallel_size
        )
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if self.record is None or not self.tells:
            return
        flops_per_s = self.num_flops_per_token * per_rank
        line = {
            "schema": SCHEMA,
            "run_id": self.record.run_id,
            "step": step,
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "lr": _lr(extra_metrics or {}),
            "tokens_per_s": per_rank * dist.get_world_size(),
            "tokens_per_s_per_rank": per_rank,
            "mfu": flops_per_s / self.gpu_peak_flops if self._knows_peak else None,
            "inter_node_bytes": self.record.traffic.inter_node_bytes,
            "intra_node_bytes": self.record.traffic.intra_node_bytes,
            "collectives": dict(self.record.traffic.collectives),
        }
        _append(self.record.path, line)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Print and record a validation. Called on every rank, with what the ranks agreed on."""
        super().log_validation(loss, step, extra_metrics)
        if self.record is None or not self.tells:
            return
        line = {"schema": SCHEMA, "run_id": self.record.run_id, "step": step, "loss": loss}
        _append(self.record.path.with_name("validation.jsonl"), line)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Progress:
    """Says how far a run is, at most every `PROGRESS_EVERY_S` seconds."""

    def __init__(self, *, done: int, last: int) -> None:
        self.done_before, self.last = done, last
        self.started_s = self.said_s = time.monotonic()

    def words(self, done: int) -> str | None:
        """The line after step `done`, or None where it is too early for one."""
        now_s = time.monotonic()
        steps = done - self.done_before
        if steps < 1 or now_s - self.said_s < PROGRESS_EVERY_S:
            return None
        self.said_s = now_s
        elapsed_s = now_s - self.started_s
        remaining_s = elapsed_s / steps * (self.last - done)
        return (
            f"progress: step {done} / {self.last}, elapsed {_duration(elapsed_s)}, "
            f"remaining {_duration(remaining_s)}"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _lr(extra_metrics: Mapping[str, Any]) -> float | None:
    """The learning rate of the first group of parameters, before this step's schedule moved it."""
    rates = (value for name, value in extra_metrics.items() if name.startswith("lr"))
    return next((float(value) for value in rates), None)
