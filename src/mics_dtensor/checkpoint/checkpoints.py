"""Checkpoints: the saves of one run in one folder, for a training loop of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from mics_dtensor.checkpoint.commit import named, refuse_no_folder
from mics_dtensor.checkpoint.manifest import Damaged, Manifest, versions
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.checkpoint.reading import Reader
from mics_dtensor.checkpoint.states import States, device_of, held_on_cpu, replication_groups
from mics_dtensor.checkpoint.transfer import Keeping, read, write
from mics_dtensor.errors import CheckpointError
from mics_dtensor.layout import Layout
from mics_dtensor.mesh import background_group
from mics_dtensor.world import agreed, gathered, is_on_gpus, rank_here

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Keeping):
    """How checkpoints are written, and what their manifests say of the run.

    `asynchronous`: a save copies the values into host memory and returns; a thread writes them.
    """

    asynchronous: bool = False
    layout: Layout | None = None
    config: Mapping[str, Any] | None = None


class Checkpoints:
    """The checkpoints of a run, `folder`/step-N, of a sharded model and its optimizer.

    Any FSDP2 model, with `apply_mics` or without; any optimizer, ReplicaShardedOptimizer too.
    `extra`: by name, what else has a state_dict (schedulers, an EMA, a data loader); what differs
    from rank to rank needs names that differ. Loading works on any layout and any number of ranks.

    Collective, its making too: every rank of the world makes the same calls. Errors are
    CheckpointError, the same on every rank; those of an asynchronous save come from the next call.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Stateful] | None = None,
        options: CheckpointOptions = CheckpointOptions(),
    ) -> None:
        self.folder, self._options = Path(folder), options
        self._states = States(model, optimizer, extra or {})
        self._saving = Saving(asynchronous=options.asynchronous)

    def save(self, step: int, *, tokens: int | None = None) -> None:
        """Save as step-`step`, of which nothing is seen until it is complete."""
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step is {step!r}; give a whole number, 0 or more")
        about = Manifest(
            step=step,
            contents="model" if self._states.optimizer is None else "training",
            files=(),
            tokens=tokens,
            layout=None if self._options.layout is None else as_keys(self._options.layout),
            versions=versions("torch"),
            config=self._options.config,
        )
        path = self.folder / f"step-{step}"
        self._saving.save(self._states.state_dict, path, about=about, keeping=self._options)

    def resume(self) -> Manifest | None:
        """Load the newest checkpoint that is whole; its manifest, or None where there is none yet.

        One that is damaged is passed over with a warning. Where all are, or the newest is of
        another model or of a newer version, that is an error, and nothing has changed.
        """
        self.wait()
        return newest_good(self.folder, self._read)

    def load(self, step: int) -> Manifest:
        """Load step-`step`."""
        self.wait()
        return self._read(self.folder / f"step-{step}")

    def wait(self) -> None:
        """Until an asynchronous save is complete; its error, if it had one."""
        self._saving.wait()

    def close(self) -> None:
        """Wait, and end the thread. Before the process group is destroyed."""
        self._saving.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is None:  # else the other ranks may have stopped, and the error is what matters
            self.close()

    def _read(self, path: Path) -> Manifest:
        parts = [self._states.model]
        reader = Reader(path, groups=replication_groups(parts), device=device_of(parts))
        manifest = reader.manifest
        if manifest is None or (manifest.contents == "model" and self._states.optimizer):
            raise CheckpointError(
                f"{path} holds weights alone: load it with Checkpoints(..., optimizer=None), or "
                "name a step that was saved with an optimizer"
            )
        state = agreed(self._states.state_dict, others_as=CheckpointError)
        read(state, reader)
        agreed(lambda: self._states.load_state_dict(state))
        return manifest


class Saving:
    """Saves one after the other; asynchronous ones in a thread.

    Over a group of its own: a thread needs one, and a disk may take longer than GPUs may wait.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._group = background_group() if asynchronous or is_on_gpus() else None
        self._pending: Future[None] | None = None
        self.owner = Owner()
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
        return self._pending

    def wait(self) -> None:
        """Until what is written in the background is complete; its error, if it had one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self.owner.release()


def newest_good(folder: Path, load: Callable[[Path], Manifest]) -> Manifest | None:
    """What `load` says of the newest checkpoint of `folder` that is whole. Collective."""
    agreed(lambda: refuse_no_folder(folder))
    seen = gathered({step: str(path) for step, path in named(folder).items()})
    paths = {step: path for of_rank in reversed(seen) for step, path in of_rank.items()}
    passed = list[str]()
    for step in sorted(paths, reverse=True):
        try:
            return load(Path(paths[step]))
        except Damaged as error:
            passed.append(str(error))
            if rank_here() == 0:  # all have the same error
                logger.warning("passed over: %s", error)
    if passed:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole, so the run cannot go on, and it does not begin "
            f"anew by itself: name another folder to begin anew. {' | '.join(passed)}"
        )
    return None


def as_keys(layout: Layout) -> dict[str, int]:
    """A layout as a manifest holds it."""
    return {
        "world_size": layout.topology.world_size,
        "ranks_per_node": layout.topology.ranks_per_node,
        "partition_size": layout.partition_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
    }


def told_at_once(done: Future[None]) -> None:
    """The loop hears of an error at its next save; the log now."""
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("%s", error)
