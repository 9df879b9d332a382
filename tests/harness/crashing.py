"""A run that saves all the time, in lives that end at random moments; what it left is looked at.

Run by hand: `python -m harness.crashing --lives 100` from tests/ (with src on the path).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.sharded import mesh_of, shard, whole
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.commit import named
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.errors import CheckpointError

Death = Literal["one rank", "all ranks", "full disk"]
DEATHS: tuple[Death, ...] = ("one rank", "all ranks", "full disk")
SHAPES = ((1, 2), (2, 1), (2, 2), (1, 1))
WIDTH = 96
DISK_BYTES = 1_600_000  # about five checkpoints
PATIENCE_S = 120.0


class Square(nn.Module):
    """Two layers whose every number says which step it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


@contextmanager
def small_disk(num_bytes: int = DISK_BYTES) -> Iterator[Path]:
    """A tmpfs of that size. Raises where this user may not mount one."""
    with tempfile.TemporaryDirectory(prefix="small_disk") as folder:
        options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
        subprocess.run(["mount", *options], check=True, capture_output=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True, capture_output=True)


@contextmanager
def disk_or_skip(num_bytes: int = DISK_BYTES) -> Iterator[Path]:
    """`small_disk`; skips the test where none can be mounted."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(small_disk(num_bytes))
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a small disk cannot be mounted here ({error})")
        yield folder


def live(rank: int, shape: tuple[int, int], store: str, folder: Path, pipe: Connection) -> None:
    """One rank of one life: go on from what is there, then save at every step, for ever."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        world_size=shape[0] * shape[1],
        rank=rank,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    model: Any = shard(Square(), mesh_of(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    options = CheckpointOptions(keep_last=2, asynchronous=bool(shape[0] % 2))
    checkpoints = Checkpoints(folder, model=model, optimizer=optimizer, options=options)
    manifest = checkpoints.resume()
    step = 0 if manifest is None else manifest.step
    for parameter in model.parameters():
        if manifest is not None:
            assert torch.equal(whole(parameter), torch.full(parameter.shape, float(step)))
    pipe.send(("resumed", step))
    pending: int | None = None  # being written while the next step is taken
    while True:
        step += 1
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        try:
            checkpoints.save(step)
        except CheckpointError as error:  # on every rank alike: the run goes on
            pipe.send(("refused", str(error)))
            pending = None
            continue
        complete, pending = (pending, step) if options.asynchronous else (step, None)
        if complete is not None:
            pipe.send(("saved", complete))


class Lives:
    """Lives of one run in `folder`, one after the other; `seed` decides how each ends."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder, self._random = folder, random.Random(seed)
        self.newest = 0  # that a rank has said to be complete
        self.told = dict.fromkeys(("resumed", "saved", "refused"), 0)

    def live_and_die(self, death: Death) -> None:
        """Start ranks, end them at a random moment, and look at what is there."""
        shape = self._random.choice(SHAPES)
        context = get_context("fork")
        with tempfile.TemporaryDirectory() as meeting:
            ranks: dict[Connection, ForkProcess] = {}
            for rank in range(shape[0] * shape[1]):
                ours, theirs = context.Pipe()
                run = self.folder / "run"
                arguments = (rank, shape, f"{meeting}/store", run, theirs)
                ranks[ours] = context.Process(target=live, args=arguments, daemon=True)
                ranks[ours].start()
                theirs.close()
            try:
                self._listen(ranks, until_saved=self._random.randint(1, 3))
                if death == "full disk":
                    self._fill(ranks)
                else:
                    time.sleep(self._random.random() * 0.3)
                doomed = list(ranks.values())
                for process in doomed[: 1 if death == "one rank" else None]:
                    process.kill()
                self._listen(ranks, until_saved=None)  # the others stop by themselves
            finally:
                for process in ranks.values():
                    process.kill()
                    process.join()
        self.look()

    def _listen(self, ranks: dict[Connection, ForkProcess], *, until_saved: int | None) -> None:
        """Hear the ranks, until one has saved so often, or until all are gone."""
        open_pipes, saved = list(ranks), 0
        deadline_s = time.monotonic() + PATIENCE_S
        while open_pipes and (until_saved is None or saved < until_saved):
            ready = wait(open_pipes, deadline_s - time.monotonic())
            if not ready:
                raise AssertionError("ranks hang")
            for pipe in ready:
                try:
                    what, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    open_pipes.remove(pipe)  # type: ignore[arg-type]
                    continue
                self.told[what] += 1
                if what == "resumed":
                    assert value >= self.newest, (value, self.newest)
                elif what == "saved":
                    saved += 1
                    self.newest = max(self.newest, value)
                else:
                    assert "was not written: rank" in value, value
                    assert "No space left on device" in value, value
        if until_saved is not None and not open_pipes:
            raise AssertionError(f"the ranks of {self.folder} ended by themselves")

    def _fill(self, ranks: dict[Connection, ForkProcess]) -> None:
        """Leave a part of a checkpoint free, until a save is refused; then make room again."""
        before = self.told["refused"]
        filler = self.folder / "filler"
        left = self._random.randrange(1, 200_000)
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)) == 4096:
                    continue
            file.truncate(max(0, file.tell() - left))
        deadline_s = time.monotonic() + PATIENCE_S
        while self.told["refused"] == before and time.monotonic() < deadline_s:
            self._listen_once(ranks)
        filler.unlink()
        self._listen(ranks, until_saved=len(ranks))

    def _listen_once(self, ranks: dict[Connection, ForkProcess]) -> None:
        for pipe in wait(list(ranks), 1.0):
            what, value = pipe.recv()  # type: ignore[union-attr]
            self.told[what] += 1
            if what == "saved":
                self.newest = max(self.newest, value)

    def look(self) -> None:
        """What has a name is whole, to the last byte, and the newest that was complete is there."""
        found = named(self.folder / "run")
        for path in found.values():
            Manifest.read(path).check(path)
        assert max(found, default=0) >= self.newest, (list(found), self.newest)


def main() -> None:
    """As the docstring of the file says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with small_disk() as folder:
        lives = Lives(folder, seed=options.seed)
        for number in range(options.lives):
            death = DEATHS[number % len(DEATHS)]
            lives.live_and_die(death)
            print(f"life {number + 1}: {death}; step {lives.newest}, {lives.told}", flush=True)


if __name__ == "__main__":
    main()
