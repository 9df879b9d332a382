"""A stage of communication: a named range in the trace, and a name in the error where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from mics_dtensor.errors import CommunicationError
from mics_dtensor.upstream import is_profiling


def named_range(what: str, unit: str) -> AbstractContextManager[object]:
    """`mics::<what> (<unit>)` in the trace of a profiler that is on; without one, nothing."""
    # Asked first: a record_function costs 5 us of the host where nobody profiles, and there are
    # several a unit and micro-step.
    return record_function(f"mics::{what} ({unit})") if is_profiling() else nullcontext()


ALL_UNITS = "all units"
"""In place of a unit's name, of a stage that is for all of them."""


@contextmanager
def around_stages(span: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Within, every stage of this thread runs inside a `span()`: for those who measure."""
    before = _AROUND.set(span)
    try:
        yield
    finally:
        _AROUND.reset(before)


_AROUND: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar(
    "what is around every stage", default=nullcontext
)


@contextmanager
def stage(what: str, unit: str, group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Run one stage over `group` for `unit`; a failure or timeout becomes a CommunicationError.

    `what` is the name that `explain` gives the stage.
    """
    with named_range(what, unit), _AROUND.get()():
        try:
            yield group
        except RuntimeError as error:
            of = unit if unit == ALL_UNITS else f"unit {unit or '(unnamed)'}"
            raise CommunicationError(
                f"{what} failed for {of} on rank {dist.get_rank()}, in the "
                f"group of ranks {dist.get_process_group_ranks(group)}: {error}"
            ) from error


class StageWork(dist.Work):
    """The Work of a stage's last message: waiting names the stage where it fails.

    A subclass, since FSDP2 waits for a Work and for nothing else. Holds the stage's buffers.
    """

    def __init__(
        self,
        work: dist.Work,
        named: tuple[str, str, dist.ProcessGroup],  # what, unit, group: as of `stage`
        *buffers: torch.Tensor,
    ) -> None:
        super().__init__()
        self._work = work
        self._named = named
        self._buffers = buffers

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the message is here (on CUDA: until the current stream may use it)."""
        with stage(*self._named):
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        """Whether the message is here."""
        return bool(self._work.is_completed())

    def synchronize(self) -> None:
        """Make the current stream wait, without a timeout."""
        self._work.synchronize()

    def get_future(self) -> Any:
        """The future of the message."""
        return self._work.get_future()
