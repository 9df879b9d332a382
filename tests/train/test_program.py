from pathlib import Path

import pytest

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
