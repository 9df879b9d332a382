"""What a cluster can do: its GPUs and its two links, each constant with its origin. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from math import exp, log
from typing import Any, Literal

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.operators import Attention, AttentionRate
from mics_dtensor.plan.stage import Collective
from mics_dtensor.plan.timing import Timing

Origin = Literal["preset", "measured", "user"]
UNCERTAINTY: Mapping[Origin, float] = {"preset": 0.25, "measured": 0.05, "user": 0.15}
"""How far a constant of each origin may be off, as a share of itself; what a tie is judged by."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link. Inside a node the bandwidth is that out of a rank, between nodes out of a whole node.

    `shares` is the share of the bandwidth that a message of so many bytes reaches, ascending;
    measured in groups of `curve_ranks` ranks on `curve_nodes` nodes.
    """

    bandwidth_bytes_per_s: float
    hop_latency_s: float
    shares: tuple[tuple[float, float], ...]
    curve_ranks: int
    curve_nodes: int
    origin: Origin
    source: str

    def share(self, message_bytes: float) -> float:
        """Share of the bandwidth that a message reaches: log-log between the table's sizes.

        Below the smallest size the time stays that of the smallest; above the largest the share is
        that of the largest.
        """
        first, last = self.shares[0], self.shares[-1]
        if message_bytes <= first[0]:
            return first[1] * message_bytes / first[0]
        for (low, at_low), (high, at_high) in pairwise(self.shares):
            if message_bytes <= high:
                place = log(message_bytes / low) / log(high / low)
                return exp(log(at_low) + place * log(at_high / at_low))
        return last[1]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of `ranks_per_node` GPUs. An object that exists is valid."""

    name: str
    gpu: str
    ranks_per_node: int
    peak_flops_per_s: float
    product_share: float
    product_half_width: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside: Link
    between: Link
    base_latency_s: float
    origin: Origin
    source: str
    timings: tuple[Timing, ...] = ()
    """Measured on this cluster: used as they are where the group is the same (C7)."""
    overlap_slowdown: float = 0.0
    """Seconds that products lose for each second of messages beside them (T1)."""
    unit_s: float = 0.0
    unit_s_per_byte: float = 0.0
    """What FSDP2 adds to a unit and micro-step beside products and messages (C10)."""
    reserved_bytes: int | None = None
    """What a rank holds beside tensors: context and buffers, measured; None: assumed."""
    measured_nodes: int | None = None
    attention: tuple[AttentionRate, ...] = ()
    """By kernel; one that is not here has the rate of the products."""

    @property
    def on_cpu(self) -> bool:
        """Ranks compute on CPU and send over gloo: the host is the device, and nothing overlaps."""
        return self.gpu == "cpu"

    def timing_of(self, collective: Collective, group: GroupShape) -> Timing | None:
        """The measured timing of that collective in groups of that shape, if there is one."""
        wanted = (collective, group.num_nodes, group.ranks_per_node)
        for its in self.timings:
            if (its.collective, its.num_nodes, its.ranks_per_node) == wanted:
                return its
        return None

    def share_of_products(self, hidden: float) -> float:
        """Share of the peak that the products of a model of this width reach (T6)."""
        return self.product_share * hidden / (hidden + self.product_half_width)

    def attention_rate(self, kernel: Attention, hidden: float) -> AttentionRate:
        """What a kernel of attention reaches (T10)."""
        for each in self.attention:
            if each.kernel == kernel:
                return each
        return AttentionRate(kernel=kernel, share=self.share_of_products(hidden), backward=2.0)

    def scaled(self, *, compute: float = 1.0, inside: float = 1.0, between: float = 1.0) -> Cluster:
        """The same cluster with faster or slower parts: a corner of what is not known."""
        return replace(
            self,
            product_share=self.product_share * compute,
            attention=tuple(replace(a, share=a.share * compute) for a in self.attention),
            memory_bytes_per_s=self.memory_bytes_per_s * compute,
            unit_s=self.unit_s / compute,
            unit_s_per_byte=self.unit_s_per_byte / compute,
            inside=replace(
                self.inside, bandwidth_bytes_per_s=self.inside.bandwidth_bytes_per_s * inside
            ),
            between=replace(
                self.between, bandwidth_bytes_per_s=self.between.bandwidth_bytes_per_s * between
            ),
            timings=tuple(
                timing.faster(inside if timing.num_nodes == 1 else between)
                for timing in self.timings
            ),
        )

    def constants(self) -> list[tuple[str, str, Origin, str]]:
        """Every constant: name, value with its unit, origin, source."""
        between, inside = self.between, self.inside
        mine = (self.origin, self.source)
        theirs = (between.origin, between.source)
        return [
            ("ranks of a node", str(self.ranks_per_node), *mine),
            ("peak of a GPU", f"{self.peak_flops_per_s / 1e12:.4g} TFLOP/s", *mine),
            ("share of it in products", f"{self.product_share:.3f}", *self._fitted),
            ("width that reaches half of it", f"{self.product_half_width:.0f}", *self._fitted),
            *(
                (f"share in {a.kernel}, counted in full", f"{a.share:.3f}", self.origin, a.source)
                for a in self.attention
            ),
            ("memory of a GPU", f"{self.memory_bytes / 1e9:.0f} GB", *mine),
            ("bandwidth of memory", f"{self.memory_bytes_per_s / 1e12:.3g} TB/s", *mine),
            ("bandwidth out of a node", _gb(between), *theirs),
            ("latency of a hop between nodes", _us(between.hop_latency_s), *theirs),
            ("bandwidth out of a rank, inside", _gb(inside), inside.origin, inside.source),
            ("latency of a hop inside", _us(inside.hop_latency_s), inside.origin, inside.source),
            ("loss of products beside messages", f"{self.overlap_slowdown:.2f}", *mine),
            *self._of_measurements(),
        ]

    @property
    def _fitted(self) -> tuple[Origin, str]:
        """Of what presets take from published runs (benchmarks.planner --fit)."""
        return self.origin, "S19, fitted" if self.origin == "preset" else self.source

    def _of_measurements(self) -> list[tuple[str, str, Origin, str]]:
        mine = (self.origin, self.source)
        if self.reserved_bytes is None:
            reserved: tuple[str, Origin, str] = ("2 GB", "preset", "assumed (plan/memory.py)")
        else:
            reserved = (f"{self.reserved_bytes / 1e9:.2f} GB", *mine)
        told = [("context and buffers of a rank", *reserved)]
        if self.unit_s or self.unit_s_per_byte:
            added = f"{self.unit_s * 1e6:.0f} us and {self.unit_s_per_byte * 1e12:.1f} us a MB"
            told.append(("FSDP2 beside messages, a unit", added, *self._fitted))
        told.append(("fragmentation", "3 %", "preset", "assumed (plan/memory.py)"))
        if self.timings:
            groups = {(t.num_nodes, t.ranks_per_node) for t in self.timings}
            shapes = ", ".join(f"{nodes} x {ranks}" for nodes, ranks in sorted(groups))
            told.append(("timings of collectives", f"groups of {shapes}", "measured", self.source))
        return told


