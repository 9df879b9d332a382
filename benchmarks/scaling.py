"""Weak scaling on emulated clusters of more and more nodes: what a rank keeps of its throughput.

    python -m benchmarks.scaling --json benchmarks/results/scaling.json
    python -m benchmarks.scaling --plot benchmarks/results/scaling.json

The batch of a rank is fixed. All ranks share the cores of one machine, where real compute cannot
scale: a sleep stands in for an accelerator's, of a given share of a step on one node. All systems
run at the first share, MiCS alone at the others, to keep the whole short. The
second command draws FILE.png and FILE.svg beside FILE.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, rate, result_file
from benchmarks.results import describe, tell
from benchmarks.run import Case, Run, run

SYSTEMS = ("fsdp2", "mics", "mics-overlap", "mics-overlap-no-reshard")
DIM, NUM_LAYERS, BATCH_SIZE, MICRO_STEPS = 1024, 4, 4, 8


@dataclass(frozen=True)
class Point:
    """A cluster of `num_nodes`; each layer sleeps, 1 in the forward and 2 in the backward."""

    num_nodes: int
    sleep_ms: float

    @property
    def sleep_s(self) -> float:
        """Of a rank in one optimizer step."""
        return 3 * self.sleep_ms / 1e3 * NUM_LAYERS * MICRO_STEPS

    def measure(self, systems: tuple[str, ...], *, rate: str, repetitions: int) -> dict[str, Any]:
        """A launch with those systems, partition groups of one node; as results.json has it."""
        wanted = Run(
            num_nodes=self.num_nodes,
            ranks_per_node=2,
            rate=rate,
            cases=Case.all_of(systems, [1.0], num_nodes=self.num_nodes),
            workload={
                "kind": "linears",
                "micro_steps": MICRO_STEPS,
                "dim": DIM,
                "num_layers": NUM_LAYERS,
                "batch_size": BATCH_SIZE,
                "sleep_ms": self.sleep_ms,
            },
            repetitions=repetitions,
            max_repetitions=2 * repetitions,
            steps=1,
            count_stages=False,
        )
        return describe(wanted, run(wanted))


def calibrated(share: float, *, rate: str) -> float:
    """`sleep_ms` with which sleep is `share` of a step of MiCS on one node.

    What is not sleep shrinks when there is sleep to hide it: so it is asked twice.
    """
    sleep_ms = 0.0
    for _ in range(3):
        point = Point(1, sleep_ms)
        [row] = point.measure(("mics",), rate=rate, repetitions=3)["rows"]
        rest_s = row["seconds_median"] - point.sleep_s
        sleep_ms = rest_s * share / (1 - share) * 1e3 / (3 * NUM_LAYERS * MICRO_STEPS)
    return sleep_ms


def measure(
    shares: list[float], nodes: list[int], *, rate: str, repetitions: int
) -> dict[str, Any]:
    """Every share on every number of nodes; one object for the file."""
    launches = []
    for share in shares:
        sleep_ms = calibrated(share, rate=rate)
        for num_nodes in nodes:
            point = Point(num_nodes, sleep_ms)
            systems = SYSTEMS if share == shares[0] else ("mics",)
            results = point.measure(systems, rate=rate, repetitions=repetitions)
            launches.append(
                {
                    "share": share,
                    "num_nodes": num_nodes,
                    "sleep_seconds": round(point.sleep_s, 4),
                    "rows": results.pop("rows"),
                }
            )
    results["configuration"]["num_nodes"] = nodes
    del results["configuration"]["workload"]["sleep_ms"]  # it differs
    return {**results, "launches": launches}


def seconds(results: dict[str, Any], share: float, system: str) -> dict[int, float]:
    """Median seconds of a step by number of nodes."""
    return {
        launch["num_nodes"]: row["seconds_median"]
        for launch in results["launches"]
        for row in launch["rows"]
        if launch["share"] == share and row["system"] == system
    }


def shares_of(results: dict[str, Any]) -> list[float]:
    """Those that were asked for."""
    return sorted({launch["share"] for launch in results["launches"]})


def section(results: dict[str, Any]) -> Iterator[str]:
    """Markdown for the page of results: throughput per rank over that of MiCS on one node."""
    nodes = sorted({launch["num_nodes"] for launch in results["launches"]})
    for number, share in enumerate(shares_of(results)):
        if number:
            yield ""
        one_node_s = seconds(results, share, "mics")[nodes[0]]
        sleep_s = next(x["sleep_seconds"] for x in results["launches"] if x["share"] == share)
        yield (
            f"Sleep {sleep_s:.2f} s a step, {sleep_s / one_node_s:.1%} of a step of MiCS on one "
            "node. Seconds a step, and throughput per rank over that of MiCS on one node:"
        )
        yield ""
        yield f"| system | {' | '.join(f'{n} nodes' for n in nodes)} |"
        yield f"|---|{'---|' * len(nodes)}"
        for system in SYSTEMS:
            if not (its := seconds(results, share, system)):
                continue
            cells = [f"{its[n]:.2f} s, {one_node_s / its[n]:.1%}" for n in nodes]
            yield f"| {system} | {' | '.join(cells)} |"
        if not (fsdp2 := seconds(results, share, "fsdp2")):
            continue
        fsdp2_s = fsdp2[nodes[-1]]
        ratios = [
            f"{system} {fsdp2_s / its[nodes[-1]]:.2f}"
            for system in SYSTEMS[1:]
            if (its := seconds(results, share, system))
        ]
        yield ""
        yield f"Over FSDP2's throughput on {nodes[-1]} nodes: {', '.join(ratios)}."


def plot(path: Path) -> None:
    """Write PNG and SVG beside `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot as plt

    results = json.loads(path.read_text(encoding="utf-8"))
    shares = shares_of(results)
    figure, panels = plt.subplots(1, len(shares), figsize=(9, 3.8), sharey=True, squeeze=False)
    styles = {
        "fsdp2": ("#8a8f98", "s"),
        "mics": ("#1f6fb2", "o"),
        "mics-overlap": ("#c2542d", "^"),
        "mics-overlap-no-reshard": ("#2f8f5b", "v"),
    }
    for share, panel in zip(shares, panels[0], strict=True):
        one_node_s = seconds(results, share, "mics")[1]
        for system, (colour, marker) in styles.items():
            if not (its := seconds(results, share, system)):
                continue
            kept = [100 * one_node_s / s for s in its.values()]
            panel.plot(list(its), kept, color=colour, marker=marker, label=system)
        panel.set(xlabel="nodes of 2 ranks", title=f"sleep {share:.0%} of a one-node step")
        panel.set_xticks(sorted({x["num_nodes"] for x in results["launches"]}))
        panel.set_ylim(0, 105)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("throughput per rank,\n% of MiCS on one node")
    panels[0][0].legend(frameon=False)
    rate = results["configuration"]["rate"]
    figure.text(
        0.5,
        0.01,
        f"Emulated cluster, {rate} a node, {MICRO_STEPS} micro-steps; a sleep stands in for an "
        f"accelerator's compute.\n{results['date'][:10]}, commit {results['commit'][:12]}, "
        f"{results['host']}, {results['cores']} cores.",
        ha="center",
        fontsize=7.5,
        color="#57606a",
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    """Parse, and measure or draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=_numbers, default="1,2,4,6", help="of each cluster; 1 is compared with")
    add("--shares", type=_shares, default="0.8,0.95", help="of sleep in a step on one node")
    add("--rate", type=rate, default="400mbit", help="of each node's link, as tc writes it")
    add("--repetitions", type=count, default=5)
    add("--json", type=result_file, help="where to write the results")
    add("--plot", type=Path, help="draw a file that --json has written, and measure nothing")
    given = parser.parse_args()
    if given.plot is not None:
        plot(given.plot)
        return
    tell(
        lambda: measure(given.shares, given.nodes, rate=given.rate, repetitions=given.repetitions),
        section,
        given.json,
    )


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(found) != text.count(",") + 1 or found[0] != 1 or sorted(set(found)) != found:
        raise argparse.ArgumentTypeError(f"{text}: give numbers of nodes that rise from 1, 1,2,4,6")
    return found


def _shares(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < share < 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text}: give shares between 0 and 1, as 0.8,0.95")
    return found


if __name__ == "__main__":
    main()
