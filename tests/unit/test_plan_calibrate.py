"""Timings of collectives: fits, and `cluster.toml` as `mics measure` writes it."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.timings import SIZES, timed

from mics_dtensor.cli import main
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan import search
from mics_dtensor.plan.calibrate import (
    Measured,
    Product,
    UnitTiming,
    added_to_a_unit,
    cluster_toml,
    columns,
    links,
    merged,
    warnings,
)
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.cost import added_s, message_bytes, stage_s
from mics_dtensor.plan.options import WHOLE_BLOCK_BYTES, Options
from mics_dtensor.plan.stage import Collective, Stage
from mics_dtensor.plan.timing import WAYS, fitted, hop_between_s, hop_inside_s
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.plan.unit import Unit

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"


def unit_timing(numel: int) -> UnitTiming:
    """2 ms a unit, and a second for 1e9 bytes of its messages: 12 bytes an element."""
    return UnitTiming(message_bytes=12 * numel, seconds=2e-3 + 12 * numel / 1e9)


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
        units=tuple(unit_timing(numel) for numel in (10**4, 10**6, 10**8)),
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


def test_c9_a_message_to_each_peer_is_an_all_to_all(tmp_path: Path) -> None:
    """Three calls of a rank of four nodes are one all-to-all of theirs, measured or not."""
    group = GroupShape(4, 1, 2)
    for timings in ((timed("all_to_all", 4, 1),), ()):
        path = tmp_path / "cluster.toml"
        path.write_text(cluster_toml(measured(timings=(*measured().timings, *timings))))
        read = cluster(str(path))
        whole = stage("all_to_all", group, SIZES[3], 2)
        each = replace(whole, collective="send", calls=2 * 3)
        assert stage_s(each, read) == stage_s(whole, read) > 0


def test_c10_what_fsdp2_adds_to_a_unit(tmp_path: Path) -> None:
    """The two parameters are found again, and shared out over two gathers and a reduction."""
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(measured()))
    its = cluster(str(path))
    assert (its.unit_s, its.unit_s_per_byte) == (pytest.approx(2e-3), pytest.approx(1e-9))
    shard = GroupShape(1, 4, 2)
    unit = Unit(
        name="u",
        shapes=((400, 10),),
        frozen=((100, 10),),
        shard=shard,
        replicate=GroupShape(2, 1, 4),
        gather_itemsize=2,
    )
    forward, backward = added_s(unit, its)
    assert forward.host_s == pytest.approx(2e-3 / 3)
    assert backward.host_s == pytest.approx(2e-3 * 2 / 3)
    assert forward.copies_s == pytest.approx(2 * 5000 * 1e-9)
    assert backward.copies_s == pytest.approx((2 * 5000 + 4 * 4000) * 1e-9)
    # A GPU computes while its host goes ahead; on CPU the host is what computes.
    for products_s, hidden_s in ((1e-4, 1e-4), (1.0, 2e-3 / 3)):
        alone_s = products_s + 2e-3 / 3 + 1e-5
        assert forward.to(products_s, replace(its, gpu="cpu")) == pytest.approx(alone_s)
        assert forward.to(products_s, its) == pytest.approx(alone_s - hidden_s)
    nothing = added_to_a_unit([UnitTiming(message_bytes=12, seconds=-1e-6)])
    assert nothing == added_to_a_unit([]) == (0.0, 0.0)


def test_c11_calls_beside_the_network_add_nothing(tmp_path: Path) -> None:
    """Four nodes of two: of 4 blocks one gather and three reductions are hidden, on gloo alone."""
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(measured(ranks_per_node=2, timings=(timed("all_gather", 1, 2),))))
    its = cluster(str(path))
    shapes = {"shard": GroupShape(4, 2, 1), "replicate": GroupShape(1, 1, 8)}
    for rows, shown in ((2 * WHOLE_BLOCK_BYTES, (3 / 4, 1 / 4)), (8, (1.0, 1.0))):
        unit = Unit(name="u", shapes=((rows, 1),), count=3, **shapes)  # 4 bytes a row
        for backend, shares in (("gloo", shown), ("nccl", (1.0, 1.0))):
            options = Options(num_micro_steps=2, backend=backend)  # type: ignore[arg-type]
            stages = {s.name: s for s in step_traffic([unit], options).stages}
            for name, share in zip(("gather", "reduce"), shares, strict=True):
                stage = stages[f"{name} within the node"]
                alone_s = stage_s(replace(stage, hidden_calls=0), its)
                assert stage_s(stage, its) == pytest.approx(share * alone_s)
                assert stages[f"{name} between nodes"].hidden_calls == 0


def test_ranks_on_cpu_are_planned_as_they_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Over gloo nothing is sent beside products, however long those are."""
    told = {}
    for device, units in (("cpu", ()), ("cpu", measured().units), ("test", ())):
        path = tmp_path / f"{device}.toml"
        slow = measured(ranks_per_node=8, device=device, peak_flops_per_s=1e10, units=units)
        path.write_text(cluster_toml(replace(slow, timings=(timed("all_gather", 2, 8),))))
        ask = ["plan", "--config-file", str(FILE), "--cluster", str(path), "--nodes", "4"]
        ask += ["--training.global_batch_size", "64", "--json"]
        with mock.patch.object(search, "step_traffic", wraps=step_traffic) as asked:
            assert main(ask) == 0
        backends = {call.args[1].backend for call in asked.call_args_list}
        assert backends == {"gloo" if device == "cpu" else "nccl"}
        rows = json.loads(capsys.readouterr().out)["rows"]
        its = next(row["time"] for row in rows if row["variant"]["partition_size"] == 32)
        told[device, bool(units)] = its
    on_cpu, with_units, on_gpu = told.values()
    assert on_cpu["exposed_gather_s"] > 10 * on_gpu["exposed_gather_s"] > 0
    assert with_units["compute_s"] > 1.0 + on_cpu["compute_s"]  # copies of 8B, at 1e9 a second


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


def test_of_a_size_that_is_there_twice_the_faster_counts() -> None:
    its = timed("all_gather", 1, 4)
    both = merged([its, replace(its, seconds=tuple(2 * s for s in its.seconds))])
    assert both == (its,)


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
