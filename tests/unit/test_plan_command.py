"""`mics plan --scale`, `--plot` and `--write`, and the end of the command `mics`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

import pytest
from harness.questions import question

from mics_dtensor.cli import main
from mics_dtensor.cli.write import chosen_values, write_choice
from mics_dtensor.errors import PlanError
from mics_dtensor.plan.question import Variant
from mics_dtensor.plan.scaling import parse_nodes
from mics_dtensor.train.load import load

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"
ON = ("--cluster", "p4de", "--training.global_batch_size", "64", "--as-written")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, file: Path = FILE) -> str:
    """The one sentence on the error output."""
    assert main(["plan", "--config-file", str(file), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, file: Path = FILE) -> str:
    assert main(["plan", "--config-file", str(file), *ON, *arguments]) == 0
    return capsys.readouterr().out


def test_numbers_of_nodes() -> None:
    assert parse_nodes("1,2,4,...,64") == (1, 2, 4, 8, 16, 32, 64)
    assert parse_nodes("1, 3, ..., 20, 30") == (1, 3, 9, 20, 30)
    assert parse_nodes("5") == (5,)
    for wrong in (
        "",
        "0",
        "4,2",
        "1,...,8",
        "2,3,...,9",
        "1,2,...",
        "a",
        "1,2,..,4",
        "²",
        "1,2,...,²",
    ):
        with pytest.raises(PlanError, match="--scale"):
            parse_nodes(wrong)


def test_weak_scaling_agrees_with_single_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """64 sequences on 4 nodes are 2 a rank: on 2 nodes that is a batch of 32."""
    curves = json.loads(planned(capsys, "--nodes", "4", "--scale", "1,2,4", "--json"))
    assert curves["num_nodes"] == [1, 2, 4]
    speeds = curves["tokens_per_s_of_a_gpu"]
    for place, batch in ((1, "32"), (2, "64")):
        more = ("--nodes", str(2**place), "--json", "--training.global_batch_size", batch)
        alone = json.loads(planned(capsys, *more))
        gpus = 8 * 2**place
        by_size = {
            "plain FSDP" if row["variant"]["plain"] else str(row["variant"]["partition_size"]): row
            for row in alone["rows"]
        }
        for name in ("plain FSDP", "8", "16"):
            there = by_size[name]
            assert speeds[name][place] == pytest.approx(there["tokens_per_s"] / gpus)
    assert speeds["16"][0] is None  # one node has no such group
    assert "-" in planned(capsys, "--nodes", "4", "--scale", "1,2,4")


def test_without_nodes_the_batch_is_that_of_the_first_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = planned(capsys, "--scale", "2,4")
    note = "note: global_batch_size 64 is taken as meant for 2 nodes, the first of --scale; if "
    (said,) = (line for line in told.splitlines() if line.startswith(note))
    assert told.replace(f"{said}\n", "") == planned(capsys, "--scale", "2,4", "--nodes", "2")
    assert "8B, 8,030,261,248 parameters" in told
    assert "4 sequences of 8192 tokens a GPU and step, as 64 are on 2 nodes" in told
    assert "as 64 are on 1 node\n" in planned(capsys, "--scale", "1,2")
    by_rank = planned(capsys, "--scale", "1,2", "--training.global_batch_size", "-1")
    assert "note: " not in by_rank  # local_batch_size says how many, on any number of nodes
    few = planned(capsys, "--scale", "1,2,8", "--cluster", "p4d")
    assert "the first of --scale, where the model does not fit; if it is meant for others" in few
    assert "--scale 1,2,4" in refused(capsys, *ON)


WRITTEN = """\
# ours: keep me
[training]
seq_len = 4096  # short
local_batch_size = 8

