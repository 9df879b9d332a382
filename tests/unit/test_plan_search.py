"""`mics plan`: rows, recommendation, ties and refusals. No torch, no process group."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from harness.questions import question

from mics_dtensor.cli import main
from mics_dtensor.cli.write import chosen_values
from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout, divisors, partition_sizes
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.held import least_bytes
from mics_dtensor.plan.memory import Holding, peak_memory
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.question import variants_of
from mics_dtensor.plan.search import RESOLUTION, answer, corner_steps_s
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.topology import Topology

CONFIGS = Path(__file__).parents[2] / "train_configs"
FILE = str(CONFIGS / "llama3_8b_2x8.toml")
ASK = ("plan", "--config-file", FILE, "--cluster", "p4d", "--nodes", "4")
BATCH = ("--training.global_batch_size", "64")


def test_one_row_for_each_partition_size_and_plain_fsdp() -> None:
    found = answer(question())
    sizes = [row.variant.partition_size for row in found.rows]
    assert sizes == [1, 2, 4, 8, 16, 32, 32]
    assert [row.variant.plain for row in found.rows] == [False] * 6 + [True]
    for row in found.rows:
        assert row.num_micro_steps * row.variant.micro_batch * 32 == 128  # the batch is kept
        assert row.hfu >= row.mfu > 0
        assert row.tokens_per_s * row.step_s == pytest.approx(128 * 4096)


@pytest.mark.parametrize("name", ["p4d", "p4de", "p5", "ethernet-100g", "gb200-nvl72"])
def test_what_is_recommended_fits_and_is_the_fastest_that_does(name: str) -> None:
    its = cluster(name)
    found = answer(question(cluster=its, global_batch=4 * 4 * its.ranks_per_node))
    assert found.best.fits
    assert found.best.memory.total <= its.memory_bytes
    for row in found.rows:
        assert not row.fits or row.step_s >= found.best.step_s
    low, high = found.interval_s
    assert low < found.best.step_s < high


def test_a_slow_network_wants_small_groups_and_a_free_one_does_not_care() -> None:
    slow = cluster("p4de").scaled(between=1e-3)
    asked = question(cluster=slow, micro_batches=(1,))  # 4 micro-steps share one boundary
    assert answer(asked).best.variant.partition_size == 8
    one = answer(replace(asked, micro_batches=(4,), global_batch=128)).best.variant
    assert one.partition_size == 32  # one micro-step: two stages over all send less than a hop
    assert one.hierarchical
    free = answer(question(cluster=cluster("p4de").scaled(between=1e6, inside=1e6)))
    assert free.ties  # nothing decides


def test_replicas_of_one_node_sum_there_before_they_cross() -> None:
    """Half a node a group: the hop's bytes out of the nodes are those of two stages, not a ring."""
    for size, told, crossing in ((4, True, 4), (8, False, 4), (16, True, 2)):
        asked = question(micro_batches=(1,))
        variants = list(variants_of(asked, asked.layout(size)))
        assert {its.hierarchical for its in variants} == ({True, False} if told else {False})
        row = next(row for row in answer(asked).rows if row.variant.partition_size == size)
        assert row.variant.hierarchical is told
        if size < 16:  # gathers stay inside: 2 (n - 1) / n of every node's fp32 sums, n nodes
            units = traffic_units(asked.model, asked.layout(size), asked.policy)
            numel = sum(unit.count * unit.numel for unit in units)
            least = 2 * (crossing - 1) * 4 * numel
            assert least <= row.inter_node_bytes < 1.001 * least
        written = chosen_values(asked, row.variant)
        assert ("mics.hierarchical" in written) is told
        assert ("mics.node_local_backward" in written) is (size > 8)


def test_a_tie_is_what_some_corner_turns_round() -> None:
    asked = question()
    found = answer(asked)
    best = corner_steps_s(asked, found.best.variant)
    for row in found.rows:
        if row.fits and row is not found.best:
            turned = any(
                its <= ours * (1 + RESOLUTION)
                for its, ours in zip(corner_steps_s(asked, row.variant), best, strict=True)
            )
            assert turned == any(row is tied for tied in found.ties) or row.variant.plain


