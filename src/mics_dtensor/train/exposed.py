"""Exposed communication: how long computation stands still for messages that nothing hides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mics_dtensor.collectives import FlatAllGather, FlatReduceScatter
from mics_dtensor.stage import around_stages
from mics_dtensor.upstream import Unit

Span = Callable[[], AbstractContextManager[object]]


class HostClock:
    """On CPU the host computes, and waits in the call that sends."""

    def computes_here(self) -> bool:
        """Whether what is called now is in the order of the computation."""
        return True

    def mark(self) -> float:
        """Now, in that order."""
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        """Whether the computation has come there. Does not wait for it."""
        return mark <= time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Between two marks that are past."""
        return end - start

    def beside(self, span: Span) -> AbstractContextManager[object]:  # noqa: ARG002  none here
        """Within, waits that are no stage of ours are surrounded by `span()` too."""
        return nullcontext()


class StreamClock:
    """On CUDA a stream computes, and waits for events of the streams that FSDP2 sends on.

    Two events around each wait: the first is passed when the stream has nothing left to do but
    wait, the second when it may go on. Nothing is synchronised, not even when they are read.
    """

    def __init__(self, module: Any, *, sends: bool) -> None:
        self._module = module  # torch.cuda
        self._stream = module.current_stream()
        self._sends = sends  # else FSDP2's streams only copy

    def computes_here(self) -> bool:
        """Whether the computing stream is the current one."""
        return bool(self._module.current_stream() == self._stream)

    def mark(self) -> Any:
        """An event of the computing stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the GPU has come there."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events that are past."""
        return float(start.elapsed_time(end)) / 1e3

    @contextmanager
    def beside(self, span: Span) -> Iterator[None]:
        """The waits of the stream: FSDP2 calls `wait_event` of its class, and offers no hook."""
        if not self._sends:
            yield
            return
        kind, its = self._module.Stream, self._stream
        of_torch = kind.wait_event

        def wait_event(stream: Any, event: Any) -> None:
            with span() if stream == its else nullcontext():
                of_torch(stream, event)

        kind.wait_event = wait_event
        try:
            yield
        finally:
            kind.wait_event = of_torch


class ExposedCommunication:
    """Adds up what the steps of this rank have waited for gathers, reductions and the boundary.

    Those of the messages that `explain` tells, and of the agreement about them: not for what
    tensor, context, expert and pipeline parallel send, nor for the sums of loss and norm.
    """

    def __init__(self, clock: HostClock | StreamClock) -> None:
        self._clock = clock
        self._spans: deque[tuple[Any, Any]] = deque()
        self._inside = False

    @classmethod
    def of(cls, units: Iterable[Unit], *, graphs: bool) -> ExposedCommunication | None:
        """For a run of these units; None where it cannot be told: a replay runs no Python.

        On CPU the collectives of units inside a node, which are torch's own, become ours of the
        same function, which are stages.
        """
        units = list(units)
        if graphs or not units:
            return None
        device = units[0].device
        if device.type == "cpu":
            for unit in units:
                if unit.has_default_collectives:
                    unit.set_collectives(
                        FlatAllGather(unit=unit.name), FlatReduceScatter(unit=unit.name)
                    )
            return cls(HostClock())
        sends = any(unit.num_shards > 1 for unit in units)
        return cls(StreamClock(torch.get_device_module(device), sends=sends))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, waits are counted."""
        with around_stages(self._span), self._clock.beside(self._any_span):
            yield

    def take_s(self) -> float:
        """Seconds since the last call. Waits that a GPU has not come to are left for the next."""
        total_s = 0.0
        while self._spans and self._clock.is_past(self._spans[0][1]):
            total_s += self._clock.seconds(*self._spans.popleft())
        return total_s

    def _span(self) -> AbstractContextManager[object]:
        return self._any_span() if self._clock.computes_here() else nullcontext()

    @contextmanager
    def _any_span(self) -> Iterator[None]:
        if self._inside:  # a stage within a stage counts once
            yield
            return
        self._inside, start = True, self._clock.mark()
        try:
            yield
        finally:
            self._inside = False
            self._spans.append((start, self._clock.mark()))
