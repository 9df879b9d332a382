"""results.json: what a run saw, one row a system; its format stands in docs/formats.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.arguments import bits_per_s
from benchmarks.cluster import ClusterError
from benchmarks.launch import ROOT
from benchmarks.run import FOREIGN_CORES, PEERS, Record, Run

SCHEMA = 1
_ALL_REDUCE_IN_BACKWARD = ("hsdp", "mics-no-2hop")
Row = dict[str, Any]


def describe(wanted: Run, records: Sequence[Record]) -> dict[str, Any]:
    """The object that is written."""
    versions = {"python": platform.python_version()}
    for record in records:
        versions = {**record.built["versions"], **versions}
    configuration = asdict(wanted)
    del configuration["cases"], configuration["peer_python"]
    return {
        "schema": SCHEMA,
        "host": f"{processor()}, {platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "configuration": configuration,
        "rows": [row(record, wanted) for record in records],
    }


def row(record: Record, wanted: Run) -> Row:
    """What was seen of one system. Bytes are means over the nodes, of one optimizer step."""
    repetitions, steps = record.repetitions, wanted.steps
    quiet = [r for r in repetitions if r.foreign_cores < FOREIGN_CORES]
    seconds = [r.at_s / steps for r in quiet or repetitions]
    inter = statistics.median(statistics.mean(r.inter_node) for r in repetitions) / steps
    payload = statistics.median(statistics.mean(r.inter_node_payload) for r in repetitions) / steps
    intra = statistics.median(statistics.mean(r.intra_node) for r in repetitions) / steps
    cpu_s = statistics.median(r.own_cpu_s for r in quiet or repetitions) / steps
    median_s = statistics.median(seconds)
    least_s = max(cpu_s / (os.cpu_count() or 1), _wire_s(inter, wanted.rate))
    bound = sum(record.built["bound_of_stages"].values()) / wanted.num_nodes
    return {
        "system": record.case.system,
        "partition_nodes": record.case.partition_nodes,
        "micro_steps": wanted.workload["micro_steps"],
        "seconds": [round(r.at_s / steps, 4) for r in repetitions],
        "foreign_cores": [round(r.foreign_cores, 3) for r in repetitions],
        "num_quiet": len(quiet),
        "seconds_median": round(median_s, 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "own_cpu_seconds": round(cpu_s, 3),
        "seconds_over_least": round(median_s / least_s, 3),
        "inter_node_bytes_per_step": round(inter),
        "inter_node_bytes_bound": round(bound),
        "inter_node_payload_per_step": round(payload),
        "intra_node_bytes_per_step": round(intra),
        "retransmitted_segments": sum(sum(r.retransmitted_segments) for r in repetitions),
        "stages": stages(record, wanted),
        "gradient_norms": record.norms[:3],
        "configuration": record.built["configuration"],
    }


def stages(record: Record, wanted: Run) -> dict[str, dict[str, int]]:
    """Bytes out of a node in one step by stage, beside the bound of each."""
    counted: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for label, between in record.stages:
        name = _stage(label, record.case.system, wanted.workload["kind"])
        counted[name] += sum(between.inter_node)
        payload[name] += sum(between.inter_node_payload)
    bounds = dict(record.built["bound_of_stages"])
    if record.case.system in PEERS:  # its backward gathers and reduces, and cannot be parted
        bounds["backward"] += bounds.pop("reduction")
    return {
        name: {
            "inter_node_bytes": round(counted[name] / wanted.num_nodes),
            "inter_node_payload": round(payload[name] / wanted.num_nodes),
            "bound": round(bounds.get(name, 0) / wanted.num_nodes),
        }
        for name in ("forward", "backward", "reduction", "boundary", "other")
        if record.stages
    }


def write(results: dict[str, Any], path: Path) -> None:
    """Write results.json."""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def tell(
    measure: Callable[[], dict[str, Any]],
    section: Callable[[dict[str, Any]], Iterable[str]],
    path: Path | None,
) -> None:
    """Measure, print the section, and write to `path`; or end the program with the error."""
    try:
        results = measure()
    except ClusterError as error:
        sys.exit(f"error: {error}")
    print("\n".join(section(results)))
    if path is not None:
        write(results, path)


def table(results: dict[str, Any]) -> str:
    """The rows for a terminal."""
    lines = [
        f"{'system':<24}{'nodes':>6}{'s/step':>9}{'min':>8}{'max':>8}{'quiet':>7}"
        f"{'MB out of a node':>18}{'/ bound':>9}{'MB inside':>11}"
    ]
    for one in results["rows"]:
        bound, sent = one["inter_node_bytes_bound"], one["inter_node_bytes_per_step"]
        quiet = f"{one['num_quiet']}/{len(one['seconds'])}"
        lines.append(
            f"{one['system']:<24}{one['partition_nodes']:>6g}{one['seconds_median']:>9.3f}"
            f"{one['seconds_min']:>8.3f}{one['seconds_max']:>8.3f}{quiet:>7}{sent / 1e6:>18.2f}"
            f"{f'{sent / bound:.4f}' if bound else '-':>9}"
            f"{one['intra_node_bytes_per_step'] / 1e6:>11.1f}"
        )
    if any(one["num_quiet"] == 0 for one in results["rows"]):
        lines.append("no quiet repetition of some systems: their times are those of a busy machine")
    return "\n".join(lines)


def _stage(label: str, system: str, workload: str) -> str:
    phase, _, rest = label.partition(" ")
    if label == "reduction" or phase == "boundary":
        return phase
    if phase == "optimizer" and system.startswith("mics-slices"):  # the other half of it
        return "boundary"
    if rest == "gather" or (system in PEERS and phase in ("forward", "backward")):
        return phase
    # In the backward, outside the collectives of FSDP2's units: the all-reduce of HSDP. And the
    # boundary is a part of the program's last micro-step.
    elsewhere = system in _ALL_REDUCE_IN_BACKWARD or workload == "llama"
    return "boundary" if phase == "backward" and elsewhere else "other"


def _wire_s(sent: float, rate: str | None) -> float:
    """Seconds for `sent` bytes at a rate as tc writes it; 0 without a limit."""
    return 0.0 if rate is None else 8 * sent / bits_per_s(rate)


def processor() -> str:
    """The name of the machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """The commit of this checkout, with "+" where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return (commit.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")