def test_memory_falls_with_the_partition_size_and_rises_with_the_batch() -> None:
    model = preset("llama3", "8B")
    topology = Topology.uniform(world_size=64, ranks_per_node=8)

    def held(size: int, micro_batch: int, checkpointing: str, micro_steps: int = 1) -> int:
        layout = Layout(topology=topology, partition_size=size)
        work = Work(
            shape=shape_of(model),
            seq_len=4096,
            micro_batch=micro_batch,
            checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        holding = Holding(num_micro_steps=micro_steps)
        return peak_memory(traffic_units(model, layout, Policy()), work, holding).traced

    one_node = [held(size, 1, "full", 2) for size in (1, 2, 4, 8)]
    assert one_node == sorted(one_node, reverse=True)
    assert held(64, 1, "full") < held(16, 1, "full")
    # States alone differ: parameters, gradients and two moments in fp32, one eighth each time.
    states = 16 * model.num_parameters
    assert held(1, 1, "full", 2) - held(8, 1, "full", 2) == pytest.approx(states * 7 / 8, rel=1e-3)
    for how in ("none", "op", "full"):
        batches = [held(8, size, how) for size in (1, 2, 4)]
        assert batches == sorted(batches)
    kept = [held(8, 2, how) for how in ("full", "op", "2", "none")]
    assert kept == sorted(kept)


def test_what_fits_nowhere_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"least is .* GB too much .* 64 nodes do not hold it"):
        answer(question(model=preset("llama3", "405B"), num_nodes=1, global_batch=8))
    large = question(model=preset("llama3", "70B"), num_nodes=1, global_batch=8)
    with pytest.raises(PlanError, match=r"what would help: (\d+) nodes hold it") as refused:
        answer(large)
    nodes = int(re.search(r"(\d+) nodes hold it", str(refused.value))[1])  # type: ignore[index]
    answer(replace(large, num_nodes=nodes, global_batch=8 * nodes))
    for fewer in range(1, nodes):
        with pytest.raises(PlanError):
            answer(replace(large, num_nodes=fewer, global_batch=8 * fewer))
    with pytest.raises(PlanError, match="give a multiple of 32"):
        answer(question(global_batch=33))
    with pytest.raises(PlanError, match=r"choose from \[1, 2, 4\]"):
        answer(question(micro_batches=(3,)))


@pytest.mark.parametrize(("name", "length"), [("p4d", 512), ("p3dn", 4096)])
def test_no_micro_batch_is_missed(name: str, length: int) -> None:
    """Those that cannot fit are not tried: the answer is the best of each micro-batch alone."""
    each = 60
    asked = question(name, num_nodes=2, seq_len=length, global_batch=16 * each)
    alone = [replace(asked, micro_batches=(size,)) for size in divisors(each)]
    assert least_bytes(asked) == min(least_bytes(one) for one in alone)
    rows = []
    for one in alone:
        with suppress(PlanError):
            rows += [row for row in answer(one).rows if row.fits]
    assert 1 <= len({row.variant.micro_batch for row in rows}) < len(alone)
    found = answer(asked)
    for row in found.rows:
        variant = row.variant
        same = [
            other.step_s
            for other in rows
            if (other.variant.partition_size, other.variant.plain)
            == (variant.partition_size, variant.plain)
        ]
        assert row.fits == bool(same)
        assert not row.fits or row.step_s == min(same)


def test_a_batch_of_any_size_is_answered_or_refused_at_once() -> None:
    most = question("p4d", num_nodes=2, global_batch=16 * 720720)  # of 240 divisors
    began = time.monotonic()
    answer(most)
    for batch in (16_000_000_000, 999_999_999_999_999_984):
        with pytest.raises(PlanError, match="a GPU and step; the planner goes to 1,048,576"):
            answer(replace(most, global_batch=batch))
    assert time.monotonic() - began < 20


