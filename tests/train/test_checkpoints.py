"""The program resumes: bit for bit, on other numbers of ranks, or with a sentence why it cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import torch.distributed as dist
from harness.checkpointed import stored
from harness.ranks import ranks as on_ranks
from harness.ranks import run_on_ranks
from train.resumed_run import ENABLED, at_the_end, pass_on, trained
from train.small_run import configured, ours, train

from mics_dtensor.checkpoint.commit import named
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.errors import CheckpointError
from mics_dtensor.train.config import Mics

# 2026-11: torchtitan 0.3.0 asks a scheduler for its rate outside of step() when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.matrix), "async"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    option = f"--checkpoint.async_mode={mode}"
    (tmp_path / "straight").mkdir()
    straight = trained(tmp_path / "straight", option, steps=6)
    first = trained(tmp_path, option, steps=4)
    assert first.items() <= {**straight, "tokens": first["tokens"]}.items()
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
    assert list(second) == ["5", "6", "tokens"]
    assert second == {step: straight[step] for step in second}
    assert at_the_end(tmp_path, 6) == at_the_end(tmp_path / "straight", 6)


@on_ranks(2, timeout_s=120)
def test_a_run_that_is_done_says_so_and_what_to_raise(tmp_path: Path) -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger().setLevel(logging.INFO)
    assert len(train(ours, tmp_path, *ENABLED, "--training.steps=2").losses) == 2
    logging.getLogger().addHandler(handler := Kept(level=logging.INFO))
    assert train(ours, tmp_path, *ENABLED, "--training.steps=2").losses == []
    said = [line for line in lines if line.startswith("nothing to do: step 2 of 2; raise")]
    assert len(said) == (dist.get_rank() == 0)
    assert not any("Training" in line for line in lines)
    assert len(train(ours, tmp_path, *ENABLED, "--training.steps=3").losses) == 1
    assert sum("Loading the checkpoint" in line for line in lines) == 2  # once a run
    logging.getLogger().removeHandler(handler)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "options",
    [
        *([f"--mics.partition_size={size}"] for size in (1, 2, 4, 8)),
        ["--mics.partition_size=2", "--mics.optimizer_over_replicas=true"],
        ["--mics.partition_size=2", "--parallelism.tensor_parallel_degree=2"],
    ],
    ids=["1", "2", "4", "8", "slices", "tensor parallel"],
)
def test_eight_ranks_go_on_bit_for_bit(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "straight").mkdir()
    batch = "--training.global_batch_size=16"  # two micro-steps, or four
    straight = trained(tmp_path / "straight", batch, *options, steps=4, ranks=8)
    trained(tmp_path, batch, *options, steps=2, ranks=8)
    second = trained(tmp_path, batch, *options, steps=4, ranks=8)
    assert list(second) == ["3", "4", "tokens"]
    assert second == {step: straight[step] for step in second}
    assert at_the_end(tmp_path, 4) == at_the_end(tmp_path / "straight", 4)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_what_other_ranks_load_is_what_was_saved(tmp_path: Path) -> None:
    trained(tmp_path, steps=2)
    saved = stored(tmp_path / "checkpoint" / "step-2")
    assert any(name.endswith("exp_avg_sq") for name in saved)
    over, two = "--mics.optimizer_over_replicas=true", "--parallelism.tensor_parallel_degree=2"
    worlds = [(8, 1, over), (3, 3), (8, 2, two), (4, 4), (1, 1), (8, 2, over, two), (2, 1), (6, 2)]
    for step, (ranks, partition, *more) in enumerate(worlds, start=3):
        shape = [f"--mics.partition_size={partition}", f"--mics.ranks_per_node={ranks}"]
        pass_on(
            tmp_path,
            *("--training.global_batch_size=24", *shape, *more),
            step=step,
            ranks=ranks,
            saved=saved,
            position={"lanes": 4, "sequences": 16},
        )


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
        loss, norm, rate = {**second, **third}[step]
        assert loss == pytest.approx(straight[step][0], rel=1e-5), step
        assert norm == pytest.approx(straight[step][1], rel=1e-4), step
        assert rate == straight[step][2]
    assert third["tokens"] == straight["tokens"]


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_what_cannot_be_resumed_from_is_said(tmp_path: Path) -> None:
    weights = ("--checkpoint.last_save_model_only=true", "--training.steps=3")
    trained(tmp_path, *weights, "--checkpoint.keep_latest_k=2", steps=3, saves_last=False)
    found = named(tmp_path / "checkpoint")
    assert list(found) == [2, 3]
    assert Manifest.read(found[3]).contents == "model"

    def body() -> None:
        def refused(words: str, *overrides: str) -> None:
            trainer = ours(*configured(tmp_path, *ENABLED, *overrides))
            with pytest.raises(CheckpointError, match=words):
                trainer.train()
            trainer.close()

        refused("step-3 holds weights alone .*write checkpoint.load_step = 2. .*initial_load_path")
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
    straight = trained(tmp_path, mics=Mics(checkpoint_placement="partition_group"), steps=6)
    steps = named(tmp_path / "checkpoint")
    assert list(steps) == [2, 4, 6]
    names = {file.name for file in Manifest.read(steps[6]).files}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    (steps[6] / "__1_0.distcp").write_bytes(b"")
    again = trained(tmp_path, steps=6)
    assert list(again) == ["5", "6", "tokens"]
    assert again == {step: straight[step] for step in again}


def test_a_second_run_in_the_folder_is_refused_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    Owner().take(tmp_path / "checkpoint")  # by this process, which lives on

    def body() -> None:
        made = configured(tmp_path, *ENABLED)
        with pytest.raises(CheckpointError, match="which runs: stop one of the two, or give each"):
            ours(*made)

    run_on_ranks(4, body, timeout_s=100)
