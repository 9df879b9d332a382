"""Step times of the emulated cluster against the planner with constants that were measured there.

    python -m benchmarks.planner.step_times --nodes 4 --ranks-per-node 2 --rate 400mbit

Measures the cluster with `mics measure`, trains on it with `benchmarks.emulated_cluster`, and
compares. Wants a quiet machine, and root. `python -m benchmarks.planner` reads the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, ClusterError
from benchmarks.launch import ROOT, World
from benchmarks.planner.counted import linears_traffic
from mics_dtensor.plan.cluster import Cluster as Constants
from mics_dtensor.plan.cluster_file import cluster as constants_of
from mics_dtensor.plan.cost import stage_s

FILE = Path(__file__).parent / "results" / "step_times.json"
MEASURE_S = 1800.0


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


def train(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The emulated cluster's results for FSDP2 and MiCS over every partition."""
    parts = ["1/2", *(str(n) for n in (1, 2, 4, 8) if arguments.nodes % n == 0)]
    command = [sys.executable, "-m", "benchmarks.emulated_cluster", "--no-stages"]
    command += ["--nodes", str(arguments.nodes), "--rate", arguments.rate]
    command += ["--ranks-per-node", str(arguments.ranks_per_node), "--systems", "mics"]
    command += ["--partition-nodes", ",".join(parts), "--sleep-ms", str(arguments.sleep_ms)]
    command += ["--micro-steps", str(arguments.micro_steps), "--json", str(out)]
    command += ["--repetitions", str(arguments.repetitions)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=MEASURE_S)
    read: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return read


def predicted_s(constants: Constants, results: dict[str, Any], row: dict[str, Any]) -> float:
    """Sleeps for the compute, and every message of the step: on CPU nothing overlaps."""
    run = results["configuration"]
    traffic = linears_traffic(run, row)
    work = run["workload"]
    layers_s = work["num_layers"] * 3 * work["sleep_ms"] / 1e3
    sent_s = sum(stage_s(stage, constants) for stage in traffic.stages)
    return row["micro_steps"] * layers_s + sent_s


def compared(constants: Constants, results: dict[str, Any]) -> dict[str, Any]:
    """The file: measured and predicted seconds of each partition, the errors and the best."""
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
    return {
        "schema": 1,
        "host": results["host"],
        "commit": results["commit"],
        "date": results["date"],
        "configuration": results["configuration"],
        "rows": rows,
        "mean_error": statistics.mean(
            abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows
        ),
        "best_over_least": best["measured_s"] / least_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.step_times")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    parser.add_argument("--max-size", default="16M")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    try:
        constants = measure(arguments, arguments.out.with_suffix(".cluster.toml"))
    except ClusterError as error:
        sys.exit(f"error: {error}")
    results = train(arguments, arguments.out.with_suffix(".results.json"))
    told = compared(constants, results)
    arguments.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    for row in told["rows"]:
        print(
            f"partition of {row['partition_nodes']:g} nodes: {row['measured_s']:.3f} s measured "
            f"({row['num_quiet']} quiet), {row['predicted_s']:.3f} s predicted"
        )
    print(
        f"mean error {told['mean_error']:.1%}; what is chosen takes {told['best_over_least']:.3f}"
        " of the least measured"
    )


if __name__ == "__main__":
    main()
