"""`mics measure`: on forked ranks, and on an emulated cluster whose link is known."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.measure.collectives import sizes_between
from mics_dtensor.measure.device import Shape
from mics_dtensor.measure.groups import candidates
from mics_dtensor.measure.survey import Survey, survey
from mics_dtensor.measure.unit import unit_timings
from mics_dtensor.plan.calibrate import cluster_toml
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.topology import Topology

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.cluster import Cluster, what_is_missing  # noqa: E402
from benchmarks.launch import World  # noqa: E402

WHY_NOT = what_is_missing() if sys.platform == "linux" else "network namespaces are Linux's"
CPU = torch.device("cpu")


def wanted(*, sizes: list[int], partition_sizes: list[int] | None = None) -> Survey:
    return Survey(
        name="test",
        sizes=sizes,
        shapes=[Shape("w1", 16, 32, 64), Shape("square", 32, 32, 32)],
        peak_flops_per_s=None,
        partition_sizes=partition_sizes,
        repetitions=2,
    )


@ranks(4)
def test_every_group_that_a_run_could_use_is_timed_once(tmp_path: Path) -> None:
    """Two nodes of two: pairs inside, pairs across, all four; ours where there are two stages."""
    topology = Topology.uniform(world_size=4, ranks_per_node=2)
    sizes = sizes_between(1 << 16, 1 << 18)  # of smaller ones a busy host makes no bandwidth
    told: list[str] = []
    found = survey(wanted(sizes=sizes), topology, CPU, told.append)
    timed = {(t.collective, t.num_nodes, t.ranks_per_node) for t in found.measured.timings}
    shapes = [(1, 2), (2, 1), (2, 2)]
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert timed == {(kind, *shape) for kind in kinds for shape in shapes}
    assert len(found.measured.timings) == len(timed)
    assert all(t.sizes_bytes == (1 << 16, 1 << 17, 1 << 18) for t in found.measured.timings)
    ours = [(t.collective, t.num_nodes, t.ranks_per_node) for t in found.hierarchical]
    assert ours == [("all_gather", 2, 2), ("reduce_scatter", 2, 2)]
    assert found.measured.peak_flops_per_s >= max(p.flops_per_s for p in found.measured.products)
    assert len(found.measured.units) == 4
    assert set(found.measured.node_seconds) == {"node 0", "node 1"}

    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, cluster_toml(found.measured))
    same = {"\n".join(line for line in text.splitlines() if "memory" not in line) for text in texts}
    assert len(same) == 1  # what one rank writes is what all have found
    path = tmp_path / f"cluster{dist.get_rank()}.toml"
    path.write_text(texts[0])
    read = cluster(str(path))
    assert (read.ranks_per_node, read.measured_nodes, len(read.timings)) == (2, 2, 12)


@ranks(4)
def test_a_unit_is_timed_with_nothing_sent() -> None:
    """Beside the clock's own barriers and maxima; and it is FSDP2's unit that runs."""
    groups = candidates(
        Topology.uniform(world_size=4, ranks_per_node=2), None, device_type=CPU.type
    )
    with count_collectives() as counted:
        found = unit_timings(groups[0].group, (16, 256), CPU, repetitions=2)
    assert [unit.message_bytes for unit in found] == [3 * 4 * 16**2, 3 * 4 * 256**2]
    assert found[0].seconds > 0  # hooks of a unit cost far more than a product of 16 x 16
    assert {call.kind for call in counted.calls} <= {"all_reduce", "barrier"}
    assert all(call.message_bytes <= 8 * 2 for call in counted.calls if call.kind == "all_reduce")


@ranks(4)
def test_partition_sizes_choose_the_groups() -> None:
    topology = Topology.uniform(world_size=4, ranks_per_node=2)
    shapes = {(c.num_nodes, c.ranks_per_node) for c in candidates(topology, [2], device_type="cpu")}
    assert shapes == {(1, 2), (2, 1)}
    with pytest.raises(ConfigError, match="partition_size 3"):
        candidates(topology, [3], device_type="cpu")


@ranks(4)
def test_the_groups_are_those_that_hold_my_rank() -> None:
    topology = Topology.uniform(world_size=4, ranks_per_node=2)
    rank = dist.get_rank()
    for candidate in candidates(topology, None, device_type="cpu"):
        its = dist.get_process_group_ranks(candidate.group)
        assert rank in its
        assert len(its) == candidate.num_nodes * candidate.ranks_per_node
        assert len({topology.node_of(each) for each in its}) == candidate.num_nodes


QUICK = ("--min-size", "4K", "--max-size", "4K", "--repetitions", "1", "--tokens", "16")


@ranks(2, torchrun=True)
def test_what_cannot_be_written_is_refused_on_every_rank_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.toml"
    kept.touch(0o444)
    for out, why in (
        (tmp_path, "is a folder; give a file in it"),
        (tmp_path / "none" / "cluster.toml", f"there is no folder {tmp_path / 'none'} for"),
        (kept, "is not to be written (mode 444); chmod u+w"),
    ):
        assert main(["measure", "--out", str(out), *QUICK]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        if os.environ["RANK"] == "0":
            assert said.err.startswith("mics measure: --out: ")  # nothing that is being measured
            assert why in said.err
            assert said.err.count("\n") == 1
    assert kept.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@ranks(2, torchrun=True)
def test_what_was_measured_is_told_where_the_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = os.environ["RANK"] == "0"
    assert main(["measure", "--out", "/dev/full", *QUICK]) == (2 if first else 0)
    said = capsys.readouterr()
    if first:
        assert "--out /dev/full could not be written (No space left on device); its" in said.err
        path = tmp_path / "cluster.toml"
        path.write_text(said.out[said.out.index("\nschema = ") :])
        assert cluster(str(path)).timings
        assert "memory: " in said.out


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.timeout(300)
def test_on_the_emulated_cluster_no_link_is_faster_than_its_rate(tmp_path: Path) -> None:
    """80 Mbit/s out of a node are 10 MB/s; what is inside is not cut."""
    path = tmp_path / "cluster.toml"
    with Cluster(2, rate="80mbit") as emulated:
        world = World("measure", emulated, 2, port=29700, module="mics_dtensor.cli")
        arguments = ["--min-size", "512K", "--max-size", "2M", "--repetitions", "2"]
        world.start(["measure", "--out", str(path), "--tokens", "16", *arguments])
        world.wait(240)
    read = tomllib.loads(path.read_text())
    assert read["cluster"]["hosts"] == ["node0", "node1"]
    assert (read["cluster"]["num_nodes"], read["cluster"]["ranks_per_node"]) == (2, 2)
    rate = 10e6
    # The filter lets 256 kB pass at once, and again in each repetition.
    assert read["link"]["inter_node"]["bandwidth_bytes_per_s"] < 1.5 * rate
    assert read["link"]["intra_node"]["bandwidth_bytes_per_s"] > 1.5 * rate
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mics_dtensor.cli", "plan", "--as-written"),
            *("--config-file", "train_configs/debug.toml", "--cluster", str(path), "--nodes", "2"),
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "take partition_size" in done.stdout
    assert "measured" in done.stdout