[model]  # after training, on purpose
name = "llama3"
flavor = "8B"
"""


def test_what_is_recommended_is_written_and_the_rest_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("tomlkit")
    path = tmp_path / "run.toml"
    path.write_text(WRITTEN)
    ask = ["plan", "--config-file", str(path), "--cluster", "p4d", "--nodes", "2", "--write"]
    assert main([*ask, "--training.global_batch_size", "32"]) == 0
    said = capsys.readouterr().out
    text = path.read_text()
    for line in ("# ours: keep me", "seq_len = 4096  # short", "[model]  # after training"):
        assert line in text
    assert text.index("[training]") < text.index("[model]") < text.index("[mics]")
    config = load(["--config-file", str(path)]).config
    assert f"take partition_size = {config.mics.partition_size} " in said
    assert config.training.global_batch_size == 32
    assert config.mics.optimizer_over_replicas is False
    assert main(ask) == 0  # asked again, the file gives the same answer
    assert f"take partition_size = {config.mics.partition_size} " in capsys.readouterr().out


def test_what_is_written_is_what_was_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("tomlkit")
    path = tmp_path / "run.toml"
    path.write_text(WRITTEN)
    ask = ("--cluster", "p4d", "--nodes", "2", "--write", "--training.global_batch_size", "32")
    said = refused(capsys, *ask, "--training.seq_len", "512", file=path)
    assert "training.seq_len = 512 on the command line, but" in said
    assert path.read_text() == WRITTEN
    arguments = ["plan", "--config-file", str(path), *ask, "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)["done"]
    assert f"{path}: training.global_batch_size = 32 (was -1)" in told
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["done"] == [f"{path}: nothing to change"]


SLICED = """
[mics]
optimizer_over_replicas = true
master_weights = "sharded"
overlap_update = true
"""


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """Over all ranks slices cut nothing; without them what goes with slices goes too."""
    pytest.importorskip("tomlkit")
    asked_of_planner = question(num_nodes=2, global_batch=16)
    path = tmp_path / "run.toml"
    for size, cut in ((16, False), (8, False), (8, True)):
        path.write_text(WRITTEN + SLICED)
        asked = load(["--config-file", str(path)]).config
        variant = Variant(
            partition_size=size, micro_batch=1, checkpointing="full", optimizer_over_replicas=cut
        )
        write_choice(path, asked, chosen_values(asked_of_planner, variant))
        mics = load(["--config-file", str(path)]).config.mics
        kept = cut or size == 16
        assert mics.partition_size == size
        assert mics.optimizer_over_replicas is kept
        assert mics.overlap_update is kept
        assert mics.master_weights == ("sharded" if kept else "fp32")
    before, asked = path.read_text(), load(["--config-file", str(path)]).config
    with pytest.raises(PlanError, match=r"is as it was: .*training\.steps = 0"):
        write_choice(path, asked, {"training.steps": 0})
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[parallelism]\ntensor_parallel_degree = 16", "must divide n_kv_heads (8)"),
        ("[parallelism]\ncontext_parallel_degree = 2", "context_parallel_degree = 2: the planner"),
        ("[parallelism]\nexpert_parallel_degree = 2", "expert_parallel_degree = 2: the planner"),
        (
            "[parallelism]\ncontext_parallel_degree = 4\npipeline_parallel_degree = 2",
            "pipeline_parallel_degree = 2, parallelism.context_parallel_degree = 4: the planner",
        ),
        (
            "[optimizer]\nimplementation = 'fused_opt_states_bf16'",
            "--optimizer.implementation=fused",
        ),
        ("[optimizer]\nname = 'DistMuon'", "only AdamW is"),
        ("[training]\nenable_cpu_offload = true", "--training.enable_cpu_offload=false"),
        ("[training]\nglobal_batch_size = 0", "it must be -1, or 1 or more"),
    ],
)
def test_what_would_be_planned_as_if_without_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[model]\nflavor = '8B'\n{table}\n")
    for more in (("--nodes", "2"), ("--scale", "1,2"), ("--nodes", "2", "--as-written")):
        assert said in refused(capsys, "--cluster", "p4de", *more, file=path)


def test_more_nodes_than_anyone_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for many in (("--nodes", "100000000"), ("--scale", "1,10,...,100000000")):
        assert "000,000 ranks; the planner goes to 1,048,576" in refused(capsys, *ON, *many)
    large = ("--nodes", "16384", "--model.flavor", "405B", "--training.global_batch_size", "131072")
    said = refused(capsys, "--cluster", "p3dn", *large, "--training.seq_len", "131072")
    assert "does not fit 16384 nodes of p3dn in any partition" in said


def test_converted_products_are_refused_and_can_be_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    converted = ("--model.converters=quantize.linear.float8",)
    rowwise = ("--quantize.linear.float8.recipe_name=rowwise",)
    assert "--model.converters=" in refused(capsys, *ON, "--nodes", "2", *converted, *rowwise)
    without = planned(capsys, "--nodes", "2", *converted, *rowwise, "--model.converters=")
    assert without == planned(capsys, "--nodes", "2")


def test_a_degree_that_contradicts_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("tomlkit")
    path = tmp_path / "run.toml"
    text = WRITTEN + "[parallelism]\ndata_parallel_shard_degree = 4\n"
    path.write_text(text)
    ask = ["plan", "--config-file", str(path), "--cluster", "p4d", "--nodes", "2", "--write"]
    assert main([*ask, "--training.global_batch_size", "32"]) == 2
    said = "data_parallel_replicate_degree 1 x data_parallel_shard_degree 4 is not the 16 ranks"
    assert said in capsys.readouterr().err
    assert path.read_text() == text
    path.write_text(text + "data_parallel_replicate_degree = 4\n")
    assert main([*ask, "--training.global_batch_size", "32"]) == 2
    said = "data_parallel_replicate_degree = 4 and parallelism.data_parallel_shard_degree = 4,"
    assert said in capsys.readouterr().err


def test_a_node_of_another_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    debug = str(FILE.with_name("debug.toml"))
    assert main(["plan", "--config-file", debug, "--cluster", "p4d", "--nodes", "2"]) == 2
    assert "mics.ranks_per_node = 2 contradicts p4d" in capsys.readouterr().err
    few = ("--cluster", "p4d", "--nodes", "2", "--ranks-per-node", "4")
    said = refused(capsys, *few)
    assert "mics.ranks_per_node = 8 contradicts --ranks-per-node 4" in said
    assert "--mics.ranks_per_node=4 too" in said


def test_a_run_is_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a cluster file" in refused(capsys, "--cluster", str(FILE), "--nodes", "2")


MICS = "import sys; from mics_dtensor.cli import main; sys.exit(main())"


def shown(*arguments: str, to: IO[bytes] | int, **environment: str) -> CompletedProcess[bytes]:
    """`mics ...` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", MICS, *arguments],
        stdout=to,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(FILE.parents[1] / "src"), **environment},
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("--version",), ("explain", str(FILE))])
def test_an_output_that_takes_nothing_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = shown(*arguments, to=full)
    said = "mics: what is printed could not be written: No space left on device; send it elsewhere"
    assert (done.returncode, done.stderr.decode()) == (1, f"{said}\n")


def test_a_name_that_the_terminal_cannot_show_is_shown_in_escapes(tmp_path: Path) -> None:
    path = tmp_path / "größe.toml"
    path.write_text(WRITTEN)
    done = shown("explain", str(path), to=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe.toml" in done.stdout


def test_a_reader_that_has_read_enough_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = shown("explain", str(FILE), "--all", to=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
