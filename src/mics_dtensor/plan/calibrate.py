"""From timings to the constants of a cluster, and to `cluster.toml`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.timing import (
    WAYS,
    Fit,
    Timing,
    fitted,
    hop_between_s,
    hop_inside_s,
    two_parameters,
)

BAD_FIT = 0.3
"""A fit that misses a measured time by more than this is told."""

SLOW = 1.25
"""A node that takes this much longer than the median of the nodes is told."""


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link from timings; None of its numbers is taken from a table of another cluster."""

    bandwidth_bytes_per_s: float
    hop_latency_s: float


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of the model, [rows, inner] x [inner, columns], and its rate."""

    name: str
    rows: int
    inner: int
    columns: int
    flops_per_s: float

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True, kw_only=True)
class UnitTiming:
    """Seconds that FSDP2 adds to a unit and micro-step, nothing sent.

    `message_bytes` are those of its two gathers and its reduction, whole.
    """

    message_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `mics measure` found: all of a `cluster.toml`."""

    name: str
    device: str
    hosts: tuple[str, ...]
    ranks_per_node: int
    backend: str
    timings: tuple[Timing, ...]
    products: tuple[Product, ...]
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    overlap_slowdown: float
    units: tuple[UnitTiming, ...]
    reserved_bytes: int
    node_seconds: Mapping[str, float]
    """By host: a product and a collective inside the node, for the warning about a slow one."""

    @property
    def product_share(self) -> float:
        """Share of the peak over all products of the model, each weighted by its work."""
        work = sum(each.flops for each in self.products)
        seconds = sum(each.flops / each.flops_per_s for each in self.products)
        return min(1.0, work / seconds / self.peak_flops_per_s)


def links(timings: Iterable[Timing], ranks_per_node: int) -> tuple[LinkFit, LinkFit]:
    """The link inside a node and that out of a node, for groups that were not measured (C6).

    All groups of a node share its NIC: its bytes are those of all of them. Where nothing inside
    (or nothing between) was measured, one stands for the other. Raises PlanError without any.
    """
    every = list(timings)
    inside = [t for t in every if t.num_nodes == 1]
    between = [t for t in every if t.num_nodes > 1]
    if not every:
        raise PlanError("nothing was timed: a link needs one collective of two ranks or more")
    fits = [(t, fitted(t)) for t in inside]
    hop_in_s = median(hop_inside_s(t, fit) for t, fit in fits) if fits else 0.0
    slow = []
    for timing in between:
        out_of_node = ranks_per_node / timing.ranks_per_node  # edges of all groups at once
        slow.append((timing, fitted(timing, edges=out_of_node)))
    hop_s = [hop_between_s(t, fit, inside_s=hop_in_s) for t, fit in slow]
    fast = [fit.bytes_per_s for _, fit in fits]
    out = [fit.bytes_per_s for _, fit in slow]
    within = LinkFit(bandwidth_bytes_per_s=median(fast or out), hop_latency_s=hop_in_s)
    across = LinkFit(
        bandwidth_bytes_per_s=median(out) if out else median(fast) * ranks_per_node,
        hop_latency_s=median(hop_s) if hop_s else hop_in_s,
    )
    return within, across


def added_to_a_unit(units: Sequence[UnitTiming]) -> tuple[float, float]:
    """Seconds a unit, and seconds a byte of its messages (C10); both 0 where nothing was timed."""
    timed = [unit for unit in units if unit.seconds > 0]
    us = [1 / unit.seconds for unit in timed]
    vs = [unit.message_bytes / unit.seconds for unit in timed]
    host_s, per_byte_s = two_parameters(us, vs, [1.0] * len(timed))
    return max(0.0, host_s), max(0.0, per_byte_s)


def warnings(measured: Measured) -> list[str]:
    """What a reader should know before trusting the file; one sentence each."""
    told = []
    for timing in measured.timings:
        fit: Fit = fitted(timing)
        if fit.worst > BAD_FIT:
            told.append(
                f"{timing.collective} over {timing.num_nodes} x {timing.ranks_per_node} ranks "
                f"misses latency + bytes / bandwidth by up to {fit.worst:.0%}: groups that were "
                "not measured are guessed from it; measure on a quiet machine, or longer "
                "(--repetitions)"
            )
    usual = median(measured.node_seconds.values())
    for host, seconds in measured.node_seconds.items():
        if seconds > SLOW * usual:
            told.append(
                f"{host} is slow: it takes {seconds / usual:.2f} times as long as the median of "
                f"the {len(measured.node_seconds)} nodes; every collective waits for it"
            )
    return told


