"""Checkpoints: the saves of one run in one folder, for a training loop of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from mics_dtensor.checkpoint.age import completed_s, oldest_first
from mics_dtensor.checkpoint.commit import named, refuse_no_folder
from mics_dtensor.checkpoint.loading import Loading, saved_outlines
from mics_dtensor.checkpoint.manifest import Damaged, Manifest, versions
from mics_dtensor.checkpoint.matching import named as listed
from mics_dtensor.checkpoint.reading import Reader
from mics_dtensor.checkpoint.saving import UNDER_WAY, Saving
from mics_dtensor.checkpoint.states import States, device_of, replication_groups
from mics_dtensor.checkpoint.transfer import Keeping, read
from mics_dtensor.errors import CheckpointError
from mics_dtensor.layout import Layout
from mics_dtensor.world import agreed, gathered, rank_here

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

    Any FSDP2 model, with `apply_mics` or without, one module; any optimizer, or several of its
    parameters, ReplicaShardedOptimizer too. Saving changes nothing in them. `extra`: by name, what
    else has a state_dict (schedulers, an EMA, a data loader); its load_state_dict gets all that was
    saved, whatever it holds by then. What differs from rank to rank needs names that differ, of its
    own or inside. Loading works on any layout and any number of ranks. A folder is of one model.

    Collective, its making too: every rank of the world makes the same calls. Errors are
    CheckpointError, the same on every rank; those of an asynchronous save come from the next call.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        extra: Mapping[str, Stateful] | None = None,
        options: CheckpointOptions = CheckpointOptions(),
    ) -> None:
        self.folder, self._options = Path(folder), options
        self._states = States(one_model(model), optimizers_of(optimizer), extra or {})
        self._saving = Saving(asynchronous=options.asynchronous, of=model)

    def save(self, step: int, *, tokens: int | None = None) -> None:
        """Save as step-`step`, of which nothing is seen until it is complete."""
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step is {step!r}; give a whole number, 0 or more")
        about = Manifest(
            step=step,
            contents="training" if self._states.optimizers else "model",
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
        """Load step-`step`. What is saved then is the newest, whatever later steps are there."""
        self.wait()
        UNDER_WAY.wait(self.folder)
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
        if kind is None:
            self.close()
        else:  # the other ranks may have stopped, and the error is what matters
            self._saving.leave()

    def _read(self, path: Path) -> Manifest:
        parts = [self._states.model]
        reader = Reader(path, groups=replication_groups(parts), device=device_of(parts))
        manifest = reader.manifest
        if manifest is None or (manifest.contents == "model" and self._states.optimizers):
            raise CheckpointError(
                f"{path} holds weights alone: load it with Checkpoints(..., optimizer=None), or "
                "name a step that was saved with an optimizer"
            )
        loading = Loading(self._states, reader.metadata, device_of(parts))
        try:
            agreed(loading.begin, others_as=CheckpointError)
            read(loading.state, reader)
        except BaseException:
            loading.give_up()
            raise
        agreed(loading.finish)
        self._tell_of_what_was_left(reader)
        return manifest

    def _tell_of_what_was_left(self, reader: Reader) -> None:
        """Collective. Weights alone are asked for without all of it."""
        here = {name for of_rank in gathered(list(self._states.extra)) for name in of_rank}
        left = (saved_outlines(reader.metadata) or {}).keys() - here
        if left and rank_here() == 0 and (self._states.optimizers or here):
            logger.warning(
                "%s also has `extra` that is not loaded, since no rank has given it: %s",
                reader.path,
                listed(left),
            )


def newest_good(folder: Path, load: Callable[[Path], Manifest]) -> Manifest | None:
    """What `load` says of the newest checkpoint of `folder` that is whole. Collective.

    The newest is the one that was completed last. Each manifest is asked by one rank that sees it.
    """
    UNDER_WAY.wait(folder)
    agreed(lambda: refuse_no_folder(folder))
    seen = gathered({step: str(path) for step, path in named(folder).items()})
    paths = {step: path for of_rank in reversed(seen) for step, path in of_rank.items()}
    asked = {step: rank for rank in reversed(range(len(seen))) for step in seen[rank]}
    mine = [step for step, rank in asked.items() if rank == rank_here()]
    told = gathered({step: completed_s(Path(paths[step])) for step in mine})
    ages = {step: its for of_rank in told for step, its in of_rank.items()}
    passed = list[str]()
    for step in reversed(oldest_first(ages)):
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


def one_model(model: object) -> nn.Module:
    """It, where it is one. Raises CheckpointError."""
    if isinstance(model, nn.Module):
        return model
    raise CheckpointError(
        f"model is a {type(model).__name__}, and Checkpoints saves one module: give it "
        "torch.nn.ModuleList(parts), or each part a Checkpoints and a folder of its own"
    )


def optimizers_of(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """One, several or none. Raises CheckpointError where it is something else, or two share one."""
    several = isinstance(given, Iterable)
    found: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if given is None:
        return ()
    if not found or not all(isinstance(its, torch.optim.Optimizer) for its in found):
        kinds = ", ".join(type(its).__name__ for its in found) if several else ""
        raise CheckpointError(
            f"optimizer is a {type(given).__name__}{f' of {kinds or 0}' * several}; give a "
            "torch.optim.Optimizer, a list of them, or None for weights alone"
        )
    held = [p for its in found for group in its.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise CheckpointError(
            f"{len(held) - len(set(held))} parameters are in several of the {len(found)} "
            "optimizers, and a checkpoint has one set of states of each: give every parameter to "
            "one of them"
        )
    return found
