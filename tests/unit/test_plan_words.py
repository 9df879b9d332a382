"""What `mics plan` says beside its numbers: the question, notes, what would help, whence."""

import json
from pathlib import Path

import pytest

from mics_dtensor.cli import main

CONFIGS = Path(__file__).parents[2] / "train_configs"
FILE = CONFIGS / "llama3_8b_2x8.toml"
LARGE = CONFIGS / "llama3_70b_16x8.toml"
ON = ("--cluster", "p4de", "--training.global_batch_size", "64", "--as-written")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, file: Path = FILE) -> str:
    assert main(["plan", "--config-file", str(file), *ON, *arguments]) == 0
    return capsys.readouterr().out


def test_the_batch_the_ranks_and_the_micro_steps_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = planned(capsys, "--nodes", "2")
    assert "(p4de), 16 ranks: 64 sequences of 8192 tokens a step, 4 a GPU" in told
    assert "  b1 x 4 op" in told
    assert " (4 micro-steps, micro-batch 1, " in told
    read = json.loads(planned(capsys, "--nodes", "2", "--json"))
    assert (read["global_batch_size"], read["seq_len"], read["notes"]) == (64, 8192, [])


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (("--mics.overlap_boundary", "true"), "boundary"),
        (("--mics.optimizer_over_replicas", "true", "--mics.overlap_update", "true"), "update"),
    ],
)
def test_what_is_planned_as_if_off_is_noted(
    more: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note = f"mics.overlap_{name} = true is planned as if false: the column {name} is what it costs"
    for how in (("--nodes", "2"), ("--nodes", "2", "--scale", "1,2")):
        assert f"note: {note} at most\n" in planned(capsys, *how, *more)
        assert "note: " not in planned(capsys, *how)
        assert json.loads(planned(capsys, *how, *more, "--json"))["notes"] == [f"{note} at most"]
    auto = ("--mics.partition_size", "auto", "--mics.cluster", "p4de", *more)
    assert main(["explain", str(FILE), "--world-size", "16", *auto]) == 0
    assert f"note: {note}" in capsys.readouterr().out


def test_the_readme_says_what_its_two_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Section "Which partition size"."""
    answers = []
    for file, batch in ((LARGE, "4096"), (FILE, "8192")):
        ask = ("--nodes", "64", "--training.global_batch_size", batch, "--json")
        assert main(["plan", "--config-file", str(file), "--cluster", "p4de", *ask]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    found = []
    for answer in answers:
        best = answer["recommendation"]["variant"]
        row = next(row for row in answer["rows"] if row["variant"] == best)
        found.append((best["partition_size"], row["num_micro_steps"]))
    assert found == [(256, 2), (8, 16)]
    ties = [set(answer["recommendation"]["ties"]) for answer in answers]
    assert ties[0] == {"128", "512", "plain FSDP"}  # 512 is plain FSDP here
    assert ties[1] == set()


def test_where_one_size_alone_fits_there_is_no_next(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--cluster", "p5", "--nodes", "7", "--training.global_batch_size", "336")
    for more, fit in ((alone, 1), (("--nodes", "16", "--training.global_batch_size", "512"), 2)):
        read = json.loads(planned(capsys, *more, "--json", file=LARGE))
        fitting = [row for row in read["rows"] if row["fits"] and not row["variant"]["plain"]]
        assert min(len(fitting), 2) == fit
        margin, told = read["recommendation"]["margin"], planned(capsys, *more, file=LARGE)
        steps = sorted(row["time"]["step_s"] for row in fitting)
        assert margin == (None if fit == 1 else pytest.approx(steps[1] / steps[0] - 1))
        assert ("; no other partition size fits\n" in told) is (fit == 1)
        assert ("; the next takes " in told) is (fit == 2)


TEN = ("--cluster", "p4d", "--nodes", "10", "--training.global_batch_size", "320")
WRITTEN = ("--cluster", "p4d", "--nodes", "12", "--training.global_batch_size", "384")
LONG = ("--cluster", "p4d", "--nodes", "16", "--training.seq_len", "1000000")
BATCH_OF_4 = (*WRITTEN, "--as-written", "--training.local_batch_size", "4")
LARGEST = (
    *("--cluster", "p4de", "--nodes", "16", "--model.flavor", "405B", "--as-written"),
    *(
        "--activation_checkpoint.mode",
        "selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
)
LARGEST_BY_1 = (*LARGEST, "--training.global_batch_size", "128")
BY_8 = ("--training.global_batch_size", "1024", "--training.local_batch_size", "8")
AS_MANY = "with as many sequences a rank (global_batch_size 352)"
MORE_NODES = ("--nodes", "11", "--training.global_batch_size", "352")


@pytest.mark.parametrize(
    ("asked", "helps"),
    [
        (
            TEN,
            {
                f"11 nodes hold it, {AS_MANY}": MORE_NODES,
                "sequences of 4,096 tokens": ("--training.seq_len", "4096"),
            },
        ),
        (LONG, {"sequences of 8,192 tokens": ("--training.seq_len", "8192")}),
        (
            BATCH_OF_4,
            {
                "a micro-batch of 1": ("--training.local_batch_size", "1"),
                "sequences of 2,048 tokens": ("--training.seq_len", "2048"),
            },
        ),
        (
            (*WRITTEN, "--as-written", "--activation_checkpoint.mode", "none"),
            {"full activation checkpointing": ("--activation_checkpoint.mode", "full")},
        ),
        (
            (*BATCH_OF_4, "--activation_checkpoint.mode", "none"),
            {
                "a micro-batch of 1 with full activation checkpointing": (
                    "--training.local_batch_size=1",
                    "--activation_checkpoint.mode=full",
                ),
            },
        ),
        (
            LARGEST_BY_1,
            {
                "full activation checkpointing on 97 nodes, with as many sequences a rank "
                "(global_batch_size 776)": (
                    *("--activation_checkpoint.mode=full", "--nodes", "97"),
                    "--training.global_batch_size=776",
                ),
            },
        ),
        (
            (*LARGEST, *BY_8),
            {
                "full activation checkpointing and micro-batch 1 on 128 nodes, with as many "
                "sequences a rank (global_batch_size 8192)": (
                    *("--activation_checkpoint.mode=full", "--nodes", "128"),
                    *("--training.global_batch_size=8192", "--training.local_batch_size=1"),
                ),
            },
        ),
    ],
)
def test_what_would_help_does_and_nothing_else_is_named(
    asked: tuple[str, ...], helps: dict[str, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["plan", "--config-file", str(LARGE), *asked]
    assert main(ask) == 2
    said = capsys.readouterr().err
    assert said.partition("what would help: ")[2].strip() == "; ".join(helps)
    for help_ in helps.values():
        assert main([*ask, *help_]) == 0, help_
        capsys.readouterr()


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ((), 8),  # "node", as the file has it
        (("--mics.partition_size", "16"), 16),
        (("--parallelism.tensor_parallel_degree", "4"), 2),
        (("--mics.partition_size", "auto", "--mics.cluster", "p4de"), None),
        (("--mics.partition_size", "64"), None),
    ],
)
def test_the_row_of_the_files_own_size_is_marked(
    more: tuple[str, ...], size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, "--nodes", "2", *more)
    assert told.count(", as written  ") == (size is not None)
    assert f"\n{size}, as written  " in told or size is None
    assert ("note: mics.partition_size = 64, as written, is no size" in told) == ("64" in more)
    read = json.loads(planned(capsys, "--nodes", "2", *more, "--json"))
    marked = [row["variant"] for row in read["rows"] if row["as_written"]]
    assert [its["partition_size"] for its in marked] == [size] * (size is not None)
    assert not any(its["plain"] for its in marked)


def test_a_file_of_degrees_is_marked_and_refused_as_explain_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    degrees = "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = {}\n"
    head = "[model]\nflavor = '8B'\n[training]\nlocal_batch_size = 1\n[parallelism]\n"
    path.write_text(head + degrees.format(8))
    assert "\n8, as written  " in planned(capsys, "--nodes", "2", file=path)
    for shards, mics in ((4, ""), (8, "[mics]\npartition_size = 4\n")):
        path.write_text(head + degrees.format(shards) + mics)
        assert main(["plan", "--config-file", str(path), *ON, "--nodes", "2"]) == 2
        planned_ = capsys.readouterr().err.removeprefix("mics plan: ")
        assert main(["explain", str(path), "--world-size", "16", "--ranks-per-node", "8"]) == 2
        assert capsys.readouterr().err.removeprefix("mics explain: ") == planned_
