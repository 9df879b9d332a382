"""Bytes of a real run, as `mics explain` counts them: by micro-step, and by partition size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from mics_dtensor.cli.explain import plan_of
from mics_dtensor.layout import partition_sizes
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.plan.traffic import Traffic, step_traffic
from mics_dtensor.topology import Topology
from mics_dtensor.train.degrees import num_micro_steps, resolve
from mics_dtensor.train.load import load
from scripts.figures.drawing import FAST, LINE, REPLICAS, SLOW, Drawing, amount

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"
WORLD_SIZE, RANKS_PER_NODE, GLOBAL_BATCH_SIZE = 128, 8, 1024
WHOSE = "Llama 3 8B, 16 nodes of 8 GPUs, 8 micro-steps"


@cache
def sent(partition_size: int | str = "node") -> Comparison:
    """What the run of the README's table sends, at another partition size."""
    run = load(
        [
            "--config-file",
            str(FILE),
            "--training.global_batch_size",
            str(GLOBAL_BATCH_SIZE),
            "--mics.partition_size",
            str(partition_size),
        ]
    )
    run, layout = resolve(run, world_size=WORLD_SIZE, local_world_size=RANKS_PER_NODE)
    return plan_of(run.config, layout, num_micro_steps(run), backend="nccl").sent


def by_micro_step(traffic: Traffic) -> list[int]:
    """Bytes out of all nodes in each micro-step, and then at the boundary."""
    each = traffic.inter_node_bytes_per_micro_step
    rest = traffic.inter_node_bytes - each * traffic.num_micro_steps
    return [each] * traffic.num_micro_steps + [rest]


def draw_step() -> Drawing:
    """Three systems, one below the other; a column a micro-step, and one for the boundary."""
    its = sent()
    systems = {
        "ZeRO-3 / FSDP over all ranks": (its.plain_fsdp, SLOW),
        "HSDP, a copy in each node": (its.plain_hsdp, REPLICAS),
        "MiCS, a copy in each node": (its.traffic, REPLICAS),
    }
    drawing = Drawing(560, 432, "Bytes out of all nodes, micro-step by micro-step")
    drawing.words((8, 22), f"Out of all nodes: {WHOSE}", size=14)
    highest = max(max(by_micro_step(traffic)) for traffic, _ in systems.values())
    for row, (name, (traffic, colour)) in enumerate(systems.items()):
        base = 150 + 124 * row
        columns = by_micro_step(traffic)
        drawing.words((8, base - 92), name, size=14)
        total = amount(traffic.inter_node_bytes)
        drawing.words((552, base - 92), f"{total} a step", anchor="end", size=14)
        drawing.line(f"M8 {base} H552", stroke=LINE)
        for column, num_bytes in enumerate(columns):
            x, height = 8 + 61 * column, 64 * num_bytes / highest
            drawing.bar((x, base - height), (54, height), fill=colour)
            said = amount(num_bytes)
            drawing.words((x + 27, base - height - 5), said, anchor="middle", size=12)
    for column in range(its.options.num_micro_steps + 1):
        last = column == its.options.num_micro_steps
        label = "boundary" if last else str(column + 1)
        drawing.words((35 + 61 * column, 418), label, anchor="middle")
    return drawing


def draw_partition_sizes() -> Drawing:
    """Bytes on each link by partition size, with the two stages and without."""
    topology = Topology.uniform(world_size=WORLD_SIZE, ranks_per_node=RANKS_PER_NODE)
    sizes = partition_sizes(topology)
    drawing = Drawing(560, 126 + 74 * len(sizes), "Bytes on each link by partition size")
    drawing.words((8, 22), f"A step: {WHOSE}", size=14)
    rows = {size: bytes_on_links(size) for size in sizes}
    longest = max(max(numbers) for numbers in rows.values())
    for row, (size, (staged, flat, inside)) in enumerate(rows.items()):
        top = 40 + 74 * row
        drawing.words((8, top + 12), f"{size} shard{'s'[: size != 1]}", size=14)
        copies = WORLD_SIZE // size
        drawing.words((8, top + 30), f"{copies} cop{'ies' if copies > 1 else 'y'}", fill="#57606a")
        bars = ((staged, SLOW), (flat, LINE), (inside, FAST))
        for place, (num_bytes, colour) in enumerate(bars):
            y, length = top + 20 * place, 330 * num_bytes / longest
            drawing.bar((96, y), (max(length, 1), 16), fill=colour)
            drawing.words((102 + length, y + 13), amount(num_bytes))
    legend = (
        (SLOW, "out of all nodes"),
        (LINE, "the same in one flat ring instead of two stages"),
        (FAST, "between ranks of one node, over the fast link"),
    )
    for row, (colour, said) in enumerate(legend):
        y = 40 + 74 * len(sizes) + 26 * row
        drawing.bar((8, y), (24, 14), fill=colour)
        drawing.words((42, y + 12), said, size=14)
    return drawing


def bytes_on_links(partition_size: int) -> tuple[int, int, int]:
    """Between nodes in two stages, between nodes in one flat ring, and inside nodes."""
    its = sent(partition_size)
    flat = step_traffic(its.units, replace(its.options, hierarchical=False))
    return its.inter_node_bytes, flat.inter_node_bytes, its.intra_node_bytes
