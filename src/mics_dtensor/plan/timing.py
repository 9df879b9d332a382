"""Seconds of a collective by bytes of its message, as nccl-tests tells them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, inf, log

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.stage import Collective

WAYS: Mapping[Collective, int] = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_reduce": 2,
}
"""How often a ring goes round: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one collective in groups of one shape, all groups of the world at once.

    `sizes_bytes` are nccl-tests' sizes, ascending: what is gathered, what is reduced, the buffer of
    an all-reduce. `ranks_per_node` are those of a group in one of its `num_nodes` nodes.
    """

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        whole = len(self.sizes_bytes) == len(self.seconds) > 0 and self.ranks > 1
        rising = all(low < high for low, high in pairwise(self.sizes_bytes))
        positive = whole and min(self.sizes_bytes) > 0 and all(0 < s < inf for s in self.seconds)
        if self.collective not in WAYS or not (whole and rising and positive):
            raise PlanError(
                f"a timing of {self.collective} over {self.num_nodes} x {self.ranks_per_node} "
                "ranks needs two ranks or more, ascending sizes above 0 and a time above 0 for "
                f"each, of one of {', '.join(WAYS)}"
            )

    @property
    def ranks(self) -> int:
        """Ranks of a group."""
        return self.num_nodes * self.ranks_per_node

    def over_edge(self, size_bytes: float) -> float:
        """Bytes over one edge of the ring: what bus bandwidth counts (nccl-tests)."""
        return WAYS[self.collective] * (self.ranks - 1) / self.ranks * size_bytes

    def busbw(self, place: int) -> float:
        """Bytes a second over an edge, at the size of that place."""
        return self.over_edge(self.sizes_bytes[place]) / self.seconds[place]

    def seconds_of(self, size_bytes: float) -> float:
        """Log-log between the sizes (C7). Below them the smallest's time, above the last's rate."""
        sizes, seconds = self.sizes_bytes, self.seconds
        if size_bytes <= sizes[0]:
            return seconds[0]
        for (low, at_low), (high, at_high) in pairwise(zip(sizes, seconds, strict=True)):
            if size_bytes <= high:
                place = log(size_bytes / low) / log(high / low)
                return exp(log(at_low) + place * log(at_high / at_low))
        return seconds[-1] * size_bytes / sizes[-1]

    def faster(self, factor: float) -> Timing:
        """The same on a link that is `factor` times as fast."""
        return replace(self, seconds=tuple(s / factor for s in self.seconds))


@dataclass(frozen=True)
class Fit:
    """seconds = `latency_s` + bytes / `bytes_per_s`, and the worst relative error of that."""

    latency_s: float
    bytes_per_s: float
    worst: float


def fitted(timing: Timing, *, edges: float = 1.0, from_bytes: int = 0) -> Fit:
    """The two parameters of a timing, by least squares of relative errors (C6).

    Bytes are those over `edges` edges of its ring; sizes below `from_bytes` are left out where two
    are left. A latency below 0 is taken as 0.
    """
    pairs = list(zip(timing.sizes_bytes, timing.seconds, strict=True))
    large = [pair for pair in pairs if pair[0] >= from_bytes]
    pairs = large if len(large) > 1 else pairs
    moved = [edges * timing.over_edge(size) for size, _ in pairs]
    seconds = [second for _, second in pairs]
    # Both sides over the seconds: 1 = latency u + v / rate.
    us = [1 / s for s in seconds]
    vs = [m / s for m, s in zip(moved, seconds, strict=True)]
    latency_s, per_byte = two_parameters(us, vs, [1.0] * len(us))
    if latency_s <= 0 or per_byte <= 0:
        latency_s, per_byte = 0.0, sum(vs) / sum(v * v for v in vs)
    worst = max(abs(latency_s * u + per_byte * v - 1) for u, v in zip(us, vs, strict=True))
    return Fit(latency_s, 1 / per_byte, worst)


def two_parameters(
    us: Sequence[float], vs: Sequence[float], targets: Sequence[float]
) -> tuple[float, float]:
    """A and b that make a u + b v the targets, by least squares; both 0 where u and v are alike."""
    uu, vv = sum(u * u for u in us), sum(v * v for v in vs)
    uv = sum(u * v for u, v in zip(us, vs, strict=True))
    ut = sum(u * t for u, t in zip(us, targets, strict=True))
    vt = sum(v * t for v, t in zip(vs, targets, strict=True))
    determinant = uu * vv - uv * uv
    if determinant <= 1e-9 * uu * vv:
        return 0.0, 0.0
    return (ut * vv - vt * uv) / determinant, (vt * uu - ut * uv) / determinant


def hop_inside_s(timing: Timing, fit: Fit, *, base_s: float = 0.0) -> float:
    """Latency of a hop of a ring inside a node (C6)."""
    return max(0.0, fit.latency_s - base_s) / WAYS[timing.collective] / (timing.ranks - 1)


def hop_between_s(timing: Timing, fit: Fit, *, inside_s: float, base_s: float = 0.0) -> float:
    """Latency of a hop between nodes: what the hops inside leave (C6). Ranks lie node by node."""
    between = timing.num_nodes - 1
    inside = timing.ranks - 1 - between
    ways = WAYS[timing.collective]
    return max(0.0, (fit.latency_s - base_s) / ways - inside * inside_s) / between
