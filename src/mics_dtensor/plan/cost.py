"""Seconds of a stage of `traffic.py` on a cluster. Pure; equations in docs/cost_model.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster import Cluster, Link
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.timing import WAYS
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Added:
    """What the host does for a unit, and what the device copies for it."""

    host_s: float
    copies_s: float

    def to(self, products_s: float, cluster: Cluster) -> float:
        """Seconds of products with it: a host beside a GPU works ahead while that computes."""
        host_s = self.host_s if cluster.on_cpu else max(0.0, self.host_s - products_s)
        return products_s + host_s + self.copies_s


def stage_s(stage: Stage, cluster: Cluster) -> float:
    """Seconds of all calls of a stage in an optimizer step, one after the other (C1).

    All groups of the world call at once: a node's NIC carries the bytes of all its ranks. Where
    this very collective was measured in groups of this shape, its timing decides (C7). What is
    done while other messages of the unit travel takes no time of its own (C11).
    """
    if stage.collective == "send":
        return stage_s(as_all_to_all(stage), cluster)
    if stage.hidden_calls:
        alone = replace(stage, hidden_calls=0)
        return (1 - stage.hidden_calls / stage.calls) * stage_s(alone, cluster)
    launches = stage.calls / stage.blocks
    timing = cluster.timing_of(stage.collective, stage.group)
    if timing is not None and launches:
        return launches * timing.seconds_of(message_bytes(stage) / launches)
    wire_s = max(between_s(stage, cluster), inside_s(stage, cluster))
    return wire_s + launches * extra_latency_s(stage, cluster)


def as_all_to_all(stage: Stage) -> Stage:
    """Messages of a rank to each of its peers, a call each, as the one call that does it (C9)."""
    return replace(stage, collective="all_to_all", calls=stage.calls // (stage.group.size - 1))


def message_bytes(stage: Stage) -> float:
    """nccl-tests' size of all messages of a rank's group together (C7).

    The edges of a ring of r ranks carry `WAYS` x (r - 1) times the size.
    """
    group = stage.group
    moved = stage.inter_node_bytes + stage.intra_node_bytes
    return moved / (group.num_groups * (group.size - 1) * WAYS[stage.collective])


def between_s(stage: Stage, cluster: Cluster) -> float:
    """Seconds that the NIC of a node is busy: its bytes over the share of its bandwidth (C2)."""
    world = stage.group.size * stage.group.num_groups
    if world % cluster.ranks_per_node:
        raise PlanError(
            f"{world} ranks are not whole nodes of the {cluster.ranks_per_node} ranks that a node "
            f"of {cluster.name} has; give --ranks-per-node"
        )
    out_of_node = stage.inter_node_bytes * cluster.ranks_per_node / world
    return _wire_s(out_of_node, stage, cluster.between)


def inside_s(stage: Stage, cluster: Cluster) -> float:
    """Seconds that the link of a rank inside its node is busy (C3).

    The edges of a ring carry alike; those between nodes are not among them.
    """
    edges = stage.group.size if stage.group.num_nodes == 1 else None
    if edges is None:
        edges = stage.group.size - stage.group.num_nodes
    if not edges:
        return 0.0
    over_edge = stage.intra_node_bytes / (edges * stage.group.num_groups)
    return _wire_s(over_edge, stage, cluster.inside)


def _wire_s(total_bytes: float, stage: Stage, link: Link) -> float:
    if not total_bytes:
        return 0.0
    launches = max(1.0, stage.calls / stage.blocks)
    ways = WAYS[stage.collective]
    share = link.share(total_bytes / launches / ways)
    return total_bytes / (link.bandwidth_bytes_per_s * share)


def added_s(unit: Unit, cluster: Cluster, *, is_fsdp2: bool = True) -> tuple[Added, Added]:
    """What FSDP2 adds to the forward and the backward of one unit in a micro-step (C10).

    Another runtime has the copies alone.
    """
    gather = unit.gather_itemsize * (unit.shard_numel() + unit.shard_numel(frozen=True))
    reduce = unit.reduce_itemsize * unit.shard_numel()
    of_message_s = cluster.unit_s / (unit.gathers + 1) * is_fsdp2
    of_byte_s = cluster.unit_s_per_byte * unit.shard.size
    backward = (unit.gathers - 1) * gather + reduce
    return (
        Added(host_s=of_message_s, copies_s=of_byte_s * gather),
        Added(host_s=unit.gathers * of_message_s, copies_s=of_byte_s * backward),
    )


def ring_latency_s(*, ranks: int, nodes: int, ways: int, cluster: Cluster) -> float:
    """Latency of a ring that visits `ranks` node by node; an all-reduce goes 2 `ways` (C4)."""
    between = nodes - 1
    inside = ranks - 1 - between
    hops_s = inside * cluster.inside.hop_latency_s + between * cluster.between.hop_latency_s
    return cluster.base_latency_s + ways * hops_s


def extra_latency_s(stage: Stage, cluster: Cluster) -> float:
    """Latency of a launch beyond that of the group in which the link's curve was taken (C5)."""
    group = stage.group
    link = cluster.between if group.num_nodes > 1 else cluster.inside
    ways = WAYS[stage.collective]
    here = ring_latency_s(ranks=group.size, nodes=group.num_nodes, ways=ways, cluster=cluster)
    ranks, nodes = link.curve_ranks, link.curve_nodes
    curve = ring_latency_s(ranks=ranks, nodes=nodes, ways=ways, cluster=cluster)
    return max(0.0, here - curve)
