"""Train on an emulated cluster: bytes counted between nodes, and the time of a step, per system.

    python -m benchmarks.emulated_cluster --nodes 4 --ranks-per-node 2 --rate 400mbit
        --systems fsdp2,hsdp,mics --partition-nodes 1 --micro-steps 4 --json results.json

`--help` says the rest; docs/benchmarks.md what is measured and how.
"""

from __future__ import annotations

import argparse
import signal
import sys
from fractions import Fraction
from pathlib import Path

from benchmarks.arguments import count, duration, pause, rate_or_none, result_file
from benchmarks.cluster import ClusterError
from benchmarks.results import describe, table, write
from benchmarks.run import OF_PROGRAM, PEERS, SYSTEMS, Case, Run, run


def parse(arguments: list[str]) -> tuple[Run, Path | None]:
    """The run that the command line asks for; argparse ends the program where it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulated_cluster",
        description="Train on an emulated cluster and count what crosses its nodes.",
        epilog=f"systems: {', '.join((*SYSTEMS, *PEERS))}",
    )
    add = parser.add_argument
    add("--nodes", type=count, default=4)
    add("--ranks-per-node", type=count, default=2)
    add(
        "--rate",
        type=rate_or_none,
        default="400mbit",
        help="of each node's link, as tc writes it, or `unlimited`",
    )
    add("--systems", default="fsdp2,hsdp,mics", help="comma-separated")
    add(
        "--partition-nodes",
        default="1",
        help="nodes of a partition group, or several: 1,2,4; 1/2 is half a node",
    )
    add("--micro-steps", type=count, default=4)
    add("--json", type=result_file, help="where to write the results")
    add("--repetitions", type=count, default=5, help="of each system, on a quiet machine")
    add("--max-repetitions", type=count, help="at most, quiet or not (default: twice as many)")
    add("--steps", type=count, default=2, help="optimizer steps in a repetition")
    add("--peer-venv", type=Path, help="environment of DeepSpeed (peers/requirements.txt)")
    add("--no-stages", action="store_true", help="do not count stage by stage")
    add("--workload", choices=("linears", "llama"), default="linears")
    add("--seq-len", type=count, default=128, help="of the Llama debug model")
    add("--dim", type=count, default=1024, help="of each linear layer")
    add("--layers", type=count, default=4)
    add("--batch-size", type=count, default=4)
    add("--sleep-ms", type=pause, default=0.0, help="of a layer's forward, for its compute")
    add("--timeout", type=duration, default=300.0, help="seconds for one repetition")
    given = parser.parse_args(arguments)
    names = [name.strip() for name in given.systems.split(",")]
    if unknown := sorted(set(names) - {*SYSTEMS, *PEERS}):
        parser.error(f"no system is called {unknown[0]}; choose from {[*SYSTEMS, *PEERS]}")
    if given.workload == "llama" and (other := sorted({*names} - {*OF_PROGRAM})):
        parser.error(f"the program does not run {other[0]}; choose from {list(OF_PROGRAM)}")
    if given.peer_venv is None and (peers := [name for name in names if name in PEERS]):
        parser.error(f"{peers[0]} runs in an environment of its own: give --peer-venv")
    if given.peer_venv is not None and not (given.peer_venv / "bin/python").exists():
        parser.error(f"--peer-venv {given.peer_venv} holds no bin/python")
    try:
        nodes = [Fraction(part) for part in given.partition_nodes.split(",")]
    except (ValueError, ZeroDivisionError):
        parser.error(f"--partition-nodes {given.partition_nodes} is not a number of nodes")
    for part in nodes:
        size = part * given.ranks_per_node
        if size.denominator != 1 or size < 1 or given.nodes * given.ranks_per_node % size:
            parser.error(
                f"--partition-nodes {part} is {size} ranks, which do not divide the "
                f"{given.nodes} x {given.ranks_per_node} ranks"
            )
    wanted = Run(
        num_nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        rate=given.rate,
        cases=Case.all_of(names, [float(part) for part in nodes], num_nodes=given.nodes),
        repetitions=given.repetitions,
        max_repetitions=given.max_repetitions or 2 * given.repetitions,
        steps=given.steps,
        count_stages=not given.no_stages,
        timeout_s=given.timeout,
        peer_python=None if given.peer_venv is None else str(given.peer_venv / "bin/python"),
        workload={
            "kind": given.workload,
            "micro_steps": given.micro_steps,
            **_of_workload(given),
        },
    )
    return wanted, given.json


def _of_workload(given: argparse.Namespace) -> dict[str, float]:
    if given.workload == "llama":
        return {"seq_len": given.seq_len}
    return {
        "dim": given.dim,
        "num_layers": given.layers,
        "batch_size": given.batch_size,
        "sleep_ms": given.sleep_ms,
    }


def main() -> None:
    wanted, path = parse(sys.argv[1:])
    # SIGINT too: Python leaves it ignored where a shell started this in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        results = describe(wanted, run(wanted))
    except ClusterError as error:
        sys.exit(f"error: {error}")
    print(table(results))
    if path is not None:
        write(results, path)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
