import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.ranks import ranks

metrics = pytest.importorskip("mics_dtensor.train.metrics")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now_s = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now_s[0])
    return now_s


def test_progress_is_told_at_most_every_30_s(clock: list[float]) -> None:
    progress = metrics.Progress(done=0, last=1000)
    told = []
    for step in range(1, 101):
        clock[0] += 1.5
        told.append(progress.words(step))
    assert [step for step, words in enumerate(told, start=1) if words] == [20, 40, 60, 80, 100]
    assert told[19] == "progress: step 20 / 1000, elapsed 0:00:30, remaining 0:24:30"


def test_a_resumed_run_counts_its_own_steps_alone(clock: list[float]) -> None:
    progress = metrics.Progress(done=900, last=1000)
    clock[0] += 60
    assert progress.words(910) == ("progress: step 910 / 1000, elapsed 0:01:00, remaining 0:09:00")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0:00:00"), (61, "0:01:01"), (36000, "10:00:00")]
)
def test_durations_are_hours_minutes_seconds(seconds: float, words: str) -> None:
    assert metrics._duration(seconds) == words


def test_the_rate_is_that_of_the_first_group() -> None:
    assert metrics._lr({"n_tokens_seen": 7, "lr/AdamW/0": 0.5, "lr/AdamW/1": 0.1}) == 0.5
    assert metrics._lr({}) is None


@ranks(2, timeout_s=120)
def test_a_rank_of_a_pipeline_that_does_not_know_the_loss_tells_none(tmp_path: Path) -> None:
    from train.small_run import ours, train

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept(level=logging.INFO)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    pipeline = ("pipeline_parallel_degree=2", "data_parallel_replicate_degree=1")
    train(
        ours,
        tmp_path,
        *(f"--parallelism.{each}" for each in pipeline),
        "--mics.partition_size=none",
        "--mics.ranks_per_node=none",
        "--training.steps=2",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
        "--model.n_layers=2",
        "--validation.enable",
        "--validation.freq=1",
        "--validation.steps=1",
        "--validation.local_batch_size=2",
        "--validation.seq_len=32",
    )
    logging.getLogger().removeHandler(handler)
    steps = [line for line in lines if "step:  2" in line and "tps:" in line]
    assert len(steps) == 2  # of the training and of a validation
    for line in steps:
        assert "memory:" in line
        assert ("loss:" in line) == (dist.get_rank() == 1), line
