"""The largest model that fits, for each partition size: `python -m benchmarks.largest_model`.

Models of Llama 3's proportions, of every width: one block for each 128 features, a feed-forward of
3.5 times the width, 8 heads of keys, 128,256 words. By the planner's closed form of the peak
(mics_dtensor.plan.memory, docs/cost_model.md), which a test holds against traced steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mics_dtensor.layout import Layout
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.memory import Holding, peak_memory
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import ModelShape, preset_of
from mics_dtensor.topology import Topology

RANKS, RANKS_PER_NODE, SEQ_LEN, NUM_MICRO_STEPS = 512, 8, 8192, 4
PARTITION_SIZES = (8, 16, 32, 64, 128)
CLUSTERS = {"40 GB": "p4d", "80 GB": "p4de"}
HEAD = 128


@dataclass(frozen=True)
class Kept:
    """How the optimizer is held: cut over the replicas or not, with masters or without."""

    over_replicas: bool = False
    has_masters: bool = False


COLUMNS = {
    "whole": Kept(),
    "over replicas": Kept(over_replicas=True),
    "and 16-bit shards": Kept(over_replicas=True, has_masters=True),
}


def shape_of_width(num_heads: int) -> ModelShape:
    """The model of `num_heads` heads of 128 features."""
    hidden = HEAD * num_heads
    return ModelShape(
        num_layers=num_heads,
        hidden=hidden,
        attention_width=hidden,
        key_value_width=8 * HEAD,
        ffn=7 * hidden // 2,
        vocab=128_256,
    )


def num_parameters(shape: ModelShape) -> int:
    """All of them."""
    return preset_of(shape, name="some width").num_parameters


def peak_bytes(shape: ModelShape, partition_size: int, kept: Kept) -> int:
    """Of a rank, under AdamW, full checkpointing and one sequence a micro-step."""
    topology = Topology.uniform(world_size=RANKS, ranks_per_node=RANKS_PER_NODE)
    layout = Layout(topology=topology, partition_size=partition_size)
    work = Work(
        shape=shape,
        seq_len=SEQ_LEN,
        micro_batch=1,
        checkpointing="full",
        num_states_shards=RANKS if kept.over_replicas else None,
    )
    holding = Holding(
        param_itemsize=2 if kept.has_masters else 4,
        has_masters=kept.has_masters,
        num_loss_chunks=8,
        num_micro_steps=NUM_MICRO_STEPS,
    )
    units = traffic_units(preset_of(shape, name="some width"), layout, Policy())
    return peak_memory(units, work, holding).total


def largest(partition_size: int, memory_bytes: int, kept: Kept) -> int:
    """Parameters of the largest model that fits; 0 if none does."""
    fits = 0
    for num_heads in range(8, 257):
        shape = shape_of_width(num_heads)
        if peak_bytes(shape, partition_size, kept) > memory_bytes:
            break
        fits = num_parameters(shape)
    return fits


def table() -> str:
    """Markdown, in billions of parameters."""
    over = [f"{size}, {name}" for size in CLUSTERS for name in COLUMNS]
    lines = [f"| partition size | {' | '.join(over)} |", "|---" * (1 + len(over)) + "|"]
    for partition_size in PARTITION_SIZES:
        cells = [
            f"{largest(partition_size, cluster(name).memory_bytes, kept) / 1e9:.1f}B"
            for name in CLUSTERS.values()
            for kept in COLUMNS.values()
        ]
        lines.append(f"| {partition_size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
