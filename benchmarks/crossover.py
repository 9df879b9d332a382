"""Above which size a unit should keep its own message at the boundary, and below share one.

    python -m benchmarks.crossover --json benchmarks/results/crossover.json

For each size of a unit, the same step twice, in turns: a message for each unit, sent as it lies, or
one for all, put together by a copy. Everything but the boundary is the same in both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.arguments import count, rate, result_file
from benchmarks.results import describe, tell
from benchmarks.run import Case, Run, run

OWN, SHARED = "mics-own-messages", "mics-one-message"
NUM_UNITS = 16
DIMS = (32, 64, 128, 256, 512, 1024)
NUM_NODES, RANKS_PER_NODE = 4, 2


def measure(*, rate: str, repetitions: int) -> dict[str, Any]:
    """A launch for each size; one object for the file."""
    results, rows_of = in_turns(
        (OWN, SHARED),
        DIMS,
        num_units=NUM_UNITS,
        micro_steps=1,
        partition_nodes=[1.0],
        rate=rate,
        repetitions=repetitions,
        steps=4,
    )
    sizes = [
        {"shard_bytes": 4 * dim * dim // RANKS_PER_NODE, "rows": rows}
        for dim, rows in rows_of.items()
    ]
    return {**results, "sizes": sizes}


def in_turns(
    systems: Sequence[str],
    dims: Sequence[int],
    *,
    num_units: int,
    micro_steps: int,
    partition_nodes: Sequence[float],
    rate: str,
    repetitions: int,
    steps: int = 2,
) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """Both systems in each launch, one for each width: the head of the file, and rows by width."""
    rows_of = {}
    for dim in dims:
        wanted = Run(
            num_nodes=NUM_NODES,
            ranks_per_node=RANKS_PER_NODE,
            rate=rate,
            cases=Case.all_of(systems, partition_nodes, num_nodes=NUM_NODES),
            workload={
                "kind": "linears",
                "micro_steps": micro_steps,
                "dim": dim,
                "num_layers": num_units,
                "batch_size": 4,
                "sleep_ms": 0.0,
            },
            repetitions=repetitions,
            max_repetitions=2 * repetitions,
            steps=steps,
            count_stages=False,
        )
        results = describe(wanted, run(wanted))
        rows_of[dim] = results.pop("rows")
    del results["configuration"]["workload"]["dim"]  # it differs
    return results, rows_of


def seconds_told(
    rows: Sequence[dict[str, Any]], first: str, second: str
) -> tuple[list[str], float]:
    """Seconds of two systems as cells, and those of the first over those of the second."""
    by_name = {row["system"]: row for row in rows}
    its = [by_name[first], by_name[second]]
    cells = [
        f"{r['seconds_median']:.3f} ({r['seconds_min']:.3f}, {r['seconds_max']:.3f})" for r in its
    ]
    return cells, its[0]["seconds_median"] / its[1]["seconds_median"]


def section(results: dict[str, Any]) -> Iterator[str]:
    """Markdown for the page of results."""
    yield (
        f"A step of one micro-step, {NUM_UNITS} units of one size; seconds, median (least, most), "
        "with a message for each unit and with one for all:"
    )
    yield ""
    yield "| bytes of a unit's shard | own messages | one message | own over one |"
    yield "|---|---|---|---|"
    for size in results["sizes"]:
        cells, ratio = seconds_told(size["rows"], OWN, SHARED)
        yield f"| {size['shard_bytes']:,} | {' | '.join(cells)} | {ratio:.2f} |"


def main() -> None:
    """Parse and measure."""
    command("crossover", __doc__, measure, section)


def command(
    name: str,
    description: str | None,
    measure: Callable[..., dict[str, Any]],
    section: Callable[[dict[str, Any]], Iterator[str]],
) -> None:
    """Parse, and run `measure(rate=, repetitions=)`: also of benchmarks/blocks.py."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    add = parser.add_argument
    add("--rate", type=rate, default="400mbit", help="of each node's link, as tc writes it")
    add("--repetitions", type=count, default=5)
    add("--json", type=result_file, help="where to write the results")
    given = parser.parse_args()
    tell(lambda: measure(rate=given.rate, repetitions=given.repetitions), section, given.json)


if __name__ == "__main__":
    main()
