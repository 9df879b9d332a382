"""The two stages of a gather: which shards every rank holds before, between and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mics_dtensor.layout import Layout
from mics_dtensor.plan.traffic import Options, Unit, step_traffic
from scripts.figures.drawing import FAST, PALE, SHARDS, SLOW, Drawing

WIDTH, NODE, RANK, CELL = 560, 268, 112, 24

Held = dict[int, frozenset[int]]


def draw(layout: Layout) -> Drawing:
    """Three states of the first partition group, one below the other."""
    members = layout.partition_group(0)
    drawing = Drawing(WIDTH, 486, "A gather in two stages: between nodes, then inside each node")
    before, staged, after = states(layout)
    rows: tuple[tuple[str, Held, str, Callable[[int], tuple[int, ...]] | None], ...] = (
        ("Each rank holds its own shard.", before, SLOW, layout.node_group),
        ("Stage 1, between nodes: one shard of every node.", staged, FAST, layout.local_group),
        ("Stage 2, inside the node: all shards, each at its place.", after, "", None),
    )
    for row, (said, held, colour, next_groups) in enumerate(rows):
        top = 10 + 148 * row
        drawing.words((8, top + 14), said, size=14)
        for node in range(layout.nodes_per_partition_group):
            drawing.box((8 + node * (NODE + 8), top + 24), (NODE, 84), fill=PALE)
            drawing.words((16 + node * (NODE + 8), top + 40), f"node {node}", fill="#57606a")
        for rank in members:
            _rank(drawing, layout, rank, held[rank], top + 46)
        if next_groups is not None:
            for group in dict.fromkeys(next_groups(rank) for rank in members):
                _message(drawing, layout, group, (top + 104, colour))
    flat, hierarchical = shards_out_of_a_node(layout)
    drawing.words(
        (8, 452), f"Out of each node go {hierarchical} shards; one flat ring sends {flat}.", size=14
    )
    drawing.words((8, 474), "Gradients take the way back: inside the node first.", size=14)
    return drawing


def states(layout: Layout) -> Iterator[Held]:
    """The shards that each rank holds: at first, after the first stage, after the second."""
    members = layout.partition_group(0)
    held: Held = {rank: frozenset({shard}) for shard, rank in enumerate(members)}
    yield held
    for group_of in (layout.node_group, layout.local_group):
        held = {rank: frozenset().union(*(held[r] for r in group_of(rank))) for rank in members}
        yield held


def shards_out_of_a_node(layout: Layout) -> tuple[int, int]:
    """Of one partition group in one gather: in one flat ring, and in two stages."""
    unit = Unit(
        name="unit",
        shapes=((layout.partition_size,),),  # a shard of one element of one byte
        shard=layout.shard_shape,
        replicate=layout.replicate_shape,
        gathers=1,
        gather_itemsize=1,
    )
    nodes = layout.num_replicas * layout.nodes_per_partition_group
    found = []
    for hierarchical in (False, True):
        stages = step_traffic([unit], Options(hierarchical=hierarchical)).stages
        gathers = [s for s in stages if s.name.startswith("gather")]
        found.append(sum(s.inter_node_bytes for s in gathers) // nodes)
    return found[0], found[1]


def _left(layout: Layout, rank: int) -> int:
    at = layout.coordinate(rank)
    return 16 + at.node * (NODE + 8) + at.local * (RANK + 28)


def _rank(drawing: Drawing, layout: Layout, rank: int, held: frozenset[int], top: int) -> None:
    left = _left(layout, rank)
    drawing.words((left + RANK / 2, top + 12), f"rank {rank}", anchor="middle")
    for shard in range(layout.partition_size):
        at = (left + 4 + shard * (CELL + 2), top + 20)
        drawing.box(at, (CELL, 30), fill=SHARDS[shard] if shard in held else "#ffffff")
        if shard in held:
            drawing.words((at[0] + CELL / 2, at[1] + 20), str(shard), anchor="middle")


def _message(
    drawing: Drawing, layout: Layout, group: tuple[int, ...], drawn: tuple[int, str]
) -> None:
    """An arrow below the ranks of a group that now exchange what they hold."""
    y, colour = drawn
    first, last = (_left(layout, rank) + RANK / 2 for rank in (group[0], group[-1]))
    depth = 16 + 14 * layout.coordinate(group[0]).local
    drawing.line(
        f"M{first:g} {y} v{depth} H{last:g} v{-depth}",
        stroke=colour,
        arrows=True,
    )
