"""Who writes into a checkpoint folder: one run at a time, and a restart never waits. Pure: files.

A run names its process in the folder before its first save. Another run that begins to save there

1. is refused where that process is provably alive: on this host, by its pid and start time;
2. else takes the folder over, as a restart must be able to after a crash on another host. A run
   that has been taken over stops at its next save, before it sweeps what is the other's by now.

Two savers in one process know of each other: the second is refused while the first may save on,
unless both save the same, as one that a loop has made anew.

So nothing waits for a lease or a clock, and what is left of a killed run is in nobody's way.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from weakref import ref

from mics_dtensor.errors import CheckpointError

NAME = ".writer.json"


@dataclass(frozen=True)
class Process:
    """A process as another one recognises it: pids come again, together with start times not."""

    host: str
    boot: str
    pid: int
    started: str
    """In ticks since the boot."""

    @classmethod
    def here(cls) -> Process:
        """The one that asks. Without /proc it is never known to be alive."""
        return cls(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()))

    @property
    def is_alive(self) -> bool | None:
        """None where it cannot be told from here: of another host or another boot of it."""
        if not self.boot or (self.host, self.boot) != (socket.gethostname(), _boot()):
            return None
        return bool(self.started) and _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


class Owner:
    """The claim of one run on the folders that it saves to. One rank asks, the same one always.

    `of`: what it saves; two of one process may save the same, or what neither has told, in turn.
    """

    def __init__(self, of: object = None) -> None:
        self._taken: set[Path] = set()
        self._of = (lambda: None) if of is None else ref(of)
        self._has_left = False

    def refuse_busy(self, folder: Path) -> None:
        """Raise CheckpointError where a process that is known to run writes into `folder`."""
        found = _read(folder)
        if found is not None and found.process != Process.here() and found.is_alive:
            raise CheckpointError(
                f"{folder} is written by {found.process}, which runs: stop one of the two, or give "
                "each run a folder of its own (in the program checkpoint.folder or "
                f"job.dump_folder); if that process is done with it, delete {folder / NAME}"
            )

    def take(self, folder: Path) -> None:
        """Name this process in `folder`, which exists, before a save. Raises CheckpointError."""
        self.refuse_busy(folder)
        self._refuse_another_here(folder)
        claim, found = Claim(Process.here(), str(folder.resolve())), _read(folder)
        if found is not None and found.is_alive is None and folder.resolve() in self._taken:
            raise CheckpointError(
                f"{folder} was taken over by {found.process}, a later run, so this one writes no "
                "more into it: give each run a folder of its own (in the program "
                f"checkpoint.folder or job.dump_folder), or delete {folder / NAME} if that run is "
                "over"
            )
        if found != claim:
            claim.write(folder)
        self._taken.add(folder.resolve())
        if not self._has_left:
            SAVING_HERE[folder.resolve()] = ref(self)

    def _refuse_another_here(self, folder: Path) -> None:
        """Raise CheckpointError where another one of this process saves something else there."""
        if self._is_anothers(folder):
            gc.collect()  # one that is garbage is in nobody's way
        if self._is_anothers(folder):
            raise CheckpointError(
                f"{folder} is where another Checkpoints of this process saves another model, and "
                "each would replace the other's steps: give each a folder of its own, or close() "
                "the other first"
            )

    def _is_anothers(self, folder: Path) -> bool:
        other = SAVING_HERE.get(folder.resolve(), _nobody)()
        theirs, mine = None if other is None else other._of(), self._of()
        both_told = theirs is not None and mine is not None
        return other is not self and both_told and theirs is not mine

    def leave(self) -> None:
        """Be in nobody's way in this process any more. The claim on disk stays, till `release`."""
        self._has_left = True
        for folder in [its for its, owner in list(SAVING_HERE.items()) if owner() is self]:
            del SAVING_HERE[folder]

    def release(self) -> None:
        """At the end of a run: its claims go, where nobody has taken them over."""
        self.leave()
        self._has_left = False  # it may begin again
        for folder in self._taken:
            if _read(folder) == Claim(Process.here(), str(folder)):
                (folder / NAME).unlink(missing_ok=True)
        self._taken.clear()


@dataclass(frozen=True)
class Claim:
    """What stands in a folder: who writes there, and under which name of it."""

    process: Process
    folder: str

    @property
    def is_alive(self) -> bool | None:
        """None where it cannot be told from here."""
        return self.process.is_alive

    def write(self, folder: Path) -> None:
        """Whole or not there: nobody reads half of it."""
        since = datetime.now(tz=UTC).isoformat(timespec="seconds")
        beside = folder / f"{NAME}.{self.process.host}.{self.process.pid}"
        beside.write_text(json.dumps(asdict(self) | {"since": since}) + "\n", encoding="utf-8")
        beside.replace(folder / NAME)


def _nobody() -> None:
    """In place of a reference to the owner of a folder that nobody has taken."""


SAVING_HERE: dict[Path, Callable[[], Owner | None]] = {}
"""By folder, who of this process has last begun to save there."""


def _read(folder: Path) -> Claim | None:
    """The claim on `folder`; None where there is none, or that of the folder it was copied from."""
    try:
        read = json.loads((folder / NAME).read_text(encoding="utf-8"))
        found = Claim(Process(**read["process"]), str(read["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_here = found.process.host == socket.gethostname()  # where names of folders mean the same
    return None if is_here and found.folder != str(folder.resolve()) else found


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Empty for a process that is not there, or is dead and not yet buried."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:
        return ""
    state, *rest = after_name.split()
    return "" if state in ("Z", "X") else rest[18]
