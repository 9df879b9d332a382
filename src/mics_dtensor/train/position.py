"""Where a run stands in its data, as a manifest says it and as a loader takes it up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mics_dtensor.errors import CheckpointError
from mics_dtensor.train.lanes import LaneLoader

READERS = "readers"  # in a manifest's `data`: of torchtitan's loader with worker processes


def position_of(loader: Any) -> dict[str, int]:
    """What a manifest says of a loader: where it stands, or how many ranks must read on."""
    if isinstance(loader, LaneLoader):
        return loader.position
    return {READERS: loader.dp_world_size}


def take_up(loader: Any, saved: Mapping[str, int] | None, path: Path) -> None:
    """Refuse a position that this loader cannot go on from; before anything is loaded."""
    its = position_of(loader)
    if saved is not None and isinstance(loader, LaneLoader) and "lanes" in saved:
        loader.take_up(dict(saved))
        return
    if saved is not None and its == saved:
        return
    anew = 'begin the data anew with checkpoint.exclude_from_loading = ["dataloader"]'
    if saved is None:
        raise CheckpointError(
            f"{path} does not say where the data stood, as one that `mics convert deepspeed` wrote "
            f"cannot: {anew}, in this start alone"
        )
    readers = saved.get(READERS)
    how = "was read without worker processes"
    if readers is not None:
        how = f"was read by worker processes of {readers} data-parallel ranks"
    here = "without" if isinstance(loader, LaneLoader) else "with"
    same = (
        f"start {readers} data-parallel ranks with the same training.dataloader.num_workers"
        if readers is not None
        else "write training.dataloader.num_workers = 0"
    )
    raise CheckpointError(
        f"{path} {how}, and this run has {loader.dp_world_size} data-parallel ranks {here} worker "
        f"processes, which cannot go on there without repeating or skipping samples: {same}, or "
        f"{anew}"
    )
