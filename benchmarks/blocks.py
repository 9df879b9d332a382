"""Up to which size of its blocks a unit's stages on gloo should be one call each (gloo.py).

    python -m benchmarks.blocks --json benchmarks/results/blocks.json

For each size of a unit, the same step twice, in turns: every stage one call, its blocks put in
order by a copy, or block by block, each stage working while the other waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.crossover import NUM_NODES, command, in_turns, seconds_told

AT_ONCE, BY_BLOCK = "mics-at-once", "mics-block-by-block"
NUM_UNITS, MICRO_STEPS = 4, 4
DIMS = (256, 512, 768, 1024)
PARTITION_NODES = (2, 4)


def measure(*, rate: str, repetitions: int) -> dict[str, Any]:
    """A launch for each size; one object for the file."""
    results, rows_of = in_turns(
        (AT_ONCE, BY_BLOCK),
        DIMS,
        num_units=NUM_UNITS,
        micro_steps=MICRO_STEPS,
        partition_nodes=[float(nodes) for nodes in PARTITION_NODES],
        rate=rate,
        repetitions=repetitions,
    )
    blocks = [
        {
            "block_bytes": 4 * dim * dim // nodes,
            "partition_nodes": nodes,
            "rows": [row for row in rows if row["partition_nodes"] == nodes],
        }
        for dim, rows in rows_of.items()
        for nodes in PARTITION_NODES
    ]
    return {**results, "blocks": blocks}


def section(results: dict[str, Any]) -> Iterator[str]:
    """Markdown for the page of results."""
    yield (
        f"A step of {MICRO_STEPS} micro-steps, {NUM_UNITS} units of one size in partition groups "
        f"of several of the {NUM_NODES} nodes; seconds, median (least, most), with one call a "
        "stage and block by block:"
    )
    yield ""
    yield "| nodes of a partition group | bytes of a block | one call | by block | one over by |"
    yield "|---|---|---|---|---|"
    for block in sorted(results["blocks"], key=lambda each: each["partition_nodes"]):
        cells, ratio = seconds_told(block["rows"], AT_ONCE, BY_BLOCK)
        head = f"| {block['partition_nodes']} | {block['block_bytes']:,}"
        yield f"{head} | {' | '.join(cells)} | {ratio:.2f} |"


def main() -> None:
    """Parse and measure."""
    command("blocks", __doc__, measure, section)


if __name__ == "__main__":
    main()
