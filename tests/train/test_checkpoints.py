"""The program resumes: bit for bit, on other numbers of ranks, or with a sentence why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import torch
import torch.distributed as dist
from harness.ranks import run_on_ranks
from torch.distributed.tensor import DTensor
from train.small_run import configured, ours

from mics_dtensor.checkpoint.commit import named
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.errors import CheckpointError
from mics_dtensor.train.trainer import MicsTrainer

# 2026-11: torchtitan 0.3.0 asks a scheduler for its rate outside of step() when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
ENABLED = (
    "--checkpoint.enable=true",
    "--checkpoint.interval=2",
    "--checkpoint.last_save_model_only=false",
    "--training.global_batch_size=8",
    "--lr_scheduler.decay_ratio=0.5",
)


def trained(folder: Path, *overrides: str, steps: int, ranks: int = 4) -> dict[str, list[float]]:
    """Of each step its loss, norm and learning rate; and the parameters and states at the end."""
    told = folder / "told.json"

    def body() -> None:
        config, layout = configured(folder, *ENABLED, *overrides)
        trainer = ours(config, layout)
        found: dict[str, list[float]] = {}
        log = trainer.metrics_processor.log

        def recorded(step: int, loss: float, max_loss: float, norm: float, **more: object) -> None:
            rate = trainer.lr_schedulers.schedulers[0].get_last_lr()[0]
            found[str(step)] = [loss, norm, rate]
            log(step, loss, max_loss, norm, **more)

        trainer.metrics_processor.log = recorded
        trainer.should_continue_training = lambda: trainer.step < steps
        trainer.train()
        found["end"] = sums(trainer)
        found["tokens"] = [trainer.ntokens_seen * trainer.dataloader.dp_world_size]
        trainer.close()
        if dist.get_rank() == 0:
            told.write_text(json.dumps(found))

    run_on_ranks(ranks, body, timeout_s=100)
    found: dict[str, list[float]] = json.loads(told.read_text())
    return found


def sums(trainer: MicsTrainer) -> list[float]:
    """Of every parameter and state: two sums that any change of a bit would change."""
    state = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    found = []
    for _, value in sorted(state.items()):
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if type(full) is torch.Tensor:
                weights = torch.arange(1, full.numel() + 1, dtype=torch.float64)
                found.append(float((full.double().view(-1) * weights).sum()))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.matrix), "async"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    option = f"--checkpoint.async_mode={mode}"
    (tmp_path / "straight").mkdir()
    straight = trained(tmp_path / "straight", option, steps=6)
    first = trained(tmp_path, option, steps=4)
    assert first.items() <= {**straight, "end": first["end"], "tokens": first["tokens"]}.items()
    manifest = Manifest.read(tmp_path / "checkpoint" / "step-4")
    assert manifest.tokens == 4 * 8 * 32
    assert manifest.layout == {
        "world_size": 4,
        "ranks_per_node": 2,
        "partition_size": 2,
        "tensor_parallel_size": 1,
    }
    assert manifest.data == {"lanes": 4, "sequences": 32}
    second = trained(tmp_path, option, steps=6)
    assert list(second) == ["5", "6", "end", "tokens"]
    assert second == {step: straight[step] for step in second}


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_other_ranks_on_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    straight = trained(tmp_path / "straight", steps=6)
    trained(tmp_path, steps=2)
    over = "--mics.optimizer_over_replicas=true"
    second = trained(tmp_path, "--mics.partition_size=1", over, steps=4, ranks=2)
    third = trained(tmp_path, "--mics.partition_size=4", steps=6)
    for step in ("3", "4", "5", "6"):
        # Sums of floats in another order: all else, and above all the samples, is the same.
        its = {**second, **third}[step]
        assert its == pytest.approx(straight[step], rel=1e-5), step
        assert its[2] == straight[step][2]
    assert third["tokens"] == straight["tokens"]


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_what_cannot_be_resumed_from_is_said(tmp_path: Path) -> None:
    weights = ("--checkpoint.last_save_model_only=true", "--training.steps=3")
    trained(tmp_path, *weights, "--checkpoint.keep_latest_k=2", steps=3)
    found = named(tmp_path / "checkpoint")
    assert list(found) == [2, 3]
    assert Manifest.read(found[3]).contents == "model"

    def body() -> None:
        def refused(words: str, *overrides: str) -> None:
            trainer = ours(*configured(tmp_path, *ENABLED, *overrides))
            with pytest.raises(CheckpointError, match=words):
                trainer.train()
            trainer.close()

        refused("step-3 holds weights alone: .*write checkpoint.load_step = 2. .*initial_load_path")
        refused("step-9 does not exist", "--checkpoint.load_step=9")
        refused("another model", "--checkpoint.load_step=2", "--model.n_layers=2")
        trainer = ours(*configured(tmp_path, *ENABLED, "--checkpoint.load_step=2"))
        trainer.checkpointer.load(2)
        assert (trainer.step, trainer.dataloader.position["sequences"]) == (2, 16)
        trainer.step = 7
        assert trainer.checkpointer.save_now(7)
        assert Manifest.read(tmp_path / "checkpoint" / "step-7").contents == "training"
        trainer.close()
        start = f"--checkpoint.initial_load_path={tmp_path / 'checkpoint' / 'step-3'}"
        trainer = ours(*configured(tmp_path, *ENABLED, "--checkpoint.folder=other", start))
        trainer.checkpointer.load(-1)
        assert trainer.step == 0
        trainer.close()

    run_on_ranks(4, body, timeout_s=100)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    straight = trained(tmp_path, "--mics.checkpoint_placement=partition_group", steps=6)
    steps = named(tmp_path / "checkpoint")
    assert list(steps) == [2, 4, 6]
    names = {file.name for file in Manifest.read(steps[6]).files}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    (steps[6] / "__1_0.distcp").write_bytes(b"")
    again = trained(tmp_path, steps=6)
    assert list(again) == ["5", "6", "end", "tokens"]
    assert again == {step: straight[step] for step in again}
