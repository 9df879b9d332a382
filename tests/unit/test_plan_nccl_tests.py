"""The reports that nccl-tests writes, as a cluster of the planner."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness.timings import SIZES, timed

from mics_dtensor.cli import main
from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster_file import cluster


def report(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A report as nccl-tests' src/util.cu writes it: times in microseconds, rates in GB/s."""
    its = timed("all_gather", 2, 8)
    devices = [
        {"rank": rank, "hostname": f"h{rank // 8}", "device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(16)
    ]
    rows = [{"size": 8, "out_of_place": {"time": 9.0, "alg_bw": 0.0, "bus_bw": 0.0}}]
    rows += [
        {"size": size, "out_of_place": {"time": 1e6 * s, "alg_bw": 1.0, "bus_bw": 1.0}}
        for size, s in zip(its.sizes_bytes, its.seconds, strict=True)
    ]
    told = {
        "version": 3,
        "args": [f"/opt/nccl-tests/build/{name}_perf", "-b", "8"],
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": rows,
    }
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(told | changes))
    return path


def test_nccl_tests_own_reports_are_a_cluster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [report(tmp_path, "all_gather"), report(tmp_path, "alltoall")]
    its = cluster(",".join(str(path) for path in paths))
    assert (its.gpu, its.ranks_per_node, its.measured_nodes) == ("H100-80GB", 8, 2)
    assert {t.collective for t in its.timings} == {"all_gather", "all_to_all"}
    assert its.timings[0].sizes_bytes == SIZES  # 8 bytes are left out
    assert its.between.bandwidth_bytes_per_s == pytest.approx(1e10)
    assert its.peak_flops_per_s == 989e12
    assert main(["measure", "--from-nccl-tests", *map(str, paths)]) == 0
    assert "bandwidth out of a node: 10.0 GB/s (measured)" in capsys.readouterr().out


def devices(count: int, name: str) -> dict[str, Any]:
    return {
        "nthreads": 1,
        "ngpus": 1,
        "devices": [{"hostname": f"h{rank // 8}", "device_info": name} for rank in range(count)],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": devices(16, "Voodoo 2")}, "no constants of 'Voodoo 2' are known"),
        ({"config": devices(12, "NVIDIA H200")}, "hosts with (8, 4) GPUs"),
        ({"args": ["sendrecv_perf"]}, "is a report of sendrecv_perf"),
        ({"results": []}, "times nothing of 65536 bytes or more"),
        ({"config": {}}, "names no devices"),
    ],
)
def test_reports_that_cannot_be_used_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as refused:
        cluster(str(report(tmp_path, "all_gather", **changes)))
    assert message in str(refused.value)


def test_reports_of_two_clusters_are_refused(tmp_path: Path) -> None:
    one = report(tmp_path, "all_gather")
    other = report(tmp_path, "all_reduce", config=devices(16, "NVIDIA H200"))
    with pytest.raises(PlanError, match="reports of two clusters"):
        cluster(f"{one},{other}")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(PlanError, match="is no report of nccl-tests"):
        cluster(str(tmp_path / "no.json"))
