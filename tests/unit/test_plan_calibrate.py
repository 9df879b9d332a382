"""Timings of collectives: fits, `cluster.toml`, nccl-tests' own reports, and what is refused."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.calibrate import (
    Measured,
    Product,
    cluster_toml,
    columns,
    links,
    merged,
    warnings,
)
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.cost import message_bytes, stage_s
from mics_dtensor.plan.stage import Collective, Stage
from mics_dtensor.plan.timing import WAYS, Timing, fitted, hop_between_s, hop_inside_s

SIZES = tuple(1 << power for power in range(16, 31, 2))
FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"


def timed(
    kind: Collective, nodes: int, ranks: int, *, edges: float = 1.0, rate: float = 1e10
) -> Timing:
    """On a made link: 5 us a hop inside, 50 us between, `rate` bytes a second for `edges` edges."""
    hops_s = (nodes * (ranks - 1)) * 5e-6 + (nodes - 1) * 50e-6
    empty = Timing(
        collective=kind, num_nodes=nodes, ranks_per_node=ranks, sizes_bytes=(1,), seconds=(1,)
    )
    return replace(
        empty,
        sizes_bytes=SIZES,
        seconds=tuple(WAYS[kind] * hops_s + edges * empty.over_edge(size) / rate for size in SIZES),
    )


def measured(**changes: Any) -> Measured:
    its = Measured(
        name="ours",
        device="test",
        hosts=("a", "b"),
        ranks_per_node=4,
        backend="gloo",
        timings=(
            timed("all_gather", 1, 4, rate=1e11),
            timed("all_gather", 2, 4),
            timed("all_reduce", 2, 1, edges=4),
        ),
        products=(Product(name="w1", rows=8, inner=4, columns=2, flops_per_s=6e11),),
        peak_flops_per_s=1e12,
        memory_bytes=80_000_000_000,
        memory_bytes_per_s=1e12,
        overlap_slowdown=0.25,
        reserved_bytes=3_000_000_000,
        node_seconds={"a": 1.0, "b": 1.0},
    )
    return replace(its, **changes)


@pytest.mark.parametrize("kind", list(WAYS))
def test_c6_two_parameters_are_found_again(kind: Collective) -> None:
    """What a made link gives is what the fit finds: bandwidth, and the two hops."""
    inside, between = timed(kind, 1, 8, rate=1e11), timed(kind, 4, 8)
    fit = fitted(inside)
    assert fit.bytes_per_s == pytest.approx(1e11)
    assert fit.worst < 1e-9
    hop_s = hop_inside_s(inside, fit)
    assert hop_s == pytest.approx(5e-6)
    assert hop_between_s(between, fitted(between), inside_s=hop_s) == pytest.approx(50e-6)


def test_c6_groups_of_a_node_share_its_nic() -> None:
    """Four groups a node, one rank of each in it: the NIC carries four times what an edge does."""
    within, across = links([timed("all_gather", 1, 4), timed("all_gather", 4, 1, edges=4)], 4)
    assert across.bandwidth_bytes_per_s == pytest.approx(1e10)
    assert across.hop_latency_s == pytest.approx(50e-6)
    assert within.hop_latency_s == pytest.approx(5e-6)


def stage(kind: Collective, group: GroupShape, size: int, calls: int, blocks: int = 1) -> Stage:
    """`calls` of a rank, each of `size` bytes, in groups whose ring goes node by node."""
    moved = WAYS[kind] * (group.size - 1) * group.num_groups * size * calls
    between = group.num_nodes if group.num_nodes > 1 else 0
    return Stage(
        unit="u",
        name="gather",
        collective=kind,
        group=group,
        calls=calls,
        blocks=blocks,
        inter_node_bytes=moved * between // group.size,
        intra_node_bytes=moved - moved * between // group.size,
        every_micro_step=True,
    )


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_c7_what_was_measured_decides(kind: Collective, tmp_path: Path) -> None:
    """Three calls of a measured size in a measured group take three times the measured seconds."""
    its = timed(kind, 2, 4)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(measured(timings=(timed("all_gather", 1, 4), its))))
    read = cluster(str(path))
    group = GroupShape(2, 4, 1)
    for place, size in enumerate(SIZES):
        calls = stage(kind, group, size, 3)
        assert message_bytes(calls) == pytest.approx(3 * size)
        assert stage_s(calls, read) == pytest.approx(3 * its.seconds[place], rel=1e-4)
    # One launch of two blocks is one message of both.
    assert stage_s(stage(kind, group, SIZES[2], 2, blocks=2), read) == pytest.approx(
        its.seconds_of(2 * SIZES[2]), rel=1e-4
    )
    # A group that was not measured is reckoned from the links.
    far = stage_s(stage(kind, GroupShape(8, 4, 1), SIZES[4], 1), read)
    assert far > stage_s(stage(kind, group, SIZES[4], 1), read)
    twice = stage_s(stage(kind, group, SIZES[4], 1), read.scaled(between=2))
    assert twice == pytest.approx(its.seconds[4] / 2, rel=1e-4)


def test_between_and_beyond_the_sizes() -> None:
    its = timed("all_gather", 2, 4)
    assert its.seconds_of(1) == its.seconds[0]
    assert its.seconds_of(2 * SIZES[-1]) == pytest.approx(2 * its.seconds[-1])
    middle = its.seconds_of((SIZES[2] * SIZES[3]) ** 0.5)
    assert middle == pytest.approx((its.seconds[2] * its.seconds[3]) ** 0.5)


def test_a_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(measured()))
    read = cluster(str(path))
    assert (read.name, read.gpu, read.ranks_per_node, read.measured_nodes) == ("ours", "test", 4, 2)
    assert read.product_share == pytest.approx(0.6)
    assert read.reserved_bytes == 3_000_000_000
    assert read.overlap_slowdown == 0.25
    assert [t.collective for t in read.timings] == ["all_gather", "all_gather", "all_reduce"]
    assert read.between.origin == read.inside.origin == read.origin == "measured"
    assert read.between.bandwidth_bytes_per_s == pytest.approx(1e10, rel=1e-4)
    assert tomllib.loads(path.read_text())["cluster"]["hosts"] == ["a", "b"]


def test_the_plan_takes_it_and_says_where_its_constants_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(measured(ranks_per_node=8, timings=(timed("all_gather", 2, 8),))))
    ask = ["plan", "--config-file", str(FILE), "--cluster", str(path), "--nodes", "4"]
    ask += ["--training.global_batch_size", "64"]
    assert main([*ask, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    origins = {each["name"]: each["origin"] for each in told["constants"]}
    assert origins["bandwidth out of a node"] == "measured"
    assert origins["context and buffers of a rank"] == "measured"
    assert origins["timings of collectives"] == "measured"
    (best,) = [row for row in told["rows"] if row["why"].endswith("take this")][:1]
    assert best["memory_bytes"]["reserved"] >= 3_000_000_000


def test_columns_are_those_of_nccl_tests() -> None:
    lines = columns([timed("all_reduce", 1, 4, rate=1e9)])
    assert [line.split() for line in lines[2:4]] == [
        ["size", "time", "algbw", "busbw"],
        ["(B)", "(us)", "(GB/s)", "(GB/s)"],
    ]
    size, time_us, algbw, busbw = (float(cell) for cell in lines[-1].split())
    assert size == SIZES[-1]
    assert algbw == pytest.approx(size / time_us / 1e3, abs=1e-3)
    assert busbw == pytest.approx(1.5 * algbw, abs=2e-3)  # 2 (n - 1) / n


def test_a_slow_node_and_a_bad_fit_are_told() -> None:
    assert warnings(measured()) == []
    slow = warnings(measured(node_seconds={"a": 1.0, "b": 1.1, "c": 2.0}))
    assert len(slow) == 1
    assert slow[0].startswith("c is slow: it takes 1.82 times as long as the median")
    its = timed("all_gather", 2, 4)
    odd = replace(its, seconds=(*its.seconds[:-1], 4 * its.seconds[-1]))
    (said,) = warnings(measured(timings=(odd,)))
    assert said.startswith("all_gather over 2 x 4 ranks misses latency + bytes / bandwidth by up")


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


def test_of_a_size_that_is_there_twice_the_faster_counts() -> None:
    its = timed("all_gather", 1, 4)
    both = merged([its, replace(its, seconds=tuple(2 * s for s in its.seconds))])
    assert both == (its,)


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


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ranks_per_node = 4\npeak", "ranks_per_node = 2\npeak", "measured on another cluster"),
        ('collective = "all_gather"', 'collective = "gather"', "of one of all_gather"),
        ("seconds = [", "seconds = [-1.0, ", "ascending sizes above 0 and a time above 0"),
        ("schema = 1", "schema = 2", "reads schema 1"),
        ("num_nodes = 2\nranks_per_node = 4\nsize", "ranks_per_node = 4\nsize", "lacks the key"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    text = cluster_toml(measured())
    assert before in text
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace(before, after))
    with pytest.raises(PlanError) as refused:
        cluster(str(path))
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "measuring needs ranks: start it with torchrun"),
        (("--max-size", "12X"), "'12X' is no size"),
        (("--min-size", "2M", "--max-size", "1M"), "give at least 64 bytes"),
        (("--repetitions", "0"), "give 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["measure", *arguments]) == 2
    assert message in capsys.readouterr().err
