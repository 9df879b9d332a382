"""A world of ranks that lives for many cases: the parent sends each case, all ranks run it.

For property-based tests: hypothesis draws and shrinks in the parent. After a failure the ranks may
stand anywhere, so they are ended, and the next case finds a new world.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from harness.ranks import RanksFailed

Body = Callable[[Any], None]


class LivingRanks:
    """`world_size` forked gloo ranks that call `body(case)`; started when first needed."""

    def __init__(self, world_size: int, body: Body, *, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.num_worlds = 0
        self._body = body
        self._timeout_s = timeout_s
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> LivingRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._end(politely=kind is None)

    def run(self, case: object) -> None:
        """Run one case on every rank; raise RanksFailed with the words of those that failed."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send(case)
        failures: list[str] = []
        waiting = {pipe: number for number, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = connection.wait(list(waiting), 3.0 if failures else self._timeout_s + 10)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} did not finish")
                break
            for pipe in ready:
                number = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    said = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    said = "died"
                if said is not None:
                    failures.append(f"rank {number}: {said}")
        if failures:
            self._end(politely=False)
            raise RanksFailed("\n".join([f"case {case}", *failures]))

    def _start(self) -> None:
        import torch  # noqa: F401  once, here: the forks share it

        self.num_worlds += 1
        self._folder = TemporaryDirectory(prefix="living")
        context = get_context("fork")
        for number in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_live,
                args=(theirs, number, self.world_size, self._body, self._folder.name),
                kwargs={"timeout_s": self._timeout_s},
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, mine))

    def _end(self, *, politely: bool) -> None:
        for process, pipe in self._ranks:
            if politely:
                pipe.send(None)
            else:
                process.kill()
        for process, pipe in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _live(
    pipe: Connection, rank: int, world_size: int, body: Body, folder: str, *, timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    sys.settrace(None)  # hypothesis traces the parent, to explain; ten times slower
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        world_size=world_size,
        rank=rank,
        timeout=timedelta(seconds=timeout_s),
    )
    while (case := pipe.recv()) is not None:
        try:
            body(case)
        except BaseException:  # the parent shows it, whatever it was
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
    dist.destroy_process_group()
