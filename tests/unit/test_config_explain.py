"""`mics explain FILE`: no torch, no process group."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mics_dtensor.cli import main

DEBUG = str(Path(__file__).parents[2] / "train_configs" / "debug.toml")


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_values_are_shown_with_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    said = explained(capsys, DEBUG, "--world-size", "4", "--training.steps", "3")
    lines = [line.split("#")[1].strip() for line in said.splitlines() if line.startswith("steps ")]
    assert lines == ["command line"]
    filled = [line for line in said.splitlines() if line.startswith("data_parallel_shard_degree")]
    assert filled[0].endswith("# [mics] partition_size")
    assert "layers.*" in said


def test_json_holds_every_key_and_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(explained(capsys, DEBUG, "--world-size=4", "--json"))
    assert said["keys"]["training.seq_len"] == {"value": 128, "origin": f"file {DEBUG}"}
    plan = said["plan"]
    assert (plan["num_replicas"], plan["num_micro_steps"]) == (2, 4)
    # Inside a node nothing leaves it but the second hop: 2 (R - 1) / R of the model from each of
    # R = 2 replicas, in fp32, and the small message of agreement.
    hop = sum(s["inter_node_bytes"] for s in plan["stages"] if s["name"] == "boundary")
    assert hop == 2 * plan["num_parameters"] * 4


def test_json_has_no_number_that_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    """`max_norm = inf` clips nothing, and is a string there: only Python reads Infinity."""
    said = explained(capsys, DEBUG, "--world-size=4", "--json", "--training.max_norm=inf")
    told = json.loads(said, parse_constant=pytest.fail)
    assert told["keys"]["training.max_norm"]["value"] == "inf"


def test_a_chunked_loss_gathers_the_head_again(capsys: pytest.CaptureFixture[str]) -> None:
    def gathers(*arguments: str) -> int:
        said = json.loads(explained(capsys, DEBUG, "--world-size=4", "--json", *arguments))
        stages = said["plan"]["stages"]
        return sum(
            s["calls"] for s in stages if (s["unit"], s["name"]) == ("norm, lm_head", "gather")
        )

    assert gathers() == 2 * 4
    assert gathers("--loss.num_chunks=1") == 4


TWO_OF_8 = str(Path(DEBUG).with_name("llama3_8b_2x8.toml"))


def test_ranks_of_a_node_that_the_file_and_the_command_line_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ranks_per_node(file: str, *arguments: str) -> int:
        said = json.loads(explained(capsys, file, "--world-size=16", "--json", *arguments))
        return said["plan"]["ranks_per_node"]

    assert ranks_per_node(TWO_OF_8) == 8
    assert ranks_per_node(TWO_OF_8, "--ranks-per-node=8") == 8
    assert ranks_per_node(TWO_OF_8, "--ranks-per-node=4", "--mics.ranks_per_node=4") == 4
    unsaid = "--mics.ranks_per_node=none"
    assert ranks_per_node(TWO_OF_8, unsaid, "--ranks-per-node=4") == 4
    assert main(["explain", TWO_OF_8, "--world-size=16", "--ranks-per-node=4"]) == 2
    words = "mics.ranks_per_node = 8 contradicts --ranks-per-node 4; give --mics.ranks_per_node=4"
    assert words in capsys.readouterr().err
    # The same words as those of the planner.
    planned = ["plan", "--config-file", TWO_OF_8, "--cluster=p4d", "--nodes=2"]
    assert main([*planned, "--ranks-per-node=4"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks-per-node", "--world-size"])
@pytest.mark.parametrize("number", ["0", "-8"])
def test_no_ranks_are_no_world(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", TWO_OF_8, "--world-size=16", option, number]) == 2
    assert f"{option} {number}; give 1 or more" in capsys.readouterr().err


def test_one_node_is_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    one = (DEBUG, "--world-size=2", "--ranks-per-node=2", "--mics.ranks_per_node=2")
    assert "on 1 node of 2 ranks: 1 replica of 2 shards" in explained(capsys, *one)
    alone = explained(capsys, *one, "--mics.partition_size=1")
    assert "on 1 node of 2 ranks: 2 replicas of 1 shard" in alone


PIPELINE = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=GPipe",
)


@pytest.mark.parametrize("more", [(), PIPELINE], ids=["plain", "pipeline"])
def test_the_first_file_that_one_tries_can_validate(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = explained(capsys, DEBUG, "--world-size=4", "--validation.enable", *more)
    assert 'dataset = "python_docs_validation"' in said


def test_errors_are_one_sentence_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", DEBUG, "--training.stesp", "3"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "training.steps" in said.err


UNKNOWN = {
    ("--model.name=lama3",): '[model] name = "lama3" is unknown; did you mean llama3? choose from',
    ("--model.flavor=9B",): '[model] flavor = "9B" is no flavor of torchtitan.models.llama3;',
    ("--training.dataset=c5",): "training.dataset 'c5' is not known; choose from c4, c4_test",
    (
        "--validation.enable",
        "--validation.seq_len=128",
        "--validation.dataset=c5",
    ): "validation.dataset 'c5' is not known; choose from",
}


@pytest.mark.parametrize(("arguments", "said"), UNKNOWN.items(), ids=str)
def test_unknown_names_are_refused_as_at_start(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", DEBUG, "--world-size=4", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


def test_names_that_cannot_be_known_here_are_let_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = explained(capsys, DEBUG, "--world-size=4", "--model.name=my.model", "--model.flavor=any")
    assert "messages: no shapes of my.model are known" in own
    file = ("--training.dataset=c5", "--training.dataset_path=text.jsonl")
    assert "layers.*" in explained(capsys, DEBUG, "--world-size=4", *file)


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, torchtitan=None)\n"
        "from mics_dtensor.cli import main\n"
        f"sys.exit(main(['explain', {DEBUG!r}, '--world-size', '4']))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(DEBUG).parents[1] / "src")}
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env=env, stdout=subprocess.DEVNULL
    )


@pytest.mark.parametrize(("file", "size"), [("debug.toml", 4), ("llama3_100b_64x8.toml", 256)])
def test_without_a_world_the_smallest_with_two_replicas_is_assumed_and_said(
    file: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(Path(DEBUG).parent / file)
    said = explained(capsys, path)
    assumed = [line for line in said.splitlines() if line.startswith("assumed")]
    assert assumed == [f"assumed: {size} ranks in all (--world-size)"]
    plan = json.loads(explained(capsys, path, "--json"))["plan"]
    assert (plan["world_size"], plan["num_replicas"]) == (size, 2)
