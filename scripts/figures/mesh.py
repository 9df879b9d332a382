"""The mesh: who holds which shard, and who meets whom."""

from __future__ import annotations

from mics_dtensor.layout import Layout
from scripts.figures.drawing import FAST, PALE, REPLICAS, SHARDS, SLOW, Drawing

WIDTH, NODE, GROUP = 560, 128, 274


def draw(layout: Layout) -> Drawing:
    """Partition groups side by side, nodes inside them, the ranks of a node one above the other."""
    height = 432
    drawing = Drawing(
        WIDTH, height, "Partition groups, nodes, ranks, and the three kinds of groups"
    )
    for group in range(layout.num_replicas):
        left = 4 + group * (GROUP + 4)
        drawing.box((left, 66), (GROUP, 246), fill="none", dashed=True)
        what = "one whole copy" if group == 0 else "another copy"
        drawing.words(
            (left + GROUP / 2, 22), f"partition group {group}: {what}", anchor="middle", size=14
        )
    nodes = {layout.topology.node_of(rank): _node_at(layout, rank) for rank in _ranks(layout)}
    for node, (x, y) in nodes.items():
        drawing.box((x, y), (NODE, 214), fill=PALE)
        drawing.words((x + NODE / 2, y + 113), f"node {node}", anchor="middle", fill="#57606a")
    _lines(drawing, layout)
    for rank in _ranks(layout):
        x, y = _rank_at(layout, rank)
        shard = layout.partition_group(rank).index(rank)
        drawing.box((x, y), (80, 46), fill=SHARDS[shard])
        drawing.words((x + 40, y + 20), f"rank {rank}", anchor="middle")
        drawing.words((x + 40, y + 37), f"shard {shard}", anchor="middle")
    legend = (
        (SLOW, "gather, stage 1: between nodes, same place, all in parallel"),
        (FAST, "gather, stage 2: inside the node"),
        (REPLICAS, "second hop: replication groups, once per optimizer step"),
    )
    for row, (colour, said) in enumerate(legend):
        y = 366 + 24 * row
        drawing.line(f"M14 {y - 4} h36", stroke=colour, dashed=colour == REPLICAS)
        drawing.words((62, y), said, size=14)
    return drawing


def _lines(drawing: Drawing, layout: Layout) -> None:
    for rank in _ranks(layout):
        x, y = _rank_at(layout, rank)
        for peer in layout.node_group(rank):
            if peer > rank:
                to, _ = _rank_at(layout, peer)
                drawing.line(f"M{x + 82} {y + 23} H{to - 2}", stroke=SLOW, arrows=True)
        for peer in layout.local_group(rank):
            if peer > rank:
                _, to_y = _rank_at(layout, peer)
                side = x + 10
                drawing.line(f"M{side} {y + 48} V{to_y - 2}", stroke=FAST, arrows=True)
        for peer in layout.replication_group(rank):
            if peer > rank:
                to, _ = _rank_at(layout, peer)
                at = layout.coordinate(rank)
                up = at.local == 0
                edge = y - 2 if up else y + 48
                depth = 62 - 18 * at.node
                bend = edge - depth if up else edge + depth
                drawing.line(
                    f"M{x + 40} {edge} C {x + 80} {bend}, {to} {bend}, {to + 40} {edge}",
                    stroke=REPLICAS,
                    dashed=True,
                    arrows=True,
                )


def _ranks(layout: Layout) -> range:
    return range(layout.topology.world_size)


def _node_at(layout: Layout, rank: int) -> tuple[int, int]:
    at = layout.coordinate(rank)
    return 4 + at.replicate * (GROUP + 4) + 6 + at.node * (NODE + 6), 82


def _rank_at(layout: Layout, rank: int) -> tuple[int, int]:
    x, y = _node_at(layout, rank)
    return x + 24, y + 24 + 120 * layout.coordinate(rank).local
