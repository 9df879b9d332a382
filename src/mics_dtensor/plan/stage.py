"""One stage of a step: what is called, and the bytes on each link. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mics_dtensor.layout import GroupShape

Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "send", "all_reduce"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage of one unit kind does in an optimizer step.

    `calls` are those of one rank, in groups of the shape `group`; with NCCL the calls of a stage
    inside the node are one launch of `blocks` calls, a block of each node. `hidden_calls` of them
    are made while messages of the unit travel between nodes (gloo.py).
    """

    unit: str
    name: str
    collective: Collective
    group: GroupShape
    calls: int
    inter_node_bytes: int
    intra_node_bytes: int
    every_micro_step: bool
    blocks: int = 1
    hidden_calls: int = 0


def split(shard: GroupShape) -> tuple[GroupShape, GroupShape]:
    """The groups across nodes and within the node of a partition group that spans nodes."""
    across = GroupShape(shard.num_nodes, 1, shard.num_groups * shard.ranks_per_node)
    within = GroupShape(1, shard.ranks_per_node, shard.num_groups * shard.num_nodes)
    return across, within


def edges(group: GroupShape) -> tuple[int, int]:
    """Edges of a ring that visits a group node by node: (between nodes, inside nodes)."""
    between = group.num_nodes if group.num_nodes > 1 else 0
    return between, (group.size if group.size > 1 else 0) - between
