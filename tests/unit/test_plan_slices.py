"""Optimizer states over the replicas, planned: their memory and bytes, in both modes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.largest_model import (
    RANKS,
    Kept,
    largest,
    num_parameters,
    peak_bytes,
    shape_of_width,
    table,
)
from mics_dtensor.cli import main
from mics_dtensor.layout import Layout
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.memory import CONTEXT_BYTES, FRAGMENTATION, NCCL_BYTES, Holding, peak_memory
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.plan.slices import adam_bytes
from mics_dtensor.topology import Topology

ROOT = Path(__file__).parents[2]


def test_the_bytes_of_an_element_are_those_of_the_two_modes() -> None:
    for num_replicas in (1, 2, 4, 16):
        held = {
            itemsize: adam_bytes(16, num_replicas=num_replicas, itemsize=itemsize) / 16
            for itemsize in (None, 4, 2)
        }
        assert held == {None: 16, 4: 4 + 4 + 8 / num_replicas, 2: 2 + 4 + 12 / num_replicas}


def test_the_peak_falls_by_what_is_cut() -> None:
    model = preset("llama3", "8B")
    layout = Layout(topology=Topology.uniform(world_size=64, ranks_per_node=8), partition_size=8)
    units = traffic_units(model, layout, Policy())
    work = Work(shape=shape_of(model), seq_len=8192, micro_batch=1, checkpointing="full")
    cut = replace(work, num_states_shards=64)
    plain = peak_memory(units, work, Holding())
    sliced = peak_memory(units, cut, Holding())
    masters = peak_memory(units, cut, Holding(param_itemsize=2, has_masters=True))
    numel = plain.parameters // 4
    assert (plain.states, sliced.states, masters.states) == (8 * numel, numel, 12 * numel // 8)
    assert masters.parameters == 2 * numel
    assert masters.gradients == sliced.gradients == plain.gradients
    assert plain.traced - sliced.traced == 7 * numel


def test_sums_of_gradients_are_fp32_whatever_the_parameters_are() -> None:
    """As gradient_accumulation keeps them (test_accumulation_sums.py); a plain step does not."""
    model = preset("llama3", "8B")
    layout = Layout(topology=Topology.uniform(world_size=64, ranks_per_node=8), partition_size=8)
    units = traffic_units(model, layout, Policy())
    work = Work(shape=shape_of(model), seq_len=8192, micro_batch=1, checkpointing="full")
    wide, narrow, alone = (
        peak_memory(units, work, Holding(num_micro_steps=4, **options)).gradients
        for options in ({}, {"param_itemsize": 2}, {"param_itemsize": 2, "fp32_sums": False})
    )
    assert wide == narrow == 2 * alone > 0


def test_explain_tells_memory_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> tuple[int, int]:
        config = str(ROOT / "train_configs" / "llama3_8b_2x8.toml")
        world = ("--world-size=128", "--training.global_batch_size=1024")
        assert main(["explain", config, *world, "--json", *arguments]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        boundary = [
            stage["inter_node_bytes"]
            for stage in plan["stages"]
            if stage["name"].startswith(("boundary", "gather of slices"))
        ]
        return sum(boundary), plan["adam_bytes_per_rank"]

    bytes_, held = told()
    cut = told("--mics.optimizer_over_replicas=true")
    masters = told("--mics.optimizer_over_replicas=true", "--mics.master_weights=sharded")
    assert cut[0] == bytes_
    assert masters[0] == pytest.approx(0.75 * bytes_, rel=1e-9)
    assert cut[1] == pytest.approx(held * (8 + 8 / 16) / 16, rel=1e-6)
    assert masters[1] == pytest.approx(held * (6 + 12 / 16) / 16, rel=1e-6)


def test_the_largest_model_is_the_largest_and_the_readme_has_the_table() -> None:
    for kept in (Kept(), Kept(over_replicas=True), Kept(over_replicas=True, has_masters=True)):
        found = largest(16, 40 * 10**9, kept)
        heads = next(n for n in range(8, 257) if num_parameters(shape_of_width(n)) == found)
        assert peak_bytes(shape_of_width(heads), 16, kept) <= 40 * 10**9
        assert peak_bytes(shape_of_width(heads + 1), 16, kept) > 40 * 10**9
        least = CONTEXT_BYTES + NCCL_BYTES  # beside what the states alone take
        states = found / 16 * (16 if not kept.over_replicas else 6) * (1 + FRAGMENTATION)
        assert least + states < 40 * 10**9 * (1 + 16 / RANKS)
    assert table() in (ROOT / "README.md").read_text()
