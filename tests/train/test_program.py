import json
import os
from pathlib import Path

import pytest
from harness.ranks import ranks
from unit.test_plan_auto import measured_on

from mics_dtensor.train import launch
from mics_dtensor.train.program import main

DEBUG = Path(__file__).parents[2] / "train_configs" / "debug.toml"
FOUR = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--training.datasett=a", "did you mean training.dataset?"),
        ("--mics.partition_size=3", "partition_size 3 does not divide the 4 ranks of the world"),
        ("--mics.ranks_per_node=3", "ranks_per_node 3 does not divide the world size 4"),
        ("--parallelism.tensor_parallel_degree=8", "does not divide the 4 ranks of the world"),
        ("--training.global_batch_size=7", "global_batch_size 7 is not a multiple"),
    ],
)
def test_a_run_that_cannot_be_is_one_sentence_and_a_status(
    capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert main(["--config-file", str(DEBUG), override], FOUR) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_process_without_a_launcher_is_told_how_to_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config-file", str(DEBUG)], {}) == 1
    assert "torchrun --nproc-per-node 4" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_says_how_to_start_and_where_the_keys_are(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert main([word], {}) == 0
    said = capsys.readouterr()
    assert all(words in said.out for words in ("--config-file", "configuration.md", "mics explain"))
    assert said.err == ""
    assert main([word], FOUR | {"RANK": "1"}) == 0
    assert capsys.readouterr().out == ""


@ranks(2, torchrun=True)
def test_a_cluster_measured_on_other_devices_is_refused_on_every_rank(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    rank = os.environ["RANK"]
    file, told = tmp_path / f"cluster-{rank}.toml", tmp_path / f"told-{rank}.json"
    file.write_text(measured_on("NVIDIA A100-SXM4-80GB", ranks_per_node=2))
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(told)
    launch.WAIT_FOR_RANK_0_S = 0.0
    auto = ("--mics.partition_size=auto", f"--mics.cluster={file}", "--mics.ranks_per_node=2")
    flavor = ("--model.flavor=1B", "--training.global_batch_size=16")
    folder = f"--job.dump_folder={tmp_path}"
    assert main(["--config-file", str(DEBUG), *flavor, *auto, folder], os.environ) == 1
    message = json.loads(told.read_text())["message"]["message"]
    assert "was measured on NVIDIA A100-SXM4-80GB, and this run is on cpu" in message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("dump", "dump/in/it' is a file, or lies in one; name a folder"),
        ("tokenizer.json", "tokenizer.json cannot be read ("),
        ("tokenizer_config.json", "tokenizer_config.json cannot be read ("),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(
    tmp_path: Path, file: str, words: str
) -> None:
    pytest.importorskip("torchtitan")
    from mics_dtensor.train.tokenizer import train_once

    assets = tmp_path / "assets"
    train_once(["some text"], assets)
    (tmp_path / "dump" if file == "dump" else assets / file).write_text("no folder, and no JSON")
    dump = tmp_path / ("dump/in/it" if file == "dump" else "out")

    @ranks(2, torchrun=True)
    def refused() -> None:
        told = tmp_path / f"told-{os.environ['RANK']}.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(told)
        launch.WAIT_FOR_RANK_0_S = 0.0
        over = [f"--model.hf_assets_path={assets}", f"--job.dump_folder={dump}"]
        over += ["--training.global_batch_size=16", "--mics.ranks_per_node=2"]
        assert main(["--config-file", str(DEBUG), *over], os.environ) == 1
        assert words in json.loads(told.read_text())["message"]["message"]

    refused()
