"""SIGTERM or SIGINT on any rank: all stop after the same step, with a checkpoint to go on from."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch
import torch.distributed as dist
from train.small_run import configured, ours

from mics_dtensor.train.stopping import StopRequest
from mics_dtensor.train.trainer import MicsTrainer

SAVING = (
    "--training.steps=7",
    "--training.global_batch_size=8",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100",
    "--checkpoint.last_save_model_only=false",
)


def run(trainer: MicsTrainer, during: Callable[[int], None] = lambda _: None) -> list[float]:
    """Train, and the losses of the steps; `during` is told the step that begins."""
    losses: list[float] = []
    log, step = trainer.metrics_processor.log, trainer.train_step

    def logged(number: int, loss: float, *more: float, **metrics: object) -> None:
        losses.append(loss)
        log(number, loss, *more, **metrics)

    def stepped(batches: object) -> None:
        during(trainer.step)
        step(batches)

    trainer.metrics_processor.log, trainer.train_step = logged, stepped
    trainer.train()
    trainer.close()
    return losses


@pytest.mark.parametrize("heard_by", [{0}, {3}, {1, 2}, {0, 1, 2, 3}], ids=str)
@ranks(4, timeout_s=60)
def test_all_ranks_agree_after_the_same_step(heard_by: set[int]) -> None:
    """The signal comes at another step on every rank; the answer is one."""
    rank = dist.get_rank()
    request = StopRequest()
    request.listen()
    first = 2 + min(heard_by)
    stopped = None
    for step in range(1, 12):
        if rank in heard_by and step == 2 + rank:
            wish = signal.SIGINT if rank % 2 else signal.SIGTERM
            os.kill(os.getpid(), wish)
            os.kill(os.getpid(), wish)  # a scheduler may repeat itself
        if request.agreed(torch.device("cpu")):
            stopped = step
            break
    assert stopped == first + 1


@ranks(4, timeout_s=60)
def test_without_a_signal_nobody_stops() -> None:
    request = StopRequest()
    request.listen()
    assert [request.agreed(torch.device("cpu")) for _ in range(5)] == [False] * 5


# torchtitan's scheduler asks torch's for its rate in a way that torch warns of.
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@ranks(4, timeout_s=150)
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir(exist_ok=True)
    whole = run(ours(*configured(tmp_path / "whole", *SAVING)))
    assert len(whole) == 7

    def terminate(step: int) -> None:
        if (rank, step) in ((1, 3), (2, 4)):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = ours(*configured(tmp_path / "stopped", *SAVING))
    trainer.stop_request = StopRequest()
    trainer.stop_request.listen()
    before = run(trainer, terminate)
    assert trainer.step == len(before) == 4  # heard in step 3
    dist.barrier()
    saved = tmp_path / "stopped" / "checkpoint"
    assert [folder.name for folder in saved.iterdir()] == ["step-4"]
    after = run(ours(*configured(tmp_path / "stopped", *SAVING)))
    assert before + after == pytest.approx(whole, rel=1e-6)
