"""From traces of two shallow depths to every depth and partition size. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mics_dtensor.errors import PlanError

SHARDED = ("Sharded Param", "Sharded Grad", "OptState")
"""Kinds of torch's tracker that a rank holds its shard of."""

GATHERED = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")
"""Those of whole units, padded to a multiple of the shards."""

Kinds = Mapping[str, float]


@dataclass(frozen=True)
class Trace:
    """Bytes by kind at the moments of a step of a model of `num_layers` blocks, traced.

    `shard_numel` elements of the rank's shards, in all units together, and `partition_size` are
    what the kinds scale with.
    """

    num_layers: int
    partition_size: int
    shard_numel: int
    moments: Mapping[str, Mapping[str, int]]

    @cached_property
    def by_place(self) -> dict[str, Mapping[str, int]]:
        """The moments of the first two and the last two blocks, counted from their end, and others.

        All between is linear in the place, so that no more is held there. Those of the root are
        left out: its peak is the highest of the others, wherever that lies. The peak of the step
        counts where no unit holds it: it is that of the loss, which is no unit's.
        """
        found = {}
        for name, by_kind in self.moments.items():
            unit, _, rest = name.partition("|")
            number = re.fullmatch(r"layers\.(\d+)", unit)
            if number is None:
                if unit and name != "peak":
                    found[name] = by_kind
                continue
            place = int(number[1])
            if place < 2:
                found[f"layers.+{place}|{rest}"] = by_kind
            elif place >= self.num_layers - 2:
                found[f"layers.-{self.num_layers - place}|{rest}"] = by_kind
        peak = self.moments["peak"]
        if peak["Total"] > max(by_kind["Total"] for by_kind in found.values()):
            found["loss"] = peak
        return found


def depths_for(num_layers: int) -> tuple[int, int]:
    """Two shallow depths of the same parity, so that every second block is every second block."""
    first = 4 + num_layers % 2
    return first, first + 2


@dataclass(frozen=True)
class Depths:
    """Two traces of one model, work and partition size; each moment is linear in depth (M7)."""

    shallow: Trace
    deeper: Trace

    def __post_init__(self) -> None:
        one, two = self.shallow, self.deeper
        if one.num_layers >= two.num_layers or one.partition_size != two.partition_size:
            raise PlanError(
                f"two depths of one partition size are needed, the smaller first; got "
                f"{one.num_layers} and {two.num_layers} blocks over {one.partition_size} and "
                f"{two.partition_size} shards"
            )

    def peak(self, num_layers: int, partition_size: int, shard_numel: int) -> dict[str, int]:
        """Bytes by kind of `num_layers` blocks whose shards have `shard_numel` elements.

        The highest of all moments: shards in proportion to their elements, gathered units to the
        elements they are padded to, activations not at all.
        """
        one, two = self.shallow, self.deeper
        share = (num_layers - one.num_layers) / (two.num_layers - one.num_layers)
        here = one.shard_numel + share * (two.shard_numel - one.shard_numel)
        smaller = shard_numel / here
        padded = smaller * partition_size / one.partition_size
        found: list[dict[str, float]] = []
        for name in one.by_place.keys() & two.by_place.keys():
            first, second = one.by_place[name], two.by_place[name]
            by_kind = {}
            for kind in (first.keys() | second.keys()) - {"Total"}:
                size = first.get(kind, 0) + share * (second.get(kind, 0) - first.get(kind, 0))
                factor = smaller if kind in SHARDED else padded if kind in GATHERED else 1.0
                by_kind[kind] = size * factor
            found.append(by_kind)
        highest = max(found, key=lambda by_kind: sum(by_kind.values()))
        whole = {kind: round(size) for kind, size in highest.items()}
        return whole | {"Total": sum(whole.values())}
