"""Pipelines: what torch's schedules ask of the numbers of a run. Pure."""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import divisors
from mics_dtensor.train.config import RunConfig

ONE_STAGE = ("1f1b", "gpipe")
SEVERAL_STAGES = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
IN_A_V = ("zbvzerobubble", "dualpipev")
"""Schedules of torch.distributed.pipelining; torch does not look at the case of their names."""
WRITTEN = "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"


def refuse_pipelines(config: RunConfig) -> None:
    """Raises ConfigError for a pipeline that torch would refuse once the model is there."""
    written = config.parallelism
    stages = written.pipeline_parallel_degree
    if stages == 1:
        return
    batch, validation = config.training.local_batch_size, config.validation
    if validation.enable and validation.local_batch_size != batch:
        raise ConfigError(
            f"validation.local_batch_size {validation.local_batch_size} goes through the schedule "
            f"of the pipeline, which is made for training.local_batch_size {batch}; write "
            f"validation.local_batch_size = {batch}"
        )
    schedule = written.pipeline_parallel_schedule.lower()
    if written.pipeline_parallel_schedule_csv:
        return  # what it may be is known when it is read
    if schedule not in (*ONE_STAGE, *SEVERAL_STAGES, *IN_A_V):
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule = "{written.pipeline_parallel_schedule}"; '
            f"choose from {WRITTEN}"
        )
    at_once = written.pipeline_parallel_microbatch_size
    if at_once < 1 or batch % at_once:
        raise ConfigError(
            f"parallelism.pipeline_parallel_microbatch_size {at_once} does not divide "
            f"training.local_batch_size {batch}; choose from {divisors(batch)}"
        )
    pieces = batch // at_once
    least = {"1f1b": stages, "dualpipev": 2 * stages}.get(schedule, 1)
    rounds = max(1, pieces // stages) if schedule.startswith("interleaved") else 1
    if pieces >= least and pieces % rounds == 0:
        return
    want = f"at least {least}" if pieces < least else f"a multiple of {stages}"
    good = least if pieces < least else pieces - pieces % stages
    raise ConfigError(
        f"training.local_batch_size {batch} in pieces of {at_once} makes {pieces} micro-batches, "
        f"but {written.pipeline_parallel_schedule} over {stages} ranks wants {want}; write "
        f"local_batch_size = {good * at_once}"
        + (', or pipeline_parallel_schedule = "GPipe"' if schedule == "1f1b" else "")
    )


def rank_of_loss(schedule: str, *, world_size: int, stages: int) -> int:
    """The first of the ranks that know the loss: they hold the last stage of the model.

    These are the last ranks of the pipelines, or the first where the schedule runs in a V.
    """
    return world_size // stages * (0 if schedule.lower() in IN_A_V else stages - 1)
