"""The line from a rank to the launcher: a Unix socket, which no counted interface sees."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


class Line:
    """One end, at a rank. Messages are JSON objects, one a line."""

    def __init__(self, path: str, *, world: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._input = self._socket.makefile("r")
        self.send(hello=world, rank=rank, pid=os.getpid())

    def send(self, **message: Any) -> None:
        """Say something to the launcher."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next command. Raises EOFError when the launcher is gone."""
        if not (line := self._input.readline()):
            raise EOFError("the launcher is gone")
        command: dict[str, Any] = json.loads(line)
        return command

    def mark(self, label: str) -> None:
        """Wait until every rank of this world is here and the counters have been read.

        `label` names what has happened since the mark before. Sends nothing over the network.
        """
        self.send(mark=label)
        self.receive()