def columns(timings: Sequence[Timing]) -> list[str]:
    """The tables as nccl-tests prints them: bytes, microseconds, GB/s and GB/s."""
    lines = []
    for timing in timings:
        lines += [
            "",
            f"# {timing.collective}, groups of {timing.num_nodes} x {timing.ranks_per_node} "
            "(nodes x ranks of each), all at once",
            f"{'size':>12}  {'time':>10}  {'algbw':>8}  {'busbw':>8}",
            f"{'(B)':>12}  {'(us)':>10}  {'(GB/s)':>8}  {'(GB/s)':>8}",
        ]
        for place, (size, seconds) in enumerate(
            zip(timing.sizes_bytes, timing.seconds, strict=True)
        ):
            algbw, busbw = size / seconds / 1e9, timing.busbw(place) / 1e9
            lines.append(f"{size:>12}  {seconds * 1e6:>10.1f}  {algbw:>8.3f}  {busbw:>8.3f}")
    return lines


def cluster_toml(measured: Measured) -> str:
    """The text of `cluster.toml`, schema 1 of docs/formats.md."""
    within, across = links(measured.timings, measured.ranks_per_node)
    host_s, per_byte_s = added_to_a_unit(measured.units)
    hosts = ", ".join(_text(host) for host in measured.hosts)
    lines = [
        "# Written by `mics measure`; `mics plan --cluster THIS_FILE` takes it.",
        "schema = 1",
        "",
        "[cluster]",
        f"name = {_text(measured.name)}",
        f"device = {_text(measured.device)}",
        f"backend = {_text(measured.backend)}",
        f"hosts = [{hosts}]",
        f"num_nodes = {len(measured.hosts)}",
        f"ranks_per_node = {measured.ranks_per_node}",
        f"peak_flops_per_s = {measured.peak_flops_per_s:.6g}",
        f"product_share = {measured.product_share:.4f}",
        f"memory_bytes = {measured.memory_bytes}",
        f"memory_bytes_per_s = {measured.memory_bytes_per_s:.6g}",
        f"reserved_bytes = {measured.reserved_bytes}",
        f"overlap_slowdown = {measured.overlap_slowdown:.4f}",
        f"unit_s = {host_s:.6g}",
        f"unit_s_per_byte = {per_byte_s:.6g}",
        'origin = "measured"',
    ]
    for name, link in (("intra_node", within), ("inter_node", across)):
        lines += [
            "",
            f"[link.{name}]",
            f"bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:.6g}",
            f"latency_s = {link.hop_latency_s:.6g}",
            'origin = "measured"',
        ]
    for timing in measured.timings:
        lines += [
            "",
            "[[timing]]",
            f"collective = {_text(timing.collective)}",
            f"num_nodes = {timing.num_nodes}",
            f"ranks_per_node = {timing.ranks_per_node}",
            f"size_bytes = {list(timing.sizes_bytes)}",
            f"seconds = [{', '.join(f'{seconds:.6g}' for seconds in timing.seconds)}]",
        ]
    for product in measured.products:
        lines += [
            "",
            "[[product]]",
            f"name = {_text(product.name)}",
            f"shape = [{product.rows}, {product.inner}, {product.columns}]",
            f"flops_per_s = {product.flops_per_s:.6g}",
        ]
    return "\n".join([*lines, ""])


def _text(said: str) -> str:
    escaped = said.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def merged(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    """Timings of one collective and shape together; of a size that is there twice, the faster."""
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    kept: dict[tuple[str, int, int], Timing] = {}
    for timing in timings:
        key = (timing.collective, timing.num_nodes, timing.ranks_per_node)
        kept.setdefault(key, timing)
        sizes = found.setdefault(key, {})
        for size, seconds in zip(timing.sizes_bytes, timing.seconds, strict=True):
            sizes[size] = min(seconds, sizes.get(size, seconds))
    return tuple(
        Timing(
            collective=timing.collective,
            num_nodes=timing.num_nodes,
            ranks_per_node=timing.ranks_per_node,
            sizes_bytes=tuple(sorted(found[key])),
            seconds=tuple(found[key][size] for size in sorted(found[key])),
        )
        for key, timing in sorted(
            kept.items(), key=lambda each: (each[0][1:], list(WAYS).index(each[1].collective))
        )
    )
