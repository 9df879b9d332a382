"""What a step was to reach: times of systems over one another in one launch, the median of several.

A ratio is between medians of the same launch, where both systems took turns, so that a slow hour of
the machine is in both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Results = dict[str, Any]
Place = tuple[str, float]
"""A system, and the nodes of its partition group."""


@dataclass(frozen=True)
class Aim:
    """Seconds of `slower` over those of `faster`; without `slower`, over the least possible."""

    faster: Place
    slower: Place | None
    bound: float
    is_at: Literal["least", "most"] = "least"

    def value(self, results: Results) -> float | None:
        """In one launch; None where it did not run both."""
        rows = _rows(results)
        if self.faster not in rows or (self.slower is not None and self.slower not in rows):
            return None
        if self.slower is None:
            return float(rows[self.faster]["seconds_over_least"])
        return float(rows[self.slower]["seconds_median"] / rows[self.faster]["seconds_median"])

    def holds(self, value: float) -> bool:
        """Whether `value`, as it is shown, is on the right side of the bound."""
        return value >= self.bound if self.is_at == "least" else value <= self.bound

    def __str__(self) -> str:
        if self.slower is None:
            return f"{_name(self.faster)} over the least possible"
        return f"{_name(self.slower)} / {_name(self.faster)}"


AIMS = (
    Aim(("mics", 1), ("fsdp2", 4), 3.6),
    Aim(("mics", 1), ("deepspeed-zero3-reuse0", 4), 3.6),
    Aim(("mics", 1), ("deepspeed-zero3", 4), 2.8),
    Aim(("mics", 1), ("hsdp", 1), 2.0),
    Aim(("mics-overlap", 1), ("fsdp2", 4), 3.6),
    Aim(("mics-overlap", 1), ("hsdp", 1), 2.0),
    Aim(("mics-overlap-no-reshard", 1), ("hsdp-no-reshard", 1), 2.0),
    Aim(("mics", 2), ("hsdp", 2), 1.9),
    Aim(("mics-node-local", 2), ("hsdp", 2), 2.4),
    Aim(("mics-node-local", 2), ("mics", 2), 1.25),
    Aim(("mics", 4), ("fsdp2", 4), 1.3),
    Aim(("mics-node-local", 4), ("fsdp2", 4), 1.75),
    Aim(("mics-node-local", 4), ("mics", 4), 1.25),
    Aim(("mics", 2), None, 1.4, "most"),
    Aim(("mics", 4), None, 1.4, "most"),
)
"""On 4 nodes of 2 ranks at 400 Mbit/s; the least possible is max(own CPU seconds / cores, wire)."""


def told(launches: Sequence[Results]) -> Iterator[str]:
    """A Markdown table: every aim that these launches can answer, each launch, and the median."""
    if not any(aim.value(launches[0]) for aim in AIMS):
        return
    yield ""
    yield f"| seconds a step | aim | {_launch_names(launches)} | median | |"
    yield f"|---|---|{'---|' * (len(launches) + 2)}"
    for aim in AIMS:
        values = [value for results in launches if (value := aim.value(results)) is not None]
        if len(values) == len(launches):
            median = round(statistics.median(values), 2)
            each = " | ".join(f"{value:.2f}" for value in values)
            sign = ">=" if aim.is_at == "least" else "<="
            verdict = "holds" if aim.holds(median) else "**missed**"
            yield f"| {aim} | {sign} {aim.bound:g} | {each} | {median:.2f} | {verdict} |"


def medians(launches: Sequence[Results]) -> Iterator[str]:
    """A Markdown table: the median seconds of every system in each launch, with the spread."""
    names = _launch_names(launches)
    yield f"| system | partition nodes | {names} | over the least | MB out of a node |"
    yield f"|---|---|{'---|' * (len(launches) + 2)}"
    by_launch = [_rows(results) for results in launches]
    for place, row in by_launch[0].items():
        rows = [each[place] for each in by_launch]
        cells = [
            f"{r['seconds_median']:.2f} ({r['seconds_min']:.2f}, {r['seconds_max']:.2f})"
            + ("" if r["num_quiet"] else " not quiet")
            for r in rows
        ]
        over = statistics.median(float(r["seconds_over_least"]) for r in rows)
        sent = row["inter_node_bytes_per_step"] / 1e6
        yield f"| {place[0]} | {place[1]:g} | {' | '.join(cells)} | {over:.2f} | {sent:.2f} |"


def _rows(results: Results) -> Mapping[Place, dict[str, Any]]:
    return {(row["system"], row["partition_nodes"]): row for row in results["rows"]}


def _launch_names(launches: Sequence[Results]) -> str:
    return " | ".join(f"launch {number + 1}" for number in range(len(launches)))


def _name(place: Place) -> str:
    return f"{place[0]} ({place[1]:g})"
