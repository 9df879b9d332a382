"""Closed form and two shallow traces, each against the full trace of torchtitan's model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torchtitan")

import torch

from mics_dtensor.layout import Layout
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.extrapolate import Depths, Trace, depths_for
from mics_dtensor.plan.memory import CPU, Holding, Memory, peak_memory
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import Checkpointing, preset_of, shape_of
from mics_dtensor.plan.trace import traced_moments
from mics_dtensor.topology import Topology
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.traced_cut import loss_of
from mics_dtensor.train.tracing import fake_world, max_seq_len, sharded
from mics_dtensor.upstream import local_of

WORLD = 64
WORDS = 4096


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(WORLD):
        yield


def config_of(flavor: str) -> tuple[RunConfig, int | None]:
    """A flavor, and WORDS where "4096 words" follows, so that the blocks decide."""
    name, _, smaller = flavor.partition(", ")
    model, _, its = name.rpartition("/")
    config = replace_at(RunConfig(), "model.name", model or "llama3")
    return replace_at(config, "model.flavor", its), WORDS if smaller else None


Case = tuple[str, int, int, tuple[Checkpointing, int, int]]
"""Flavor, blocks, shards, and work: checkpointing, micro-batch, tokens of a sequence."""


def closed_form(
    flavor: str,
    num_layers: int,
    partition_size: int,
    work: tuple[Checkpointing, int, int],
    *,
    degree: int = 1,
) -> Memory:
    checkpointing, micro_batch, seq_len = work
    name, _, smaller = flavor.partition(", ")
    config, _ = config_of(flavor)
    model = preset(config.model.name, config.model.flavor).with_layers(num_layers)
    if smaller:  # so that the blocks decide, and not the logits
        model = preset_of(replace(shape_of(model), vocab=WORDS), name=name)
    topology = Topology.uniform(world_size=WORLD * degree, ranks_per_node=8 * degree)
    layout = Layout(topology=topology, partition_size=partition_size, tensor_parallel_size=degree)
    return peak_memory(
        traffic_units(model, layout, Policy(chunked_loss=False)),
        Work(
            shape=shape_of(model),
            seq_len=seq_len,
            micro_batch=micro_batch,
            checkpointing=checkpointing,
            tensor_parallel=degree,
        ),
        Holding(hierarchical=False, max_seq_len=max_seq_len(config_of(flavor)[0])),
        CPU,
    )


def traced(
    flavor: str,
    num_layers: int,
    partition_size: int,
    work: tuple[Checkpointing, int, int],
    *,
    degree: int = 1,
) -> Trace:
    checkpointing, micro_batch, seq_len = work
    config, vocab = config_of(flavor)
    config = replace_at(config, "parallelism.tensor_parallel_degree", degree)
    model = sharded(
        config,
        num_layers=num_layers,
        partition_size=partition_size,
        checkpointing=checkpointing,
        policy=Policy(),
        vocab=vocab,
    )

    moments = traced_moments(
        model,
        lambda m: torch.optim.AdamW(m.parameters()),
        loss_of(model, degree),
        [(micro_batch, seq_len)] * 2,
    )
    numel = sum(local_of(parameter).numel() for parameter in model.parameters())
    return Trace(num_layers, partition_size, numel, moments)


FEW = [
    ("8B", 2, 8, ("full", 1, 4096)),
    ("8B", 3, 64, ("none", 1, 2048)),
    ("8B, 4096 words", 3, 8, ("full", 1, 4096)),
    ("qwen3/8B", 3, 8, ("full", 1, 4096)),
]
GRID = [
    ("8B", 4, 8, ("none", 1, 8192)),
    ("8B", 4, 16, ("op", 2, 4096)),
    ("8B", 5, 8, ("2", 1, 4096)),
    ("8B", 8, 32, ("full", 1, 4096)),
    ("8B", 6, 64, ("op", 1, 2048)),
    ("8B", 4, 64, ("full", 4, 2048)),
    ("70B", 2, 32, ("full", 1, 1024)),
    ("70B", 4, 8, ("none", 1, 4096)),
    ("70B", 4, 64, ("op", 2, 4096)),
    ("70B", 6, 64, ("full", 2, 8192)),
    ("405B", 2, 64, ("full", 1, 4096)),
    ("8B, 4096 words", 4, 8, ("none", 1, 4096)),
    ("8B, 4096 words", 8, 16, ("full", 2, 4096)),
    ("8B, 4096 words", 4, 8, ("op", 1, 4096)),
    ("8B, 4096 words", 5, 64, ("2", 1, 2048)),
    ("70B, 4096 words", 3, 32, ("full", 1, 1024)),
    ("70B, 4096 words", 3, 64, ("op", 2, 4096)),
    ("debugmodel", 6, 4, ("none", 8, 2048)),
    ("debugmodel", 6, 16, ("full", 8, 2048)),
    ("qwen3/8B", 4, 16, ("none", 1, 2048)),
    ("qwen3/14B", 4, 64, ("op", 2, 4096)),
    ("qwen3/0.6B", 6, 8, ("none", 1, 4096)),
    ("qwen3/1.7B", 4, 16, ("full", 2, 4096)),
]


def check(case: Case, degree: int = 1) -> None:
    ours = closed_form(*case, degree=degree).traced
    true = traced(*case, degree=degree).moments["peak"]["Total"]
    print(
        f"{case} / {degree}: closed form {ours / 2**20:.0f} MiB, trace {true / 2**20:.0f} MiB, "
        f"{ours / true - 1:+.2%}"
    )
    assert abs(ours - true) <= 0.03 * true


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_closed_form_is_within_3_percent_of_the_trace(
    case: Case,
) -> None:
    check(case)


@pytest.mark.matrix
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", GRID, ids=str)
def test_over_depth_width_partition_size_checkpointing_and_micro_batch(
    case: Case,
) -> None:
    check(case)


CUT_FEW = [
    (2, ("8B, 4096 words", 3, 8, ("full", 1, 4096))),
    (4, ("8B, 4096 words", 3, 64, ("op", 1, 2048))),
    (8, ("8B, 4096 words", 4, 64, ("none", 2, 8192))),
    (8, ("70B", 2, 8, ("full", 1, 4096))),
    (2, ("qwen3/8B", 3, 16, ("none", 1, 2048))),
]
CUT_GRID = [
    (2, ("8B", 4, 8, ("none", 1, 8192))),
    (2, ("70B, 4096 words", 4, 64, ("op", 2, 4096))),
    (2, ("8B, 4096 words", 12, 64, ("op", 4, 8192))),
    (2, ("8B, 4096 words", 3, 8, ("none", 1, 4096))),
    (4, ("8B", 3, 64, ("op", 2, 2048))),
    (4, ("8B, 4096 words", 5, 32, ("2", 1, 4096))),
    (4, ("8B, 4096 words", 6, 2, ("none", 1, 2048))),
    (4, ("70B, 4096 words", 12, 8, ("op", 1, 8192))),
    (4, ("qwen3/14B", 4, 64, ("op", 2, 4096))),
    (8, ("8B, 4096 words", 4, 64, ("full", 2, 8192))),
    (8, ("8B, 4096 words", 4, 64, ("2", 2, 8192))),
    (8, ("8B, 4096 words", 6, 1, ("full", 1, 4096))),
    (8, ("70B, 4096 words", 3, 16, ("none", 1, 4096))),
    (8, ("70B, 4096 words", 8, 8, ("full", 4, 4096))),
    (8, ("405B", 3, 64, ("op", 1, 8192))),
    (8, ("405B, 4096 words", 2, 64, ("full", 1, 8192))),
    (8, ("qwen3/32B", 4, 8, ("full", 1, 8192))),
    (16, ("debugmodel", 6, 16, ("full", 8, 2048))),
]


@pytest.mark.parametrize(("degree", "case"), CUT_FEW, ids=str)
def test_m9_under_tensor_parallel(degree: int, case: Case) -> None:
    with fake_world(WORLD * degree):
        check(case, degree)


@pytest.mark.matrix
@pytest.mark.parametrize(("degree", "case"), CUT_GRID, ids=str)
def test_m9_over_degree_depth_width_checkpointing_and_micro_batch(degree: int, case: Case) -> None:
    with fake_world(WORLD * degree):
        check(case, degree)


DEEP = [
    ("8B", 10, 8, ("full", 1, 4096)),
    ("8B, 4096 words", 9, 16, ("none", 1, 2048)),
]
DEEP_GRID = [
    ("8B", 32, 8, ("full", 1, 8192)),
    ("8B", 32, 64, ("op", 2, 4096)),
    ("8B", 16, 2, ("none", 1, 4096)),
    ("8B", 13, 32, ("2", 1, 4096)),
    ("8B", 20, 64, ("none", 1, 2048)),
    ("8B, 4096 words", 24, 8, ("full", 4, 4096)),
    ("8B, 4096 words", 12, 4, ("op", 1, 4096)),
    ("8B, 4096 words", 16, 64, ("2", 2, 2048)),
    ("70B", 16, 8, ("full", 1, 4096)),
    ("70B", 16, 64, ("none", 1, 1024)),
    ("70B", 11, 32, ("op", 2, 4096)),
    ("405B", 8, 16, ("full", 1, 4096)),
    ("debugmodel", 24, 16, ("full", 8, 2048)),
    ("debugmodel", 12, 4, ("none", 8, 2048)),
]


def extrapolate(case: Case, degree: int = 1) -> None:
    """Two shallow traces over the whole fake world against the full depth over some of it."""
    flavor, num_layers, partition_size, work = case
    shallow = (
        traced(flavor, depth, WORLD, work, degree=degree) for depth in depths_for(num_layers)
    )
    depths = Depths(*shallow)
    full = traced(*case, degree=degree)
    ours = depths.peak(num_layers, partition_size, full.shard_numel)["Total"]
    true = full.moments["peak"]["Total"]
    print(
        f"{case}: two depths {ours / 2**20:.0f} MiB, full depth {true / 2**20:.0f} MiB, "
        f"{ours / true - 1:+.4%}"
    )
    assert abs(ours - true) <= 0.001 * true


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", DEEP, ids=str)
def test_m7_two_depths_tell_the_full_depth(
    case: Case,
) -> None:
    extrapolate(case)


@pytest.mark.matrix
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", DEEP_GRID, ids=str)
def test_m7_over_depth_width_partition_size_checkpointing_and_micro_batch(
    case: Case,
) -> None:
    extrapolate(case)


@pytest.mark.parametrize("degree", [2, 8])
def test_m7_under_tensor_parallel(degree: int) -> None:
    with fake_world(WORLD * degree):
        extrapolate(("8B, 4096 words", 9, 16, ("full", 1, 4096)), degree)
