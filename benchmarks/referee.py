"""Gives the ranks their turns, and reads the counters while all of them stand still."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import ClusterError
from benchmarks.counters import Snapshot, take


@dataclass
class Seat:
    """One rank of a world, as the launcher sees it."""

    world: str
    rank: int
    pid: int
    socket: socket.socket
    buffer: bytes = b""

    def send(self, message: object) -> None:
        """Give it a command, or let it go on."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ClusterError(f"{self} is gone: {error}") from error

    def read(self) -> list[dict[str, Any]]:
        """The whole messages that have come in."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ClusterError(f"{self} died; its own words are above")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def __str__(self) -> str:
        return f"rank {self.rank} of world {self.world} (process {self.pid})"


@dataclass
class Turn:
    """What came of a command: one answer a rank, and the snapshots that were asked for."""

    answers: list[dict[str, Any]]
    marks: list[tuple[str, Snapshot]] = field(default_factory=list)

    def between(self) -> list[tuple[str, Snapshot]]:
        """What was counted from each mark to the next, under the label of the second."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(label, after - before) for (_, before), (label, after) in pairs]


class Referee:
    """Listens at `path`; `worlds` maps the name of each to its number of ranks.

    `check` is called while waiting and raises where a world cannot go on.
    """

    def __init__(
        self,
        path: Path,
        worlds: Mapping[str, int],
        *,
        ranks_per_node: int,
        check: Callable[[], None],
    ) -> None:
        self._worlds = worlds
        self._ranks_per_node = ranks_per_node
        self._check = check
        self._seats: dict[str, list[Seat]] = {}
        self._own_pids: list[int] = [os.getpid()]
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(sum(worlds.values()))

    def wait_for_ranks(self, *, timeout_s: float, more_pids: list[int]) -> None:
        """Until every rank of every world has said hello. `more_pids` are ours too."""
        found: list[Seat] = []
        deadline_s = time.monotonic() + timeout_s
        self._server.settimeout(1.0)
        while len(found) < sum(self._worlds.values()):
            self._check()
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"{len(found)} of {sum(self._worlds.values())} ranks came up within "
                    f"{timeout_s:g} s; is traffic over bridges filtered on this machine?"
                )
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            hello = json.loads(connection.makefile("r").readline())
            found.append(Seat(hello["hello"], hello["rank"], hello["pid"], connection))
        for world in self._worlds:
            mine = [seat for seat in found if seat.world == world]
            self._seats[world] = sorted(mine, key=lambda seat: seat.rank)
        self._own_pids += [*more_pids, *(seat.pid for seat in found)]

    def turn(self, world: str, command: Mapping[str, Any], *, timeout_s: float) -> Turn:
        """Give all ranks of `world` a command, and wait for their answers."""
        seats = self._seats[world]
        deadline_s = time.monotonic() + timeout_s
        turn = Turn([{} for _ in seats])
        answered: set[int] = set()
        marked: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for seat in seats:
                selector.register(seat.socket, selectors.EVENT_READ, seat)
                seat.send(command)
            while len(answered) < len(seats):
                ready = selector.select(1.0)
                if not ready:
                    self._check()
                    late = sorted({s.rank for s in seats} - answered - set(marked))
                    if time.monotonic() > deadline_s:
                        raise ClusterError(f"ranks {late} did not finish {dict(command)} in time")
                for key, _ in ready:
                    for message in key.data.read():
                        if "mark" in message:
                            marked[key.data.rank] = message["mark"]
                        else:
                            turn.answers[key.data.rank] = message
                            answered.add(key.data.rank)
                if len(marked) == len(seats):
                    turn.marks.append((self._label(marked), self.snapshot(world)))
                    marked.clear()
                    for seat in seats:
                        seat.send({})
        return turn

    def snapshot(self, world: str) -> Snapshot:
        """The counters now. Exact while the ranks wait in `mark`."""
        return take([s.pid for s in self._seats[world]][:: self._ranks_per_node], self._own_pids)

    def dismiss(self, *, timeout_s: float) -> None:
        """Tell all ranks to leave, and wait until they have. What torchrun says after is no matter:
        the one that holds the store may leave before the others.
        """
        seats = [seat for seats in self._seats.values() for seat in seats]
        for seat in seats:
            seat.send({"do": "leave"})
        for seat in seats:
            seat.socket.settimeout(timeout_s)
            with suppress(OSError):
                seat.socket.recv(1)

    def _label(self, marked: Mapping[int, str]) -> str:
        if len(set(marked.values())) > 1:
            raise ClusterError(f"ranks are not at the same place: {dict(sorted(marked.items()))}")
        return marked[0]
