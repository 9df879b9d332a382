"""torchtitan's models of text: MiCS trains each as torchtitan's own trainer does.

2 replicas over nodes of 1 rank (8 ranks: of 2), so that partition groups span nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
from train.small_run import SMALL_STEPS, ours, torchtitans, trained_by

# What the experts of gpt_oss give is bf16, and is added to tokens of the same dtype alone.
IN_BF16 = "--training.mixed_precision_param=bfloat16"
COMMON = (
    "--mics.partition_size=none",
    "--parallelism.data_parallel_replicate_degree=2",
    "--training.steps=3",
)
ON_4_RANKS = (*COMMON, "--mics.ranks_per_node=1", "--training.global_batch_size=8")
ON_8_RANKS = (
    *COMMON,
    "--training.global_batch_size=16",
    "--parallelism.expert_parallel_degree=2",
)
# The smallest of each family; llama3, and qwen3 with experts, other tests of the program train.
TINY = {
    "qwen3": ("--model.name=qwen3", "--model.n_layers=1"),
    "deepseek_v3": ("--model.name=train.tiny_experts", "--model.flavor=deepseek_v3", SMALL_STEPS),
    "gpt_oss": ("--model.name=train.tiny_experts", "--model.flavor=gpt_oss", SMALL_STEPS, IN_BF16),
}
FLAVORS = {
    "llama3": ("--model.name=llama3",),
    "qwen3": ("--model.name=qwen3",),
    "qwen3 with experts": (  # 2 of 8 blocks: of 316 million parameters there would be 2 copies
        "--model.name=qwen3",
        "--model.flavor=debugmodel_moe",
        "--model.n_layers=2",
        SMALL_STEPS,
    ),
    "deepseek_v3": ("--model.name=deepseek_v3", SMALL_STEPS),
    "gpt_oss": ("--model.name=gpt_oss", SMALL_STEPS, IN_BF16),
}
WITH_EXPERTS = ("qwen3 with experts", "deepseek_v3", "gpt_oss")


def equal(folder: Path, *overrides: str, world_size: int) -> None:
    """The law: the same losses and norms, by torchtitan's own trainer and by ours."""
    expected, got = (
        # In worlds of their own: torchtitan keeps the meshes of spmd_types for the whole process.
        trained_by(make, folder, *overrides, world_size=world_size)
        for make in (torchtitans, ours)
    )
    assert len(set(got.losses)) == 3
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TINY)
def test_every_family(tmp_path: Path, name: str) -> None:
    equal(tmp_path, *ON_4_RANKS, *TINY[name], world_size=4)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FLAVORS)
def test_debug_flavors(tmp_path: Path, name: str) -> None:
    equal(tmp_path, *ON_4_RANKS, *FLAVORS[name], world_size=4)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_debug_flavors_with_their_experts_over_the_ranks(tmp_path: Path, name: str) -> None:
    equal(tmp_path, *ON_8_RANKS, *FLAVORS[name], "--model.n_layers=2", world_size=8)