def _gb(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.1f} GB/s"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def presets() -> dict[str, Any]:
    """The tables of presets/clusters.toml."""
    file = resources.files("mics_dtensor.plan.presets") / "clusters.toml"
    return tomllib.loads(file.read_text("utf-8"))


def preset_of_cluster(name: str) -> Cluster:
    """A preset by name. Raises PlanError, with the names there are."""
    read = presets()
    if name not in read["cluster"]:
        raise PlanError(
            f"no cluster {name!r} is known; choose from {', '.join(read['cluster'])}, or give a "
            "file that ends in .toml (docs/formats.md)"
        )
    entry = read["cluster"][name]
    return preset_cluster(
        name=name,
        gpu=entry["gpu"],
        ranks_per_node=entry["ranks_per_node"],
        nic_gbit_per_s=entry["nic_gbit_per_s"],
        between_curve=entry["between_curve"],
        fabric=entry["fabric"],
        source=entry["source"],
    )


def gpu_named(said: str) -> str | None:
    """The GPU of the presets behind a device's own name, as "NVIDIA H100 80GB HBM3"."""
    words = said.replace("-", " ").split()
    known = [name for name in presets()["gpu"] if set(name.split("-")) <= set(words)]
    return known[0] if known else None


def preset_cluster(
    *,
    name: str,
    gpu: str,
    ranks_per_node: int,
    nic_gbit_per_s: float,
    between_curve: str,
    fabric: str,
    source: str | None = None,
) -> Cluster:
    """Nodes of GPUs of the presets behind a NIC of that line rate. Raises PlanError.

    `between_curve`: share of the bandwidth by size of the message. `fabric`: share of the line rate
    and hop of its rings (C8); a curve's own hop is that of its EFA. `source`: of the line rate.
    """
    read = presets()
    if gpu not in read["gpu"]:
        raise PlanError(f"no GPU {gpu!r} is known; choose from {', '.join(read['gpu'])}")
    its, nccl = read["gpu"][gpu], read["nccl"]
    curve, ring = _curve(read["curve"][between_curve]), read["fabric"][fabric]
    rate = f"{nic_gbit_per_s:g} Gbit/s" + (f" ({source})" if source else "")
    return Cluster(
        name=name,
        gpu=gpu,
        ranks_per_node=ranks_per_node,
        peak_flops_per_s=its["peak_tflops"] * 1e12,
        product_share=its["product_share"],
        product_half_width=its["product_half_width"],
        attention=tuple(
            AttentionRate(kernel=kernel, **rate)
            for kernel, rate in read["attention"][its["attention"]].items()
        ),
        unit_s_per_byte=read["copies"]["passes"] / (its["memory_tb_per_s"] * 1e12),
        memory_bytes=int(its["memory_gb"] * 1e9),
        memory_bytes_per_s=its["memory_tb_per_s"] * 1e12,
        inside=Link(
            bandwidth_bytes_per_s=its["inside_gb_per_s"] * 1e9,
            **_curve(read["curve"][its["inside_curve"]]),
            origin="preset",
            source=f"{its['source']}; curve {its['inside_curve']}",
        ),
        between=Link(
            bandwidth_bytes_per_s=nic_gbit_per_s / 8 * 1e9 * ring["share"],
            **curve | {"hop_latency_s": ring["hop_s"]},
            origin="preset",
            source=f"{rate} x {ring['share']} ({ring['source']}); curve {between_curve}",
        ),
        base_latency_s=nccl["base_latency_s"],
        overlap_slowdown=nccl["sms"] / its["sms"],
        origin="preset",
        source=its["source"],
    )


def _curve(read: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a link that a table of nccl-tests gives."""
    return {
        "hop_latency_s": read["hop_s"],
        "shares": _shares(read),
        "curve_ranks": read["ranks"],
        "curve_nodes": read["nodes"],
    }


def _shares(curve: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Size in bytes and share of the largest bandwidth; a share never falls with the size."""
    largest, so_far = max(curve["busbw_gb_per_s"]), 0.0
    shares = []
    for mib, busbw in zip(curve["size_mib"], curve["busbw_gb_per_s"], strict=True):
        so_far = max(so_far, busbw / largest)
        shares.append((mib * 2.0**20, so_far))
    return tuple(shares)
