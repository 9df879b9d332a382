"""One state dict to one folder and back, on all ranks; errors are one sentence on each of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.matching import MatchedPlanner
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.checkpoint.placement import PlacedPlanner, Placement, Writer
from mics_dtensor.checkpoint.reading import Reader
from mics_dtensor.errors import CheckpointError, MicsError
from mics_dtensor.world import rank_here, words_of

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How checkpoints are kept. `keep_last`: of them the newest; 0 is all. See PlacedPlanner."""

    keep_last: int = 0
    placement: Placement = "spread"

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise CheckpointError(f"keep_last is {self.keep_last}; give 0 for all, or more")
        if self.placement not in ("spread", "partition_group"):
            raise CheckpointError(
                f'placement is {self.placement!r}; choose "spread" or "partition_group"'
            )


def write(
    state: Mapping[str, Any],
    path: Path,
    *,
    about: Manifest,
    keeping: Keeping,
    group: dist.ProcessGroup | None = None,
    owner: Owner | None = None,
) -> None:
    """Write the checkpoint `path`; after this it is complete. Collective over `group` (the world).

    Raises CheckpointError on every rank, and then nothing is there under that name that was not.
    """
    writer = Writer(path, about=about, keep_last=keeping.keep_last, owner=owner)
    try:
        with one_sentence(f"the checkpoint {path} was not written"):
            save(
                dict(state),
                storage_writer=writer,
                planner=PlacedPlanner(keeping.placement),
                process_group=group,
            )
    except BaseException:
        if rank_here() == 0:
            writer.give_up()
        raise


def read(state: State, reader: Reader) -> None:
    """Fill `state` from a checkpoint, as dcp.load does. Collective over the world.

    Raises CheckpointError on every rank for another model's checkpoint, and, of the kind Damaged,
    for one that is not whole; nothing in `state` has changed then.
    """
    with one_sentence(f"the checkpoint {reader.path} was not loaded"):
        load(state, storage_reader=reader, planner=MatchedPlanner(reader.path))


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Of what went wrong on some ranks, the first rank's own error."""
    with warnings.catch_warnings():
        # A single process without a group is meant, and needs no word about it.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank = min(error.failures)
            its = error.failures[rank][0]
            if isinstance(its, MicsError):
                raise type(its)(str(its)) from None
            raise CheckpointError(f"{what}: rank {rank}: {words_of(its)}") from error
