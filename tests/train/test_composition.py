"""What torchtitan composes with data parallelism, from TOML: with MiCS the same run as without."""

from pathlib import Path
from typing import Any

import pytest
from harness.ranks import ranks, run_on_ranks

pytest.importorskip("torchtitan")
from torchtitan.tools import utils
from torchtitan.trainer import Trainer
from train.small_run import Trained, configured, ours, torchtitans, trained_by_each

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.train.trainer import refuse_cuda_graphs

SHORT = ("--training.steps=3", "--model.n_layers=3", "--training.global_batch_size=8")
CHECKPOINTING = {
    "none": ("--activation_checkpoint.mode=none",),
    "selective, by operator": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "selective, every second block": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=2",
    ),
    "full": ("--activation_checkpoint.mode=full",),
}

# Dynamo looks at the .grad of activations, of which torch warns.
OF_DYNAMO = pytest.mark.filterwarnings("default")


def both(folder: Path, *runs: tuple[str, ...]) -> list[tuple[Trained, Trained]]:
    """Each run by torchtitan's trainer and by ours, in worlds of their own."""
    made = [
        trained_by_each(make, folder, *[(*SHORT, *run) for run in runs])
        for make in (torchtitans, ours)
    ]
    return list(zip(*made, strict=True))


def assert_equal(expected: Trained, got: Trained, *, what: str = "") -> None:
    assert len(got.losses) == 3
    assert got.losses == pytest.approx(expected.losses, rel=1e-6), what
    assert got.norms == pytest.approx(expected.norms, rel=1e-5), what


@pytest.mark.timeout(400)
def test_activation_checkpointing(tmp_path: Path) -> None:
    """Each policy with MiCS as without; and no policy changes a number, nor the first weights."""
    runs = both(tmp_path, *CHECKPOINTING.values())
    (_, without), *_ = runs
    for (expected, got), policy in zip(runs, CHECKPOINTING, strict=True):
        assert_equal(expected, got, what=policy)
        assert_equal(without, got, what=policy)


@pytest.mark.timeout(300)
def test_cpu_offload(tmp_path: Path) -> None:
    ((expected, got), (_, on_device)) = both(tmp_path, ("--training.enable_cpu_offload=true",), ())
    assert_equal(expected, got)
    assert_equal(on_device, got)


@ranks(4, timeout_s=100)
def test_offloaded_shards_are_in_the_memory_of_the_host(tmp_path: Path) -> None:
    trainer = ours(*configured(tmp_path, "--training.enable_cpu_offload=true"))
    for part in trainer.model_parts:
        for parameter in part.parameters():
            assert parameter.device.type == "cpu"
    trainer.close()


def graphs_compiled() -> int:
    """By this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@OF_DYNAMO
@pytest.mark.timeout(300)
def test_compiled_blocks(tmp_path: Path) -> None:
    """One graph a kind of block: the boundary, which comes and goes, compiles nothing again."""

    def counted(config: Trainer.Config, layout: Layout) -> Trainer:
        trainer = ours(config, layout)
        step = trainer.train_step

        def train_step(batches: Any) -> None:
            before = graphs_compiled()
            step(batches)
            made = graphs_compiled() - before
            assert made > 0 if trainer.step == 1 else made == 0, (trainer.step, made)

        trainer.train_step = train_step
        return trainer

    compiled = (*SHORT, "--compile.enable=true", "--compile.backend=aot_eager")
    (expected,) = trained_by_each(torchtitans, tmp_path, compiled)
    (got,) = trained_by_each(counted, tmp_path, compiled)
    (eager,) = trained_by_each(ours, tmp_path, SHORT)
    assert_equal(expected, got)
    assert_equal(eager, got)


@OF_DYNAMO
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_compiled_blocks_by_inductor(tmp_path: Path) -> None:
    ((expected, got),) = both(tmp_path, ("--compile.enable=true",))
    assert_equal(expected, got)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_cuda_graphs_are_refused_with_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    def body() -> None:
        config, _ = configured(tmp_path, "--training.disable_cuda_graphs=false")
        monkeypatch.setattr(utils, "device_type", "cuda")
        topology = Topology.uniform(world_size=4, ranks_per_node=2)
        layout = Layout(topology=topology, partition_size=4 // num_replicas)
        if num_replicas == 1:  # one hop is all there is
            refuse_cuda_graphs(config, layout)
            return
        with pytest.raises(ConfigError, match="2 replicas: the second hop does not run under"):
            refuse_cuda_graphs(config, layout)

    run_on_ranks(2, body, timeout_s=100)
