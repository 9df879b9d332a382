"""nccl-tests' own JSON (`all_gather_perf --json FILE`) as a cluster. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.calibrate import links, merged
from mics_dtensor.plan.cluster import Cluster, Link, gpu_named, preset_cluster, presets
from mics_dtensor.plan.stage import Collective
from mics_dtensor.plan.timing import Timing

PROGRAMS: Mapping[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
SMALLEST_BYTES = 1 << 16
"""Sizes below are left out: no message of a step is as small, and zeros are among them."""


def cluster_of_reports(paths: Sequence[Path]) -> Cluster:
    """The cluster that nccl-tests ran on: GPUs by their names, links as measured.

    Raises PlanError for a file that is none of nccl-tests', for reports of several clusters, and
    for a GPU that no preset knows.
    """
    read = [(path, _report(path)) for path in paths]
    gpus = {path: _device(report, path) for path, report in read}
    nodes = {path: _ranks_of_hosts(report, path) for path, report in read}
    first = paths[0]
    for path in paths:
        if (gpus[path], max(nodes[path])) != (gpus[first], max(nodes[first])):
            raise PlanError(
                f"{path} was measured on {max(nodes[path])} {gpus[path]} a node, {first} on "
                f"{max(nodes[first])} {gpus[first]}: reports of two clusters; give those of one"
            )
    timings = merged(_timing(report, nodes[path], path) for path, report in read)
    ranks_per_node = max(nodes[first])
    within, across = links(timings, ranks_per_node)
    source = ", ".join(str(path) for path in paths)
    preset = preset_cluster(
        name=source,
        gpu=gpus[first],
        ranks_per_node=ranks_per_node,
        nic_gbit_per_s=1.0,  # both links are replaced by what was measured
        between_curve="between_p5",
        fabric="other",
    )
    linked = {
        name: Link(
            bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s,
            hop_latency_s=fit.hop_latency_s,
            shares=((1.0, 1.0),),
            curve_ranks=1,
            curve_nodes=1,
            origin="measured",
            source=source,
        )
        for name, fit in (("inside", within), ("between", across))
    }
    most = max(len(each) for each in nodes.values())
    return replace(
        preset,
        inside=linked["inside"],
        between=linked["between"],
        timings=timings,
        measured_nodes=most,
    )


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise PlanError(
            f"there is no file {path}; give what nccl-tests wrote with --json"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(report, dict) or not {"args", "config", "results"} <= report.keys():
        raise PlanError(
            f"{path} is no report of nccl-tests: args, config and results are missing; write one "
            "with `all_gather_perf --json FILE`"
        )
    return report


def _devices(report: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    devices = report["config"].get("devices") or []
    if not devices:
        raise PlanError(f"{path} names no devices: nccl-tests lists them since version 2.14")
    return list(devices)


def _device(report: Mapping[str, Any], path: Path) -> str:
    said = _devices(report, path)[0].get("device_info", "")
    if name := gpu_named(said):
        return name
    raise PlanError(
        f"{path}: no constants of {said!r} are known; there are those of "
        f"{', '.join(presets()['gpu'])}: "
        "write a cluster.toml instead (docs/formats.md)"
    )


def _ranks_of_hosts(report: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    threads, gpus = report["config"].get("nthreads", 1), report["config"].get("ngpus", 1)
    each = threads * gpus  # a process is one entry of "devices", whatever it drives
    hosts = Counter(device["hostname"] for device in _devices(report, path))
    ranks = tuple(count * each for count in hosts.values())
    if len(set(ranks)) != 1:
        raise PlanError(f"{path}: hosts with {ranks} GPUs; a cluster's nodes are alike")
    return ranks


def _timing(report: Mapping[str, Any], ranks: Sequence[int], path: Path) -> Timing:
    program = Path(report["args"][0]).name
    kind = next((k for k in PROGRAMS if program.startswith(k)), None)
    if kind is None:
        raise PlanError(
            f"{path} is a report of {program}; those of {', '.join(PROGRAMS)}_perf are of use"
        )
    rows = {}
    for row in report["results"]:
        body = row.get("out_of_place") or row.get("in_place") or {}
        if row["size"] >= SMALLEST_BYTES and body.get("time"):
            rows[int(row["size"])] = float(body["time"]) / 1e6
    if not rows or sum(ranks) < 2:
        raise PlanError(
            f"{path} times nothing of {SMALLEST_BYTES} bytes or more between two ranks; run "
            "nccl-tests with -b 64K -e 1G -f 2"
        )
    return Timing(
        collective=PROGRAMS[kind],
        num_nodes=len(ranks),
        ranks_per_node=ranks[0],
        sizes_bytes=tuple(sorted(rows)),
        seconds=tuple(rows[size] for size in sorted(rows)),
    )
