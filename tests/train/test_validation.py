"""Validation during training: on shipped text, on local files, to the end of unequal data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch.distributed as dist
from torchtitan.trainer import Trainer
from train.small_run import configured, ours, torchtitans, trained_by_each

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Layout
from mics_dtensor.train.text import python_docs, training_docs, validation_docs

SHORT = ("--training.steps=4", "--training.global_batch_size=8")
VALIDATED = (
    *SHORT,
    "--validation.enable=true",
    "--validation.steps=3",
    "--validation.freq=2",
    "--validation.seq_len=16",
    "--validation.local_batch_size=2",
)


def records_validation(trainer: Trainer, folder: Path) -> Trainer:
    """Rank 0 writes what the ranks agreed on beside what is trained."""
    log = trainer.metrics_processor.log_validation

    def recorded(loss: float, step: int, **more: Any) -> None:
        if dist.get_rank() == 0:
            with (folder / "told").open("a") as file:
                file.write(json.dumps([step, loss]) + "\n")
        log(loss, step, **more)

    trainer.metrics_processor.log_validation = recorded
    return trainer


@pytest.mark.timeout(300)
def test_validation_with_mics_equals_validation_without(tmp_path: Path) -> None:
    losses, trained = {}, {}
    for make in (torchtitans, ours):
        folder = tmp_path / make.__name__
        folder.mkdir()

        def made(config: Trainer.Config, layout: Layout, make: Any = make, to: Any = folder) -> Any:
            return records_validation(make(config, layout), to)

        (trained[make],) = trained_by_each(made, folder, VALIDATED)
        losses[make] = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    assert [step for step, _ in losses[ours]] == [1, 2, 4]
    for (step, expected), (_, got) in zip(losses[torchtitans], losses[ours], strict=True):
        assert got == pytest.approx(expected, rel=1e-6), step
    assert trained[ours].losses == pytest.approx(trained[torchtitans].losses, rel=1e-6)
    assert losses[ours][-1][1] < losses[ours][0][1]
    folder = tmp_path / "ours" / "made-0"
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert [[line["step"], line["loss"]] for line in lines] == losses[ours]
    assert {(line["schema"], line["run_id"]) for line in lines} == {(1, "test")}
    # It is looking on alone: the run without it has the same losses.
    (without,) = trained_by_each(ours, tmp_path, SHORT)
    assert without == trained[ours]


def test_no_text_of_the_validation_is_trained_on() -> None:
    assert {*training_docs(), *validation_docs()} == set(python_docs())
    assert not set(training_docs()) & set(validation_docs())


@ranks(4, timeout_s=100)
def test_the_shipped_text_is_validated_on_its_held_out_part(tmp_path: Path) -> None:
    config, _ = configured(tmp_path, *VALIDATED)
    assert config.validator.dataloader.dataset == "python_docs_validation"
    config, _ = configured(tmp_path, *VALIDATED, "--validation.dataset=c4_validation")
    assert config.validator.dataloader.dataset == "c4_validation"


@ranks(4, timeout_s=100)
def test_all_of_a_local_file_is_read_though_ranks_hold_unequal_parts(tmp_path: Path) -> None:
    """9 documents on 4 ranks, of which one holds a third: 3 batches where others hold 2."""
    path = tmp_path / "held_out.jsonl"
    if dist.get_rank() == 0:
        text = re.sub(r"\s+", " ", " ".join(validation_docs()))
        documents = [text[start : start + 400] for start in range(0, 9 * 400, 400)]
        path.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    dist.barrier()
    whole = (f"--validation.dataset_path={path}", "--validation.steps=-1")
    config, layout = configured(tmp_path, *VALIDATED, *whole, "--validation.local_batch_size=1")
    trainer = ours(config, layout)
    held: list[int] = []
    forward = trainer.validator.post_dataloading_process

    def counted(*batch: Any) -> Any:
        held.append(1)
        return forward(*batch)

    trainer.validator.post_dataloading_process = counted
    trainer.validator.validate(trainer.model_parts, step=1)
    everyone = [0] * 4
    dist.all_gather_object(everyone, len(held))
    assert len(set(everyone)) == 1
    assert everyone[0] > 0
    trainer.close()


@ranks(4, timeout_s=100)
def test_data_too_small_for_one_batch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    if dist.get_rank() == 0:
        path.write_text('{"text": "few"}\n' * 4)
    dist.barrier()
    whole = (f"--validation.dataset_path={path}", "--validation.steps=-1")
    trainer = ours(*configured(tmp_path, *VALIDATED, *whole))
    with pytest.raises(ConfigError, match="do not hold one batch for each data-parallel rank"):
        trainer.validator.validate(trainer.model_parts, step=1)
    trainer.close()
