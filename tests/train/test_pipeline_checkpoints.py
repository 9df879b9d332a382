"""A stage of a pipeline has a part of the model alone, and a checkpoint all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import torch
from harness.checkpointed import stored
from harness.ranks import run_on_ranks
from train.resumed_run import ENABLED, at_the_end, pass_on, trained
from train.small_run import configured, ours

from mics_dtensor.errors import CheckpointError

# 2026-11: torchtitan 0.3.0 asks a scheduler for its rate outside of step() when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
MODEL = ("--model.n_layers=2",)
STAGES = (*MODEL, "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2")
ONE = "--mics.partition_size=1"
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
TENSOR, SLICES = "--parallelism.tensor_parallel_degree=2", "--mics.optimizer_over_replicas=true"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(4, (ONE,), id="replicas"),
        pytest.param(
            4, (ONE, INTERLEAVED, "--model.n_layers=4"), id="schedule", marks=pytest.mark.matrix
        ),
        pytest.param(8, (TENSOR, SLICES, ONE), id="slices", marks=pytest.mark.matrix),
    ],
)
def test_a_pipeline_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    (tmp_path / "straight").mkdir()
    straight = trained(tmp_path / "straight", *STAGES, *options, steps=4, ranks=ranks)
    trained(tmp_path, *STAGES, *options, steps=2, ranks=ranks)
    second = trained(tmp_path, *STAGES, *options, steps=4, ranks=ranks)
    assert list(second) == ["3", "4", "tokens"]
    assert second == {step: straight[step] for step in second}
    assert at_the_end(tmp_path, 4) == at_the_end(tmp_path / "straight", 4)


@pytest.mark.timeout(600)
def test_what_leaves_a_pipeline_and_enters_another_is_what_was_saved(tmp_path: Path) -> None:
    trained(tmp_path, *STAGES, ONE, steps=2)
    saved = stored(tmp_path / "checkpoint" / "step-2")
    assert {name.split(".")[1] for name in saved if name.startswith("layers.")} == {"0", "1"}
    for step, (ranks, options) in enumerate(
        [(2, MODEL), (4, STAGES), (2, (*MODEL, ONE)), (2, (*STAGES, ONE))], start=3
    ):
        pass_on(tmp_path, *options, step=step, ranks=ranks, saved=saved)


@pytest.mark.timeout(300)
def test_a_pipeline_starts_from_a_seed_and_from_weights_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def seed() -> None:
        one = (*MODEL, ONE, "--mics.ranks_per_node=1", "--checkpoint.create_seed_checkpoint=true")
        trainer = ours(*configured(tmp_path, *ENABLED, *one))
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()

    def started(*options: str) -> None:
        trainer = ours(*configured(tmp_path, *ENABLED, *STAGES, ONE, *options))
        assert trainer.checkpointer.load(-1)
        assert trainer.step == 0
        trainer.close()
        held = trainer.checkpointer.states["model"].state_dict()
        seeded = stored(folder / "step-0")
        assert held
        for name, value in held.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, seeded[name]), name

    weights = f"--checkpoint.initial_load_path={folder / 'step-0'}"
    run_on_ranks(1, seed, timeout_s=100)
    run_on_ranks(4, started, timeout_s=100)
    run_on_ranks(4, lambda: started("--checkpoint.folder=other", weights), timeout_s=100)


@pytest.mark.timeout(300)
def test_another_model_is_refused_with_the_same_words_on_every_rank(tmp_path: Path) -> None:
    trained(tmp_path, *STAGES, ONE, steps=1)

    def body() -> None:
        for more, words in (
            ("--model.n_layers=3", r"another model: it lacks layers.2.attention.*20 more"),
            ("--model.n_layers=1", r"another model: it also has layers.1.attention.*20 more"),
        ):
            alone = ("--parallelism.pipeline_parallel_degree=1",) if more[-1] == "1" else ()
            trainer = ours(*configured(tmp_path, *ENABLED, *STAGES, ONE, more, *alone))
            with pytest.raises(CheckpointError, match=words):
                trainer.checkpointer.load(-1)
            trainer.close()

    run_on_ranks(4, body, timeout_s=100)
