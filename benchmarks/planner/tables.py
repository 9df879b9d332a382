"""nccl-tests' published tables: the hops of the presets, and what they foretell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.published import DATA, Case
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster import Cluster, presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.cost import between_s, extra_latency_s, stage_s
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.timing import (
    WAYS,
    Timing,
    fitted,
    hop_between_s,
    hop_inside_s,
    two_parameters,
)

SYSTEMS = {
    "8xA100": "inside_a100",
    "1xp5": "inside_h100",
    "8xB200": "inside_b200",
    "2xp4de": "between_p4de",
    "2xp5": "between_p5",
    "4xp6-b200": "between_p6_b200",
}
"""The tables of runs.toml and the curves of the presets; those inside a node first."""

INSIDE = {"2xp4de": "8xA100", "2xp5": "1xp5", "4xp6-b200": "8xB200"}
LARGE_BYTES = 8 << 20
"""Below, NCCL takes other protocols, whose hops are cheaper and whose bandwidth is less."""


def timing_of(read: dict[str, Any]) -> Timing:
    """A published table, in seconds again."""
    sizes = tuple(int(mib * 2**20) for mib in read["size_mib"])
    edge = WAYS[read["collective"]] * (read["ranks"] - 1) / read["ranks"]
    rates = zip(sizes, read["busbw_gb_per_s"], strict=True)
    return Timing(
        collective=read["collective"],
        num_nodes=read["nodes"],
        ranks_per_node=read["ranks"] // read["nodes"],
        sizes_bytes=sizes,
        seconds=tuple(edge * size / rate / 1e9 for size, rate in rates),
    )


def hops() -> dict[str, float]:
    """Seconds of a hop by curve, from the tables of one node and of several (C6)."""
    base_s = presets()["nccl"]["base_latency_s"]
    tables = {
        read["system"]: timing_of(read)
        for read in DATA["nccl_busbw"]
        if read["system"] in SYSTEMS and len(read["size_mib"]) > 1
    }
    found = {}
    for system, curve in SYSTEMS.items():
        fit = fitted(tables[system], from_bytes=LARGE_BYTES)
        if system in INSIDE:
            inside_s = found[SYSTEMS[INSIDE[system]]]
            hop_s = hop_between_s(tables[system], fit, inside_s=inside_s, base_s=base_s)
        else:
            hop_s = hop_inside_s(tables[system], fit, base_s=base_s)
        found[curve] = hop_s
    return found


FITTED_NODES = 16
"""Rows of more nodes are foretold, not fitted."""


def all_reduce(nodes: int, size: int) -> Stage:
    """nccl-tests' all-reduce of `size` bytes over whole nodes of 8, as a stage."""
    ranks = 8 * nodes
    moved = 2 * (ranks - 1) * size // ranks  # over each edge of the ring
    return Stage(
        unit="test",
        name="all-reduce",
        collective="all_reduce",
        group=GroupShape(nodes, 8, 1),
        calls=1,
        inter_node_bytes=moved * nodes,
        intra_node_bytes=moved * (ranks - nodes),
        every_micro_step=False,
    )


@dataclass(frozen=True)
class Rings:
    """Measured rings over 3 nodes and more: (nodes, bytes, seconds)."""

    cluster: str
    rows: tuple[tuple[int, int, float], ...]


def _rings(name: str, read: Mapping[str, Any], at_most: int) -> Rings:
    rows, size = [], read["size_mib"] * 2**20
    for nodes, busbw in zip(read["nodes"], read["busbw_gb_per_s"], strict=True):
        if 2 < nodes <= at_most:  # of two nodes NCCL builds a tree
            rows.append(
                (nodes, size, all_reduce(nodes, size).inter_node_bytes / nodes / busbw / 1e9)
            )
    return Rings(name, tuple(rows))


def rings() -> dict[str, Rings]:
    """By fabric of the presets, what its constants are fitted on."""
    (p4d,) = (read for read in DATA["busbw_at_size"] if read["system"] == "p4d")
    (p5,) = DATA["busbw_by_nodes"]
    return {
        "efa_p4d": _rings("p4d", p4d, FITTED_NODES),
        "efa_p5": _rings("p5", p5, FITTED_NODES),
    }


def fabrics() -> dict[str, tuple[float, float]]:
    """Share of the line rate and hop of a fabric (C8).

    Both by least squares of relative errors where the rows span four times the nodes; else the
    share alone, with the hop of the fabric's curve.
    """
    found = {}
    for fabric, its in rings().items():
        on, nic = cluster(its.cluster), presets()["cluster"][its.cluster]
        line = nic["nic_gbit_per_s"] / 8 * 1e9
        curve_hop_s = presets()["curve"][nic["between_curve"]]["hop_s"]
        whole = replace(on, between=replace(on.between, bandwidth_bytes_per_s=line))
        still, moving = (_with_hop(whole, hop_s) for hop_s in (0.0, 1.0))
        us, vs, targets = [], [], []
        for nodes, size, seconds in its.rows:
            stage = all_reduce(nodes, size)
            fixed_s = extra_latency_s(stage, still)
            us.append(between_s(stage, whole) / seconds)
            vs.append((extra_latency_s(stage, moving) - fixed_s) / seconds)
            targets.append(1 - fixed_s / seconds)
        if its.rows[-1][0] >= 4 * its.rows[0][0]:
            slower, hop_s = two_parameters(us, vs, targets)
        else:
            hop_s = curve_hop_s
            left = [t - hop_s * v for t, v in zip(targets, vs, strict=True)]
            slower = sum(u * t for u, t in zip(us, left, strict=True)) / sum(u * u for u in us)
        found[fabric] = (1 / slower, hop_s)
    return found


def _with_hop(its: Cluster, hop_s: float) -> Cluster:
    return replace(its, between=replace(its.between, hop_latency_s=hop_s))


def decay_cases() -> list[Case]:
    """Bus bandwidth of an all-reduce over more nodes than the fabric was fitted on, in GB/s."""
    (read,) = DATA["busbw_by_nodes"]
    its, size = cluster("p5"), read["size_mib"] * 2**20
    cases = []
    for nodes, published in zip(read["nodes"], read["busbw_gb_per_s"], strict=True):
        if nodes > FITTED_NODES:
            stage = all_reduce(nodes, size)
            busbw = stage.inter_node_bytes / nodes / stage_s(stage, its) / 1e9
            cases.append(Case(name=f"busbw on {nodes} nodes", published=published, predicted=busbw))
    return cases
