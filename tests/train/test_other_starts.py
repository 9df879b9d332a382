"""Starts that are no plain resume: back in time, from another folder, with few documents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import torch
import torch.distributed as dist
from harness.checkpointed import stored
from harness.ranks import ranks as on_ranks
from harness.ranks import run_on_ranks
from train.resumed_run import ENABLED, at_the_end, trained
from train.small_run import SMALL, configured, ours

from mics_dtensor.checkpoint.commit import aged, named
from mics_dtensor.errors import CheckpointError
from mics_dtensor.train import launch
from mics_dtensor.train.program import main

# 2026-11: torchtitan 0.3.0 asks a scheduler for its rate outside of step() when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
ALL = "--checkpoint.initial_load_model_only=false"


@pytest.mark.timeout(400)
def test_a_run_that_goes_back_keeps_what_it_writes_and_goes_on_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    straight = trained(tmp_path, steps=8)
    back = ("--checkpoint.load_step=2", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    again = trained(tmp_path, *back, "--training.steps=5", steps=5)
    assert list(again) == ["3", "4", "5", "tokens"]
    assert again["3"][0] == straight["3"][0]  # from step 2, on its samples
    assert list(named(folder)) == [4, 5]
    assert list(trained(tmp_path, steps=6)) == ["6", "tokens"]


@pytest.mark.timeout(400)
def test_what_it_left_stays_where_all_are_kept_and_is_not_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    trained(tmp_path, "--checkpoint.keep_latest_k=0", steps=6)
    back = ("--checkpoint.load_step=2", "--checkpoint.keep_latest_k=0")
    trained(tmp_path, *back, "--checkpoint.interval=1", steps=3)
    assert list(aged(folder)) == [2, 4, 6, 3]
    assert list(trained(tmp_path, "--checkpoint.keep_latest_k=0", steps=4)) == ["4", "tokens"]
    assert list(aged(folder)) == [2, 6, 3, 4]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [4, 3, pytest.param(8, marks=pytest.mark.matrix), 2])
def test_all_of_a_run_goes_on_elsewhere_as_it_would_have_in_its_folder(
    tmp_path: Path, ranks: int
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    trained(there, "--training.global_batch_size=24", steps=2)
    saved = stored(there / "checkpoint" / "step-2")
    path = f"--checkpoint.initial_load_path={there / 'checkpoint' / 'step-2'}"
    batch = "--training.global_batch_size=24"
    shape = (batch, f"--mics.partition_size={ranks}", f"--mics.ranks_per_node={ranks}")

    def loads() -> None:
        trainer = ours(*configured(here, *ENABLED, path, ALL, *shape))
        assert trainer.checkpointer.load(-1)
        assert trainer.step == 2
        assert trainer.dataloader.position == {"lanes": 4, "sequences": 48}
        assert trainer.ntokens_seen * ranks == 48 * 32
        assert trainer.checkpointer.save_now(2)
        trainer.close()

    run_on_ranks(ranks, loads, timeout_s=100)
    its = stored(here / "checkpoint" / "step-2")
    assert its.keys() == saved.keys()
    assert all(torch.equal(its[name], value) for name, value in saved.items())
    there_on = trained(there, *shape, steps=4, ranks=ranks)
    assert trained(here, *shape, path, ALL, steps=4, ranks=ranks) == there_on
    assert at_the_end(here, 4) == at_the_end(there, 4)


@pytest.mark.timeout(300)
def test_weights_alone_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    weights = ("--checkpoint.last_save_model_only=true", "--training.steps=1")
    trained(tmp_path, *weights, steps=1, saves_last=False)
    path = f"--checkpoint.initial_load_path={tmp_path / 'checkpoint' / 'step-1'}"

    def body() -> None:
        given = (*ENABLED, "--checkpoint.folder=other", path, ALL)
        trainer = ours(*configured(tmp_path, *given))
        with pytest.raises(CheckpointError, match="holds weights alone: write initial_load_model_"):
            trainer.checkpointer.load(-1)
        trainer.close()
        assert not (tmp_path / "other").exists()

    run_on_ranks(2, body, timeout_s=100)


@pytest.mark.timeout(400)
def test_a_run_that_goes_on_needs_a_document_for_each_rank_that_it_first_had(
    tmp_path: Path,
) -> None:
    text = tmp_path / "three.jsonl"
    text.write_text("".join(f'{{"text": "{word} {"and more " * 40}"}}\n' for word in "abc"))
    (tmp_path / "run.toml").write_text(
        SMALL.replace('dataset = "python_docs"', f'dataset_path = "{text}"')
        + '[checkpoint]\nenable = true\nlast_save_model_only = false\n[job]\ndump_folder = "'
        + f'{tmp_path}/out"\n'
    )

    def started(ranks: int, *over: str) -> str:
        """What the program says when it stops; "" where it ends well."""
        told = tmp_path / f"told-{len(list(tmp_path.iterdir()))}.json"

        @on_ranks(ranks, torchrun=True, timeout_s=100)
        def body() -> None:
            os.environ["TORCHELASTIC_ERROR_FILE"] = f"{told}-{os.environ['RANK']}"
            launch.WAIT_FOR_RANK_0_S = 0.0
            given = ["--config-file", str(tmp_path / "run.toml"), *over]
            status = main(given, os.environ)
            assert status == Path(os.environ["TORCHELASTIC_ERROR_FILE"]).exists()
            if status and dist.is_initialized():
                dist.barrier()

        body()
        files = list(tmp_path.glob(f"{told.name}-*"))
        said = {json.loads(file.read_text())["message"]["message"] for file in files}
        assert len(files) in (0, ranks)
        assert len(said) <= 1
        return said.pop() if said else ""

    one = "--mics.partition_size=1"
    few = "three.jsonl' holds 3 documents, fewer than the 4 data-parallel ranks"
    assert few + ", each" in started(4, one, "--training.steps=1")
    assert not (tmp_path / "out" / "checkpoint").exists()
    assert started(2, one, "--training.steps=1") == ""
    assert started(4, one, "--training.steps=2") == ""
    assert list(named(tmp_path / "out" / "checkpoint")) == [1, 2]
    anew = "--checkpoint.exclude_from_loading=dataloader"
    assert few + ", each" in started(4, one, "--training.steps=3", anew)
    text.write_text(text.read_text().splitlines()[0])
    said = started(4, one, "--training.steps=3")
    assert "holds 1 documents, fewer than the 2 data-parallel ranks that the run first had" in said
    assert "begin the data anew" in said
