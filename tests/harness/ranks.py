"""Run a test body on n real ranks: gloo, forked, rendezvous through a file, so no ports.

A failing rank is named with its traceback. A hang is a failure: after `timeout_s` each rank that
has not answered shows where it stands, and is ended by its own process id.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import ParamSpec

import pytest

P = ParamSpec("P")
LEAVE_S = 20.0  # for the end of a rank that has answered: on a loaded machine it may take seconds
GRACE_S = 3.0  # what the others get once one rank has failed: they may fail too, and say why


class RanksFailed(Exception):
    """Some rank of a test failed, hung or died; the message has each rank's own words."""


def ranks(
    world_size: int, *, timeout_s: float = 60.0, torchrun: bool = False
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a test run once on each of `world_size` ranks of a gloo world; any failure fails it.

    Parameters and fixtures are made once, before the fork. Every rank starts with one thread and
    `torch.manual_seed(0)`. A body that skips on every rank is a skipped test. With `torchrun` the
    body finds the environment that torchrun makes, and no world yet.
    """

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            run_on_ranks(
                world_size,
                lambda: body(*args, **kwargs),
                timeout_s=timeout_s,
                port=free_port() if torchrun else None,
            )

        pytest.mark.ranks(world_size)(test)
        pytest.mark.timeout(timeout_s + 60)(test)  # the last resort, should this file be wrong
        return test

    return decorate


def run_on_ranks(
    world_size: int, body: Callable[[], None], *, timeout_s: float, port: int | None = None
) -> None:
    """Call `body` on each rank of a new world of forked processes; raise RanksFailed or skip.

    With a free `port` the ranks find the environment that torchrun makes, and no world yet.
    """
    __tracebackhide__ = True
    import torch  # noqa: F401  imported once, here: the forks share it

    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        started = [
            _Rank(rank, world_size, body, Path(folder), timeout_s, port)
            for rank in range(world_size)
        ]
        try:
            answers = _wait(started, timeout_s)
            done = [rank for rank in started if rank.number in answers]
            hung = [rank for rank in started if rank.number not in answers]
            for rank in hung:  # first of all: once the others leave, it stands elsewhere
                rank.end()
            for rank in done:
                rank.release()
            ends = [rank.unclean_end() for rank in done]
        finally:
            for rank in started:
                rank.end()

    failures = [said for outcome, said in answers.values() if outcome == "failed"]
    failures += [rank.where_it_hangs(timeout_s) for rank in hung]
    failures = failures or [end for end in ends if end]
    if failures:
        raise RanksFailed("\n\n".join(["", *failures]))
    skipped = [said for outcome, said in answers.values() if outcome == "skipped"]
    if skipped and len(skipped) < world_size:
        raise RanksFailed(f"{len(skipped)} of {world_size} ranks skipped the test: {skipped[0]}")
    if skipped:
        pytest.skip(skipped[0])


class _Rank:
    """One forked process, and the pipe on which it answers."""

    def __init__(
        self,
        number: int,
        world_size: int,
        body: Callable[[], None],
        folder: Path,
        timeout_s: float,
        port: int | None,
    ) -> None:
        self.number = number
        self._stack = folder / f"stack_of_rank_{number}"
        self._stood_at = "(it gave no stack)"
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        sys.stdout.flush()  # what is still buffered would be written once by each fork
        sys.stderr.flush()
        self.process: ForkProcess = context.Process(
            target=_live,
            args=(theirs, number, world_size, body, folder / "store", self._stack, timeout_s, port),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[str, str]:
        """Its outcome, "passed", "failed" or "skipped", and its words, once the pipe is ready."""
        try:
            outcome, said = self.pipe.recv()
        except EOFError:
            self.process.join(GRACE_S)
            return "failed", f"rank {self.number} died without a word ({self._exit()})"
        return outcome, said

    def release(self) -> None:
        """Let it leave the world, now that no other rank needs it."""
        try:
            self.pipe.send("leave")
        except OSError:
            return  # it is gone already, and its answer says why

    def unclean_end(self) -> str | None:
        """What went wrong after its answer, while it left the world."""
        self.process.join(LEAVE_S)
        if self.process.exitcode == 0:
            return None
        return f"rank {self.number} did not leave the world in good order ({self._exit()})"

    def end(self) -> None:
        """End it, by its own process id, if it still runs; ask it first where it stands."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.5)
            self.process.kill()
        self.process.join()
        self.pipe.close()
        if self._stack.exists():
            self._stood_at = self._stack.read_text() or self._stood_at

    def where_it_hangs(self, timeout_s: float) -> str:
        """The stack of a rank that never answered."""
        return (
            f"rank {self.number} did not finish: ended after the others failed, or after "
            f"{timeout_s:g} s; it stood at\n{self._stood_at}"
        )

    def _exit(self) -> str:
        code = self.process.exitcode
        if code is None:
            return "still running"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _wait(started: list[_Rank], timeout_s: float) -> dict[int, tuple[str, str]]:
    """The answers by rank, in order of arrival; without those that did not answer in time."""
    waiting = {rank.pipe: rank for rank in started}
    answers: dict[int, tuple[str, str]] = {}
    deadline_s = time.monotonic() + timeout_s
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for ready in connection.wait(list(waiting), left_s):
            rank = waiting.pop(ready)  # type: ignore[call-overload]
            answers[rank.number] = rank.answer()
            if answers[rank.number][0] == "failed":
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return answers


def _live(
    pipe: Connection,
    rank: int,
    world_size: int,
    body: Callable[[], None],
    store: Path,
    stack: Path,
    timeout_s: float,
    port: int | None,
) -> None:
    """The life of one rank, in its own process."""
    parent = os.getppid()
    with stack.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        pipe.send(_answer(rank, world_size, body, store, timeout_s, port))
        # Until every rank is done: closing a connection early fails the others. The siblings hold
        # copies of the parent's end, so that its death is no end of file here.
        while os.getppid() == parent and not pipe.poll(1.0):
            continue
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _answer(
    rank: int,
    world_size: int,
    body: Callable[[], None],
    store: Path,
    timeout_s: float,
    port: int | None,
) -> tuple[str, str]:
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":  # a host name that does not resolve must not matter
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if port is None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                world_size=world_size,
                rank=rank,
                timeout=timedelta(seconds=timeout_s),
            )
        else:
            os.environ |= _torchrun(rank, world_size, port)
        body()
    except pytest.skip.Exception as skip:
        return "skipped", str(skip)
    except BaseException:  # also pytest.fail, SystemExit: whatever it was, the parent shows it
        return "failed", f"rank {rank} of {world_size} failed:\n{traceback.format_exc()}"
    return "passed", ""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank that `torchrun --standalone` starts."""
    ranks_and_sizes = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    ranks_and_sizes |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    return names | {name: str(value) for name, value in ranks_and_sizes.items()}