QUICK = ("--as-written",)  # one variant a row


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*ASK, *BATCH, *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_says_why_and_whence(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys)
    assert said.count("take this") == 1
    assert "does not fit: " in said
    assert "take partition_size = " in said
    assert "S32" in said[said.index("constants: (key to the sources: docs/cost_model.md") :]


def test_json_holds_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(planned(capsys, "--json"))
    assert said["schema"] == 1
    sizes = [row["variant"]["partition_size"] for row in said["rows"]]
    topology = Topology.uniform(world_size=32, ranks_per_node=8)
    assert sizes == [*partition_sizes(topology), 32]
    best = [row for row in said["rows"] if row["why"] == "take this"]
    assert best[0]["variant"] == said["recommendation"]["variant"]
    for row in said["rows"]:
        terms = {name: s for name, s in row["time"].items() if name != "step_s"}
        assert sum(terms.values()) == pytest.approx(row["time"]["step_s"])
        kinds = {name: size for name, size in row["memory_bytes"].items() if name != "total"}
        assert sum(kinds.values()) == row["memory_bytes"]["total"]
    assert {each["origin"] for each in said["constants"]} == {"preset"}


def test_bytes_are_those_of_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows and `mics explain` read one model of the traffic."""
    said = json.loads(planned(capsys, "--json", "--as-written", "--mics.partition_size", "8"))
    row = next(row for row in said["rows"] if row["variant"]["partition_size"] == 8)
    assert main(["explain", FILE, "--world-size", "32", "--json", *BATCH]) == 0
    sent = json.loads(capsys.readouterr().out)["plan"]["inter_node_bytes"]
    assert row["inter_node_bytes"] == sent


def test_as_written_keeps_the_variant(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(planned(capsys, "--json", "--as-written"))
    for row in said["rows"]:
        assert (row["variant"]["micro_batch"], row["variant"]["checkpointing"]) == (1, "op")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "p44d"), "choose from"),
        (("--nodes", "0"), "give 1 or more"),
        (("--ranks-per-node", "9"), "give 1 to 8"),
        (("--parallelism.context_parallel_degree", "2"), "data and tensor parallelism alone"),
        (("--model.name", "qwen3", "--model.flavor", "30B-A3B"), "not yet for qwen3"),
        (("--training.global_batch_size", "33"), "multiple of 32"),
    ],
)
def test_refusals_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASK, *BATCH, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err


GOOD = """
schema = 1
[cluster]
name = "ours"
device = "H100"
ranks_per_node = 4
peak_flops_per_s = 989e12
product_share = 0.5
memory_bytes = 80e9
memory_bytes_per_s = 3.35e12
origin = "user"
[link.intra_node]
latency_s = 3e-6
bandwidth_bytes_per_s = 300e9
origin = "measured"
[link.inter_node]
latency_s = 1e-5
bandwidth_bytes_per_s = 40e9
shares = [[1e6, 0.2], [1e9, 1.0]]
"""


def test_a_cluster_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    of_four = (*QUICK, "--mics.ranks_per_node", "4")
    said = json.loads(planned(capsys, "--json", "--cluster", str(path), *of_four))
    assert said["ranks_per_node"] == 4
    assert {each["origin"] for each in said["constants"]} == {"preset", "user", "measured"}
    for old, new, message in (
        ("schema = 1", "schema = 2", "schema 2"),
        ("ranks_per_node = 4\n", "", "ranks_per_node"),
        ('"measured"', '"guessed"', "preset, measured, user"),
        ("[1e9, 1.0]", "[1e9, 1.5]", "shares from 1e-12 to 1"),
        ("latency_s = 3e-6", "latency_s = -1", "seconds, from 0"),
        ("989e12", '"fast"', "give FLOP/s"),
        ("80e9", "0", "give whole bytes, from 1e8"),
    ):
        path.write_text(GOOD.replace(old, new))
        assert main([*ASK, *BATCH, *QUICK, "--cluster", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, torchtitan=None)\n"
        "from mics_dtensor.cli import main\n"
        f"sys.exit(main({[*ASK, *BATCH]!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(FILE).parents[1] / "src")}
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env=env, stdout=subprocess.DEVNULL
    )
