"""Saves of one run, one after the other, now or in a thread; what threads still write is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any

from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.checkpoint.states import held_on_cpu
from mics_dtensor.checkpoint.transfer import Keeping, write
from mics_dtensor.errors import CheckpointError
from mics_dtensor.mesh import background_group
from mics_dtensor.world import agreed, is_on_gpus, rank_here

logger = logging.getLogger(__name__)


class UnderWay:
    """The saves that threads of this process write, by folder: whoever comes next waits for them.

    A loop that an exception has ended leaves one behind, which nobody would wait for.
    """

    def __init__(self) -> None:
        self._lock, self._writes = Lock(), dict[Future[None], Path]()

    def add(self, folder: Path, write: Future[None]) -> None:
        """Until it is done."""
        with self._lock:
            self._writes[write] = folder.resolve()
        write.add_done_callback(self._done)

    def _done(self, write: Future[None]) -> None:
        with self._lock:
            self._writes.pop(write, None)

    def wait(self, folder: Path) -> None:
        """Until nothing is written there; the errors are those of the savers that began it."""
        with self._lock:
            there = [write for write, its in self._writes.items() if its == folder.resolve()]
        wait(there)


UNDER_WAY = UnderWay()


class Saving:
    """Saves one after the other; asynchronous ones in a thread.

    Over a group of its own: a thread needs one, and a disk may take longer than GPUs may wait.
    `of`: what is saved, a model; savers of one model may follow each other in a folder.
    """

    def __init__(self, *, asynchronous: bool, of: object = None) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._group = background_group() if asynchronous or is_on_gpus() else None
        self._pending: Future[None] | None = None
        self.owner = Owner(of)
        self._held: dict[str, Any] = {}  # kept: memory that is new costs more than the copy

    def refuse_busy(self, folder: Path) -> None:
        """Raise CheckpointError where another run is known to save there. Collective."""
        is_first = rank_here() == 0
        agreed(
            lambda: self.owner.refuse_busy(folder) if is_first else None, others_as=CheckpointError
        )

    def save(
        self,
        state_dict: Callable[[], Mapping[str, Any]],
        path: Path,
        *,
        about: Manifest,
        keeping: Keeping,
    ) -> Future[None] | None:
        """After the one before is complete, whose error this raises."""
        self.wait()
        UNDER_WAY.wait(path.parent)
        if self._thread is None:
            state = agreed(state_dict, others_as=CheckpointError)
            write(state, path, about=about, keeping=keeping, group=self._group, owner=self.owner)
            return None
        self._held = agreed(
            lambda: held_on_cpu(dict(state_dict()), into=self._held), others_as=CheckpointError
        )
        self._pending = self._thread.submit(
            write,
            self._held,
            path,
            about=about,
            keeping=keeping,
            group=self._group,
            owner=self.owner,
        )
        self._pending.add_done_callback(told_at_once)
        UNDER_WAY.add(path.parent, self._pending)
        return self._pending

    def wait(self) -> None:
        """Until what is written in the background is complete; its error, if it had one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def leave(self) -> None:
        """After an exception: no wait, and the folder is free for another in this process.

        What is under way is written to its end where the other ranks still live.
        """
        self.owner.leave()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self.owner.release()


def told_at_once(done: Future[None]) -> None:
    """The loop hears of an error at its next save; the log now."""
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("%s", error)
