"""Tensor parallel in the planner: what is cut, sent and refused. No torch, no process group."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from harness.questions import question as question_of

from mics_dtensor.cli import main
from mics_dtensor.cli.write import chosen_values
from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout, partition_sizes
from mics_dtensor.plan.presets import flavors, preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.search import answer
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.plan.tensor_parallel import (
    part_of,
    width_of_products,
)
from mics_dtensor.topology import Topology
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load

FILE = str(Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml")
ASK = ("plan", "--config-file", FILE, "--cluster", "p5", "--nodes", "2")
BATCH = ("--training.global_batch_size", "64")
OF = "--parallelism."
CUT = f"{OF}tensor_parallel_degree"
FOUR = ("--ranks-per-node", "4", "--mics.ranks_per_node", "4")
DENSE = [
    (model, flavor)
    for model in ("llama3", "qwen3")
    for flavor in flavors(model)
    if any("feed_forward.w1.weight" in dict(u.parameters) for u in preset(model, flavor).units)
]


def question(**changes: object) -> Question:
    its = {"num_nodes": 2, "global_batch": 64, "micro_batches": (1,)}
    return question_of("p5", **(its | {"node_local_backwards": (False,)} | changes))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*ASK, *BATCH, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def layout(degree: int, size: int) -> Layout:
    topology = Topology.uniform(world_size=16 * degree, ranks_per_node=8 * degree)
    return Layout(topology=topology, partition_size=size, tensor_parallel_size=degree)


@pytest.mark.parametrize(("model", "flavor"), DENSE)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_ranks_of_a_group_hold_the_model_once_and_the_norms_each(
    model: str, flavor: str, degree: int
) -> None:
    whole = traffic_units(preset(model, flavor), layout(1, 8), Policy())
    cut = traffic_units(preset(model, flavor), layout(degree, 8), Policy())
    for unit, part in zip(whole, cut, strict=True):
        norms = sum(prod(shape) for shape in unit.shapes if len(shape) == 1)
        held = part.numel - sum(prod(shape) for shape in part.repeated)
        assert degree * held == unit.numel + (degree - 1) * norms
        assert not unit.repeated
        assert degree * part.shard.size * part.shard_numel() >= unit.numel
    shape = shape_of(preset(model, flavor))
    part = part_of(shape, degree)
    assert degree * part.product_params == shape.product_params
    assert part.hidden == shape.hidden


def test_without_it_nothing_is_cut_and_nothing_said(capsys: pytest.CaptureFixture[str]) -> None:
    shape = shape_of(preset("qwen3", "8B"))
    assert part_of(shape, 1) == shape
    assert width_of_products(shape.hidden, 1) == shape.hidden
    assert planned(capsys) == planned(capsys, CUT, "1")
    told = planned(capsys, CUT, "1")
    assert "tensor" not in json.dumps(told)
    cut = planned(capsys, CUT, "2")
    assert cut.keys() - told.keys() == {"tensor_parallel_size"}
    one, two = told["rows"][0], cut["rows"][0]
    assert two["time"].keys() - one["time"].keys() == {"tensor_parallel_s"}
    assert cut["tensor_parallel_size"] == 2
    assert main([*ASK, *BATCH, CUT, "2"]) == 0
    assert "tensor parallel over 2 ranks of a node" in capsys.readouterr().out


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_rows_are_partition_sizes_of_the_ranks_that_are_left(
    degree: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, CUT, str(degree))
    topology = Topology.uniform(world_size=16, ranks_per_node=8)
    sizes = [row["variant"]["partition_size"] for row in told["rows"]]
    ranks = 16 // degree
    assert sizes == [*partition_sizes(topology, tensor_parallel_size=degree), ranks]
    for row in told["rows"]:
        assert row["num_micro_steps"] * row["variant"]["micro_batch"] * ranks == 64
        assert not row["variant"]["node_local_backward"]  # apply_mics refuses it
        terms = {name: seconds for name, seconds in row["time"].items() if name != "step_s"}
        assert sum(terms.values()) == pytest.approx(row["time"]["step_s"])
        its = question(tensor_parallel=degree)
        flops = shape_of(its.model).model_flops(8192) * row["tokens_per_s"]
        assert row["mfu"] == pytest.approx(flops / (16 * its.cluster.peak_flops_per_s))


@pytest.mark.parametrize("size", ["4", "8"])
def test_bytes_are_those_of_explain(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    of = (CUT, "2", "--mics.partition_size", size)
    told = planned(capsys, "--as-written", *of)
    rows = told["rows"]
    row = next(r for r in rows if r["variant"]["partition_size"] == int(size))
    assert main(["explain", FILE, "--world-size", "16", "--json", *BATCH, *of]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert row["inter_node_bytes"] == plan["inter_node_bytes"]
    assert row["num_micro_steps"] == plan["num_micro_steps"]


def test_auto_is_the_planners_answer(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ("--mics.partition_size", "auto", "--mics.cluster", "p5", CUT, "4", *BATCH)
    run, found = resolve(load(["--config-file", FILE, *auto]), world_size=32, local_world_size=8)
    told = planned(capsys, CUT, "4", "--nodes", "4", "--as-written")
    best = told["recommendation"]["variant"]
    assert found.partition_size == best["partition_size"]
    assert found.tensor_parallel_size == 4
    assert run.origin["mics.partition_size"] == "the planner"


def test_weak_scaling_agrees_with_single_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """64 sequences on 2 nodes are 16 a group of 4 GPUs: on 4 nodes that is a batch of 128."""
    curves = planned(capsys, "--scale", "1,2,4", CUT, "4", "--as-written")
    assert curves["sequences_of_a_rank"] == 16
    four = ("--nodes", "4", "--as-written", "--training.global_batch_size", "128")
    alone = planned(capsys, CUT, "4", *four)
    speeds = curves["tokens_per_s_of_a_gpu"]["best"]
    best = alone["recommendation"]["step_s"]
    assert speeds[2] == pytest.approx(128 * 8192 / best / 32)


def test_what_is_written_is_of_the_ranks_that_are_left() -> None:
    asked = question(tensor_parallel=4, num_nodes=2, optimizers_over_replicas=(False, True))
    rows = {row.variant.partition_size: row.variant for row in answer(asked).rows}
    assert "mics.hierarchical" in chosen_values(asked, rows[4])  # 16 ranks: two nodes
    assert "mics.hierarchical" not in chosen_values(asked, rows[2])  # 8 ranks: one
    assert "mics.optimizer_over_replicas" not in chosen_values(asked, rows[4])
    assert "mics.optimizer_over_replicas" in chosen_values(asked, rows[2])


REFUSED = {
    (CUT, "3"): "tensor_parallel_degree (3) must divide n_heads (32); choose from [1, 2, 4, 8]",
    (CUT, "16"): "llama3 8B: tensor_parallel_degree (16) must divide n_kv_heads (8); choose from",
    (CUT, "8", *FOUR): "does not divide the 4 ranks of a node of p5, inside which it lies; choose",
    (CUT, "4", "--training.seq_len", "1022"): "seq_len 1022 is not a multiple of 4",
    (CUT, "2", "--training.global_batch_size", "12"): "cannot be shared by 8 data-parallel ranks",
    (
        CUT,
        "2",
        f"{OF}enable_sequence_parallel",
        "false",
    ): "sequence_parallel = false is not planned",
    (CUT, "2", f"{OF}enable_async_tensor_parallel", "true"): "parallel = true is not planned yet",
    (CUT, "2", "--model.tp_gemm_backend", "dist_gemm"): 'tp_gemm_backend = "dist_gemm" is not',
    (CUT, "2", "--mics.node_local_backward", "true"): "needs plain parameters",
    (CUT, "2", f"{OF}pipeline_parallel_degree", "2"): "pipeline_parallel_degree = 2: the planner",
    (CUT, "2", f"{OF}context_parallel_degree", "2"): "context_parallel_degree = 2: the planner",
    (CUT, "2", "--model.name", "qwen3", "--model.flavor", "30B-A3B"): "not yet for qwen3 30B-A3B",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items(), ids=str)
def test_refusals_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASK, *BATCH, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err


def test_what_cannot_be_cut_is_no_question() -> None:
    with pytest.raises(PlanError, match=r"choose from \[1, 2, 4, 8\]"):
        question(tensor_parallel=3)
    with pytest.raises(PlanError, match="must divide n_heads"):
        part_of(shape_of(preset("llama3", "8B")), 3)
