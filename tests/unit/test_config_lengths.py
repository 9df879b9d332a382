"""Laws of sizes: what the model is cut into holds for sequences of validation as of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load


def explained(folder: Path, *arguments: str) -> int:
    path = folder / "run.toml"
    path.write_text("[training]\nseq_len = 512\n[validation]\nseq_len = 256\n")
    return main(["explain", str(path), "--world-size=8", "--ranks-per-node=8", *arguments])


TENSOR = ("--parallelism.tensor_parallel_degree=8", "--loss.num_chunks=1")
CONTEXT = ("--parallelism.context_parallel_degree=2",)
SLICES = ("--loss.num_chunks=16",)
WANTS = {
    (): "loss.num_chunks, not given, is 8, which does not divide",
    SLICES: "loss.num_chunks is 16, which does not divide",
    TENSOR: "is not a multiple of 8, as wanted by tensor_parallel_degree 8",
    CONTEXT: "is not a multiple of 256, as wanted by context_parallel_degree 2, whose masks",
}


@pytest.mark.parametrize(
    ("arguments", "table", "uneven", "even"),
    [
        ((), "validation", 36, 32),
        (SLICES, "training", 520, 512),
        (SLICES, "validation", 40, 32),
        (TENSOR, "training", 516, 512),
        (TENSOR, "validation", 36, 32),
        (CONTEXT, "training", 576, 512),
        (CONTEXT, "validation", 64, 256),
        (CONTEXT, "validation", 320, 256),
    ],
)
def test_a_sequence_that_cannot_be_cut_is_refused_with_one_that_can(
    tmp_path: Path,
    arguments: tuple[str, ...],
    table: str,
    uneven: int,
    even: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = (*arguments, "--validation.enable")
    assert explained(tmp_path, *given, f"--{table}.seq_len={uneven}") == 2
    said = capsys.readouterr().err
    assert WANTS[arguments] in said
    assert f"{table}.seq_len {uneven}" in said
    assert f"seq_len = {even}" in said
    assert explained(tmp_path, *given, f"--{table}.seq_len={even}") == 0


def test_what_is_not_validated_is_not_looked_at(tmp_path: Path) -> None:
    assert explained(tmp_path, "--validation.seq_len=33") == 0
    assert explained(tmp_path, "--validation.seq_len=33", "--validation.enable") == 2


@pytest.mark.parametrize(("chunks", "length"), [(8, 36), (6, 33), (5, 33)])
def test_the_number_of_slices_that_is_named_fits_both(
    tmp_path: Path, chunks: int, length: int
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nseq_len = 120\n[validation]\nenable = true\n")
    given = ["--config-file", str(path), f"--validation.seq_len={length}"]
    with pytest.raises(ConfigError) as refused:
        load([*given, f"--loss.num_chunks={chunks}"])
    load([*given, f"--loss.num_chunks={str(refused.value).rpartition(' = ')[2]}"])


def test_slices_that_are_not_given_are_those_of_the_training(tmp_path: Path) -> None:
    """7 tokens to a rank of tensor parallel: one slice, for validation as well."""
    even = ("--parallelism.tensor_parallel_degree=2", "--training.seq_len=14")
    assert explained(tmp_path, *even, "--validation.enable", "--validation.seq_len=10") == 0


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_pipeline_validates_with_the_batch_that_its_schedule_is_made_for(
    tmp_path: Path, schedule: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[training]\nlocal_batch_size = 4\n[validation]\nenable = true\n"
        f"[parallelism]\npipeline_parallel_schedule = '{schedule}'\n"
    )

    def start(*arguments: str) -> None:
        run = load(["--config-file", str(path), *arguments])
        resolve(run, world_size=8, local_world_size=8)

    pipeline = "--parallelism.pipeline_parallel_degree=2"
    for size in (2, 3, 8):
        batch = f"--validation.local_batch_size={size}"
        start(batch)
        start(pipeline, batch, "--validation.no-enable")
        with pytest.raises(ConfigError, match=r"write validation.local_batch_size = 4$"):
            start(pipeline, batch)
    start(pipeline, "--validation.local_batch_size=4")
