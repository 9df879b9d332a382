"""nccl-tests' published tables: the hops of the presets, and what they foretell."""

from __future__ import annotations

from typing import Any

from benchmarks.planner.published import DATA, Case
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster import presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.cost import stage_s
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.timing import WAYS, Timing, fitted, hop_between_s, hop_inside_s

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


def decay_cases() -> list[Case]:
    """Bus bandwidth of an all-reduce over 4 to 64 nodes, in GB/s: nothing is fitted to it."""
    (read,) = DATA["busbw_by_nodes"]
    its, size = cluster("p5"), read["size_mib"] * 2**20
    cases = []
    for nodes, published in zip(read["nodes"], read["busbw_gb_per_s"], strict=True):
        if nodes < 4:
            continue  # of two nodes NCCL builds a tree that the table's largest value is of
        ranks = 8 * nodes
        moved = 2 * (ranks - 1) * size // ranks  # over each edge of the ring
        stage = Stage(
            unit="test",
            name="all-reduce",
            collective="all_reduce",
            group=GroupShape(nodes, 8, 1),
            calls=1,
            inter_node_bytes=moved * nodes,
            intra_node_bytes=moved * (ranks - nodes),
            every_micro_step=False,
        )
        busbw = moved / stage_s(stage, its) / 1e9
        cases.append(Case(name=f"busbw on {nodes} nodes", published=published, predicted=busbw))
    return cases
