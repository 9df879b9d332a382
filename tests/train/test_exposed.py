"""Exposed communication: what a rank waits for messages, and nothing else."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch.distributed as dist
from train.small_run import configured, ours

from mics_dtensor.train.exposed import ExposedCommunication, StreamClock
from mics_dtensor.train.trainer import MicsTrainer

SLEEP_S = 1.5


def told(trainer: MicsTrainer) -> list[tuple[float, float]]:
    """Of every step of `trainer`, on this rank: its seconds, and those that it waited."""
    steps: list[tuple[float, float]] = []
    metrics = trainer.metrics_processor
    asked = metrics._seconds_of_step

    def seconds() -> tuple[float, float | None]:
        steps.append(asked())
        return steps[-1]

    metrics._seconds_of_step = seconds
    return steps


def before_micro_step(trainer: MicsTrainer, call: Callable[[], None]) -> None:
    step = trainer.forward_backward_step

    def called(**batch: Any) -> Any:
        call()
        return step(**batch)

    trainer.forward_backward_step = called


@pytest.mark.parametrize("partition_size", [2, 4], ids=["replicas", "stages between nodes"])
@ranks(4, timeout_s=90)
def test_the_others_wait_for_a_rank_that_sleeps_and_it_does_not(
    tmp_path: Path, partition_size: int
) -> None:
    """It sleeps once all are there.

    Its own group waits in a gather, the other replica at the boundary; nobody waits longer than the
    step takes.
    """
    options = ("--training.steps=3", "--training.global_batch_size=8")
    trainer = ours(*configured(tmp_path, *options, f"--mics.partition_size={partition_size}"))
    steps, rank = told(trainer), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    num_micro_steps = trainer.gradient_accumulation_steps

    def sleep_in_the_last_step() -> None:
        if trainer.step != 3 or trainer._micro_steps_done:
            return
        store.set(f"at the gather {rank}", "")
        if rank == 3:
            store.wait([f"at the gather {each}" for each in range(4)])
            time.sleep(SLEEP_S)

    before_micro_step(trainer, sleep_in_the_last_step)
    trainer.train()
    trainer.close()
    assert num_micro_steps == 2
    assert len(steps) == 3
    for step_s, exposed_s in steps:
        assert 0 < exposed_s < step_s
    step_s, exposed_s = steps[-1]
    if rank == 3:
        assert exposed_s < step_s - SLEEP_S
    else:
        assert exposed_s > SLEEP_S / 2  # half: they come to the message a little after they said so
    if rank == 0:
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
        assert [(line["step_s"], line["exposed_communication_s"]) for line in lines] == steps


@ranks(1, timeout_s=90)
def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    options = ("--training.global_batch_size=2", "--mics.ranks_per_node=1")
    trainer = ours(*configured(tmp_path, *options, "--training.steps=2", "--mics.partition_size=1"))
    trainer.train()
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["exposed_communication_s"] for line in lines] == [0.0, 0.0]
    assert all(line["step_s"] > 0 for line in lines)


class Cuda:
    """torch.cuda, whose time passes when `now` is set: streams that wait, events that last."""

    def __init__(self) -> None:
        self.now, self.reached = 0.0, 0.0  # seconds of the stream, and how far a GPU has come
        self.current: Any = None
        cuda = self

        class Stream:
            def wait_event(self, event: float) -> None:
                cuda.now = max(cuda.now, event)  # the stream stands still until then

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Stream) -> None:
                assert stream is computing
                self.at_s = cuda.now

            def query(self) -> bool:
                return self.at_s <= cuda.reached

            def elapsed_time(self, end: "Event") -> float:
                assert end.query()  # else torch raises
                return (end.at_s - self.at_s) * 1e3

        self.Stream, self.Event = Stream, Event
        computing = self.computing = self.current = Stream()
        self.sending = Stream()

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.computing


def test_on_cuda_the_waits_of_the_computing_stream_count_and_are_read_when_they_are_past() -> None:
    """A stand-in for torch.cuda without a way to synchronise: nothing does."""
    from mics_dtensor.stage import _AROUND

    cuda = Cuda()
    of_torch = cuda.Stream.wait_event
    exposed = ExposedCommunication(StreamClock(cuda, sends=True))
    with exposed.counted():
        cuda.computing.wait_event(2.0)  # a gather that is here at 2: waits 2
        cuda.now += 5.0  # computes
        cuda.computing.wait_event(6.0)  # long here: waits nothing
        cuda.sending.wait_event(9.0)  # the stream that sends may wait as it likes
        with cuda.stream(cuda.sending), _AROUND.get()():
            cuda.now += 1.0  # a stage of ours on that stream
        with _AROUND.get()(), _AROUND.get()():  # the boundary, and a stage of it
            cuda.computing.wait_event(cuda.now + 0.5)
        cuda.reached = cuda.now
        cuda.computing.wait_event(cuda.now + 4.0)  # the GPU is not there yet
    assert exposed.take_s() == 2.5
    assert exposed.take_s() == 0.0
    cuda.reached = cuda.now
    assert exposed.take_s() == 4.0
    assert cuda.Stream.wait_event is of_torch
    cuda.computing.wait_event(cuda.now + 7.0)  # outside of a step
    alone = ExposedCommunication(StreamClock(cuda, sends=False))
    with alone.counted():
        cuda.computing.wait_event(cuda.now + 1.0)  # for a copy
    cuda.reached = cuda.now
    assert (exposed.take_s(), alone.take_s()) == (0.0, 0.0)


def test_of_cuda_graphs_it_cannot_be_told() -> None:
    assert ExposedCommunication.of([], graphs=True) is None
