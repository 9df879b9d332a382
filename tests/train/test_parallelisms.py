"""With each parallelism of torchtitan, and with pairs: MiCS trains what torchtitan's trainer does.

8 ranks, 2 replicas, nodes of 2 ranks, so that partition groups span nodes. What of the matrix has
been run is in docs/parallelisms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("torchtitan")
import torch
from harness.late import hold_back
from harness.ranks import RanksFailed
from torchtitan.trainer import Trainer
from train.small_run import SMALL_STEPS, Trained, ours, torchtitans, trained_by

from mics_dtensor.layout import Layout
from mics_dtensor.train.config import Mics
from mics_dtensor.train.optimizer import SlicedOptimizers
from mics_dtensor.train.trainer import MicsTrainer

Maker = Callable[[Trainer.Config, Layout], Trainer]
NEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
BACKENDS = ["partial_dtensor", "full_dtensor"]  # beside spmd_types, which torch 2.14 has by default
SCHEDULES = ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
SCHEDULES += ["ZBVZeroBubble", "DualPipeV"]
PARALLELISMS = {
    "tensor": ("--parallelism.tensor_parallel_degree=2",),
    "context": ("--parallelism.context_parallel_degree=2", "--training.seq_len=256"),
    "expert": ("--parallelism.expert_parallel_degree=2",),
    "pipeline": ("--parallelism.pipeline_parallel_degree=2",),
}
PAIRS = [f"{a}+{b}" for a, b in combinations(PARALLELISMS, 2)]


def marked(names: list[str]) -> list[Any]:
    """Pairs with experts, and all pairs on the newer torch, are left to the matrix."""
    left = {name: [pytest.mark.matrix] for name in names if NEW or "expert" in name}
    if NEW:
        left["expert+pipeline"].append(
            pytest.mark.xfail(
                raises=RanksFailed,
                reason="torchtitan's own trainer, where torch infers the shapes of a stage: "
                "ProcessGroupGloo::alltoall: invalid tensor size",
            )
        )
    return [pytest.param(name, marks=left.get(name, ())) for name in names]


COMMON = (
    "--training.steps=3",
    "--mics.partition_size=none",
    "--parallelism.data_parallel_replicate_degree=2",
)


def options(names: str, *, batch: int = 2) -> list[str]:
    """The small run with the parallelisms of "tensor+expert" on 8 ranks, 2 micro-steps."""
    chosen = names.split("+")
    made = [*COMMON, *(option for name in chosen for option in PARALLELISMS.get(name, ()))]
    # Experts are spread over the ranks that there are; the others leave half of them to read text.
    readers = 8 // 2 ** len(set(chosen) & {"tensor", "context", "pipeline"})
    batch = batch if "pipeline" in chosen else 1
    made.append(f"--training.local_batch_size={batch}")
    made.append(f"--training.global_batch_size={readers * batch * 2}")
    if "expert" in chosen:
        made += ["--model.name=train.tiny_experts", "--model.flavor=qwen3", SMALL_STEPS]
    return [*made, "--model.n_layers=2"]


def with_node_local_backward(config: Trainer.Config, layout: Layout) -> MicsTrainer:
    return ours(config, layout, Mics(node_local_backward=True))


def with_optimizer_over_replicas(config: Trainer.Config, layout: Layout) -> MicsTrainer:
    sliced = SlicedOptimizers.Config(
        param_groups=config.optimizer.param_groups, implementation=config.optimizer.implementation
    )
    return ours(replace(config, optimizer=sliced), layout)


def with_late_slices(config: Trainer.Config, layout: Layout) -> MicsTrainer:
    """Updated slices travel beside the next forward, and arrive when they are waited for."""
    hold_back(pytest.MonkeyPatch())  # for the life of this rank
    sliced = SlicedOptimizers.Config(
        param_groups=config.optimizer.param_groups,
        implementation=config.optimizer.implementation,
        overlap_update=True,
    )
    return ours(replace(config, optimizer=sliced), layout, Mics(overlap_update=True))


@cache
def expected_of(*overrides: str) -> Trained:
    """By torchtitan's own trainer; once for all that is compared with it."""
    with TemporaryDirectory() as folder:
        return trained_by(torchtitans, Path(folder), *overrides, world_size=8)


def equal(folder: Path, *overrides: str, by: Maker = ours) -> None:
    """The law: the same losses and norms, by torchtitan's own trainer and by ours."""
    # In worlds of their own: torchtitan keeps the meshes of spmd_types for the whole process.
    expected, got = expected_of(*overrides), trained_by(by, folder, *overrides, world_size=8)
    assert len(got.losses) == 3
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)
    assert SMALL_STEPS in overrides or got.losses[-1] < got.losses[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_alone(tmp_path: Path, name: str) -> None:
    equal(tmp_path, *options(name))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", marked(PAIRS))
def test_in_pairs(tmp_path: Path, names: str) -> None:
    equal(tmp_path, *options(names))


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.skipif(not NEW, reason="torch 2.13 has partial_dtensor alone, which the others run")
@pytest.mark.parametrize("names", [*PARALLELISMS, *PAIRS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(tmp_path: Path, backend: str, names: str) -> None:
    if backend == "full_dtensor" and "context" in names:
        pytest.skip("torch's find_min_cost_path, of torchtitan's own trainer: no forward in 280 s")
    equal(tmp_path, *options(names), f"--parallelism.spmd_backend={backend}")


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", PARALLELISMS)
def test_node_local_backward(tmp_path: Path, names: str) -> None:
    """torch: "Resharding to smaller mesh is not supported for DTensor parameters yet"."""
    if names in ("tensor", "expert") or (NEW and names == "context"):
        with pytest.raises(RanksFailed, match="node_local_backward needs plain") as failed:
            trained_by(with_node_local_backward, tmp_path, *options(names), world_size=8)
        assert all(f"rank {rank} of 8 failed" in str(failed.value) for rank in range(8))
    else:
        equal(tmp_path, *options(names), by=with_node_local_backward)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", PARALLELISMS)
def test_optimizer_states_over_the_replicas(tmp_path: Path, names: str) -> None:
    equal(tmp_path, *options(names), by=with_optimizer_over_replicas)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", PARALLELISMS)
def test_updated_slices_beside_the_forward(tmp_path: Path, names: str) -> None:
    equal(tmp_path, *options(names), by=with_late_slices)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(tmp_path: Path, schedule: str) -> None:
    made = [*options("pipeline", batch=4), "--model.n_layers=4"]
    equal(tmp_path, *made, f"--parallelism.pipeline_parallel_schedule={schedule}")
