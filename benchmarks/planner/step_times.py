"""Step times of the emulated cluster against the planner with constants that were measured there.

    python -m benchmarks.planner.step_times --nodes 4 --ranks-per-node 2 --rate 400mbit

Measures the cluster with `mics measure`, trains on it with `benchmarks.emulated_cluster`, each case
with every partition, and compares. Wants a quiet machine, and root. `python -m benchmarks.planner`
reads the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, pause, rate, result_file
from benchmarks.cluster import Cluster, ClusterError
from benchmarks.launch import ROOT, World
from benchmarks.planner.counted import linears_traffic, linears_unit
from mics_dtensor.plan.cluster import Cluster as Constants
from mics_dtensor.plan.cluster_file import cluster as constants_of
from mics_dtensor.plan.cost import added_s, stage_s

FILE = Path(__file__).parent / "results" / "step_times.json"
MEASURE_S = 1800.0
NEAR = 1.03
SGD_PASSES = 6
"""fp32 numbers a parameter moves: the norm reads g, clipping g and writes it, SGD g, p and p."""


@dataclass(frozen=True)
class Case:
    """How often a step gathers and reduces, and the width of the layers that it does it with."""

    micro_steps: int
    dim: int

    @classmethod
    def of(cls, word: str) -> Case:
        """Of "4x1024". Raises ValueError."""
        micro_steps, _, dim = word.partition("x")
        return cls(int(micro_steps), int(dim))

    def __str__(self) -> str:
        return f"{self.micro_steps} micro-steps of layers of {self.dim}"


def measure(arguments: argparse.Namespace, out: Path) -> Constants:
    """`mics measure` on the ranks of an emulated cluster of its own. Raises ClusterError."""
    with Cluster(arguments.nodes, rate=arguments.rate) as cluster:
        world = World(
            "measure", cluster, arguments.ranks_per_node, port=29600, module="mics_dtensor.cli"
        )
        sizes = ["--min-size", "64K", "--max-size", arguments.max_size]
        rounds = ["--repetitions", str(arguments.repetitions)]
        world.start(["measure", "--out", str(out), *sizes, *rounds])
        world.wait(MEASURE_S)
    return constants_of(str(out))


def train(arguments: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The emulated cluster's results for MiCS over every partition. Raises CalledProcessError."""
    parts = ["1/2", *(str(n) for n in (1, 2, 4, 8) if arguments.nodes % n == 0)]
    command = [sys.executable, "-m", "benchmarks.emulated_cluster", "--no-stages"]
    command += ["--nodes", str(arguments.nodes), "--rate", arguments.rate]
    command += ["--ranks-per-node", str(arguments.ranks_per_node), "--systems", "mics"]
    command += ["--partition-nodes", ",".join(parts), "--sleep-ms", str(arguments.sleep_ms)]
    command += ["--micro-steps", str(case.micro_steps), "--dim", str(case.dim)]
    command += ["--repetitions", str(arguments.repetitions)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, timeout=MEASURE_S)
        read: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return read


def predicted_s(constants: Constants, results: dict[str, Any], row: dict[str, Any]) -> float:
    """Sleeps for the compute, and all else of the step one after the other, as it is on CPU."""
    run = results["configuration"]
    work = run["workload"]
    unit = linears_unit(run, row)
    per_layer_s = 3 * work["sleep_ms"] / 1e3 + products_s(constants, work)
    for added in added_s(unit, constants):
        per_layer_s += added.to(0.0, constants)
    sent_s = sum(stage_s(stage, constants) for stage in linears_traffic(run, row).stages)
    updated = unit.count * unit.shard_numel() * 4 * SGD_PASSES
    return (
        row["micro_steps"] * unit.count * per_layer_s
        + sent_s
        + updated / constants.memory_bytes_per_s
    )


def products_s(constants: Constants, work: dict[str, Any]) -> float:
    """Forward and backward of a layer: few rows, so its weight is read twice and written once."""
    numel = work["dim"] ** 2
    flops = 6 * work["batch_size"] * numel
    return flops / constants.peak_flops_per_s + 3 * 4 * numel / constants.memory_bytes_per_s


def compared(constants: Constants, results: dict[str, Any]) -> dict[str, Any]:
    """A case of the file: measured and predicted seconds of each partition, and which is chosen."""
    rows = [
        {
            "partition_nodes": row["partition_nodes"],
            "measured_s": row["seconds_median"],
            "predicted_s": predicted_s(constants, results, row),
            "num_quiet": row["num_quiet"],
        }
        for row in results["rows"]
    ]
    best = min(rows, key=lambda row: row["predicted_s"])
    least_s = min(row["measured_s"] for row in rows)
    run = results["configuration"]
    return {
        "micro_steps": results["rows"][0]["micro_steps"],
        "dim": run["workload"]["dim"],
        "configuration": run,
        "rows": rows,
        "best_over_least": best["measured_s"] / least_s,
    }


def told(results: dict[str, Any], cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The file: every case, and the two numbers that are checked."""
    errors = [
        abs(row["predicted_s"] / row["measured_s"] - 1) for case in cases for row in case["rows"]
    ]
    near = sum(case["best_over_least"] <= NEAR for case in cases)
    return {
        "schema": 2,
        **{key: results[key] for key in ("host", "commit", "date")},
        "cases": cases,
        "num_errors": len(errors),
        "mean_error": statistics.mean(errors),
        "share_chosen_well": near / len(cases),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.step_times")
    parser.add_argument("--nodes", type=count, default=4)
    parser.add_argument("--ranks-per-node", type=count, default=2)
    parser.add_argument("--rate", type=rate, default="400mbit")
    parser.add_argument("--cases", default="1x1024,2x1024,4x1024,8x1024,1x512,4x512,8x512")
    parser.add_argument("--sleep-ms", type=pause, default=20.0)
    parser.add_argument("--max-size", default="16M")
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("--cluster", type=Path, help="what `mics measure` has written; not anew")
    parser.add_argument("--out", type=result_file, default=FILE)
    arguments = parser.parse_args()
    written = arguments.cluster or arguments.out.with_suffix(".cluster.toml")
    try:
        wanted = [Case.of(word) for word in arguments.cases.split(",")]
        constants = constants_of(str(written)) if arguments.cluster else measure(arguments, written)
    except (ClusterError, ValueError) as error:
        sys.exit(f"error: {error}")
    cases = []
    for case in wanted:
        results = train(arguments, case)
        cases.append(compared(constants, results))
        arguments.out.write_text(json.dumps(told(results, cases), indent=2) + "\n", "utf-8")
        for row in cases[-1]["rows"]:
            print(
                f"{case}, partition of {row['partition_nodes']:g} nodes: {row['measured_s']:.3f} s "
                f"measured ({row['num_quiet']} quiet), {row['predicted_s']:.3f} s predicted"
            )
    last = told(results, cases)
    print(
        f"mean error of {last['num_errors']}: {last['mean_error']:.1%}; in "
        f"{last['share_chosen_well']:.0%} of {len(cases)} cases what is chosen takes at most "
        f"{NEAR} times the least that was measured"
    )


if __name__ == "__main__":
    main()
