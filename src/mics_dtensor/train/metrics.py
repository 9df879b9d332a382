"""What a run tells: torchtitan's line, metrics.jsonl with what was sent, and how long it takes."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger as titan

from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.train import json_lines
from mics_dtensor.train.exposed import ExposedCommunication
from mics_dtensor.train.pipeline import IN_A_V, rank_of_loss

SCHEMA = 1
PROGRESS_EVERY_S = 30.0
LOSS = re.compile(r"loss: +\S+  ")  # of torchtitan's line

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
        self.exposed: ExposedCommunication | None = None
        self._num_steps, self._before_s, self._began_s = 0, 0.0, time.perf_counter()
        world_size, stages = parallel_dims.world_size, parallel_dims.pp
        first = rank_of_loss(schedule, world_size=world_size, stages=stages)
        self.tells = dist.get_rank() == first
        # The others of a pipeline have -1 a micro-step instead.
        self.knows_loss = 0 <= dist.get_rank() - first < world_size // stages
        self._knows_peak = math.isfinite(self.gpu_peak_flops)
        if not self._knows_peak:
            # torchtitan's only way to say "no MFU" instead of a number that is wrong.
            self.has_quantization = True

    def record_to(self, record: Record, *, exposed: ExposedCommunication | None = None) -> None:
        """Write a line to `record.path` for each step that is logged from now on.

        `exposed` counts what the steps wait for messages, where that can be told.
        """
        self.record, self.exposed = record, exposed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, one optimizer step: its seconds are counted, and those of them that it waits."""
        self._num_steps += 1
        self._began_s = time.perf_counter()
        with nullcontext() if self.exposed is None else self.exposed.counted():
            yield
        self._before_s += time.perf_counter() - self._began_s

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
        step_s, exposed_s = self._seconds_of_step()
        extra_metrics = extra_metrics or {}
        more = {} if exposed_s is None else {"time_metrics/exposed_communication(s)": exposed_s}
        losses = (global_avg_loss, global_max_loss) if self.knows_loss else (math.nan, math.nan)
        with nullcontext() if self.knows_loss else without_loss():
            super().log(step, *losses, grad_norm, {**extra_metrics, **more})
        if self.record is None or not self.tells:
            return
        if exposed_s is not None:
            share = exposed_s / step_s
            logger.info(
                f"step: {step:2}  exposed communication: {exposed_s:.3f} s of {step_s:.3f} s "
                f"a step ({share:.0%})"
            )
        flops_per_s = self.num_flops_per_token * per_rank
        line = {
            "schema": SCHEMA,
            "run_id": self.record.run_id,
            "step": step,
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "lr": _lr(extra_metrics),
            "tokens_per_s": per_rank * dist.get_world_size(),
            "tokens_per_s_per_rank": per_rank,
            "step_s": step_s,
            "exposed_communication_s": exposed_s,
            "mfu": flops_per_s / self.gpu_peak_flops if self._knows_peak else None,
            "inter_node_bytes": self.record.traffic.inter_node_bytes,
            "intra_node_bytes": self.record.traffic.intra_node_bytes,
            "collectives": dict(self.record.traffic.collectives),
        }
        json_lines.append(self.record.path, line)

    def _seconds_of_step(self) -> tuple[float, float | None]:
        """Of a step, mean since the last line; and those of them that it waited."""
        now_s = time.perf_counter()
        num_steps = max(1, self._num_steps)
        step_s = (self._before_s + now_s - self._began_s) / num_steps
        exposed_s = None if self.exposed is None else self.exposed.take_s() / num_steps
        self._num_steps, self._before_s, self._began_s = 0, 0.0, now_s
        return step_s, exposed_s

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Print and record a validation. Called on every rank, with what the ranks agreed on."""
        with nullcontext() if self.knows_loss else without_loss():
            super().log_validation(loss if self.knows_loss else math.nan, step, extra_metrics)
        if self.record is None or not self.tells:
            return
        line = {"schema": SCHEMA, "run_id": self.record.run_id, "step": step, "loss": loss}
        json_lines.append(self.record.path.with_name("validation.jsonl"), line)


@contextmanager
def without_loss() -> Iterator[None]:
    """Within, torchtitan's lines have no loss: this rank does not know it."""

    def drop(record: logging.LogRecord) -> bool:
        record.msg = LOSS.sub("", str(record.msg))
        return True

    titan.addFilter(drop)
    try:
        yield
    finally:
        titan.removeFilter(drop)


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
