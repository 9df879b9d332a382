"""Laws of pipelines: what torch's schedules would refuse late is refused early, with what works."""

from pathlib import Path

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load
from mics_dtensor.train.pipeline import rank_of_loss


def resolved(folder: Path, parallelism: str, batch: int) -> None:
    path = folder / "run.toml"
    text = f"[training]\nlocal_batch_size = {batch}\n[parallelism]\n"
    path.write_text(f"{text}pipeline_parallel_degree = 4\n{parallelism}\n")
    resolve(load(["--config-file", str(path)]), world_size=16, local_world_size=4)


@pytest.mark.parametrize(
    ("parallelism", "batch", "words"),
    [
        ("", 2, r"2 micro-batches, but 1F1B over 4 ranks wants at least 4; write local_batch_size"),
        (
            "pipeline_parallel_microbatch_size = 2",
            4,
            r"wants at least 4; write local_batch_size = 8",
        ),
        ("pipeline_parallel_microbatch_size = 3", 8, r"size 3 does not divide .* 8; choose from"),
        ("pipeline_parallel_schedule = 'DualPipeV'", 4, r"DualPipeV over 4 ranks wants at least 8"),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'", 9, r"multiple of 4; .* = 8$"),
        ("pipeline_parallel_schedule = '1B1F'", 8, r'"1B1F"; choose from 1F1B, GPipe'),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(
    tmp_path: Path, parallelism: str, batch: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tmp_path, parallelism, batch)


@pytest.mark.parametrize(
    ("parallelism", "batch"),
    [
        ("", 4),
        ("pipeline_parallel_schedule = 'gpipe'", 2),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'", 2),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'", 10),
        ("pipeline_parallel_schedule = 'ZBVZeroBubble'", 3),
        ("pipeline_parallel_schedule = 'DualPipeV'", 8),
    ],
)
def test_a_schedule_that_can_run_is_let_through(
    tmp_path: Path, parallelism: str, batch: int
) -> None:
    resolved(tmp_path, parallelism, batch)


def test_the_loss_is_where_the_last_stage_is() -> None:
    assert rank_of_loss("1F1B", world_size=16, stages=1) == 0
    assert rank_of_loss("1F1B", world_size=16, stages=4) == 12
    assert rank_of_loss("dualpipev", world_size=16, stages=4) == 0
