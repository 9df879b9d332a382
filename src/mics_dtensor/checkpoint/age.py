"""Which checkpoint of a folder was completed last: a run that went back has smaller steps. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from mics_dtensor.checkpoint.manifest import NAME

Ages = Mapping[int, float | None]
TICK_S = 0.001


def completed_s(path: Path) -> float | None:
    """When the checkpoint was completed, by its manifest; None where that cannot be read.

    0 of one that was written before manifests had it.
    """
    try:
        return float(json.loads((path / NAME).read_text(encoding="utf-8")).get("completed_s") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def oldest_first(ages: Ages) -> list[int]:
    """The steps by when they were completed, those of one moment by their number.

    One that cannot tell is taken to have followed the steps before it.
    """
    latest_s, found = 0.0, list[tuple[float, int]]()
    for step, its in sorted(ages.items()):
        its_s = latest_s if its is None else its
        latest_s = max(latest_s, its_s)
        found.append((its_s, step))
    return [step for _, step in sorted(found)]


def later_than(known: Iterable[float | None]) -> float:
    """Now, and later than all of `known` even where the clock went back."""
    return max([time.time(), *(its + TICK_S for its in known if its is not None)])
