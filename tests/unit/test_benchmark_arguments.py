"""Commands of benchmarks/ refuse in a sentence what they cannot do, before anything is made."""

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.arguments import result_file
from benchmarks.emulated_cluster import parse

WRITERS = {
    "emulated_cluster": "--json",
    "scaling": "--json",
    "crossover": "--json",
    "blocks": "--json",
    "checkpoints": "--json",
    "sharded_memory": "--json",
    "planner.__main__": "--json",
    "planner.step_times": "--out",
}
RATES = ("emulated_cluster", "scaling", "crossover", "blocks", "planner.step_times")

NO_RATES = ("0mbit", "1.2.3mbit", "7.9kbit", "301gbit", ".mbit", "400", "1mb")
Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refused:
    """What a command says of arguments that it refuses; nothing may be started or written."""

    def starts(*_: object, **__: object) -> None:
        raise AssertionError("it started something")

    def of(module: str, *arguments: str) -> str:
        main = import_module(f"benchmarks.{module}").main
        monkeypatch.setattr(subprocess, "Popen", starts)
        monkeypatch.setattr(os, "fork", starts)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before
        told = capsys.readouterr()
        assert told.out == ""
        return told.err.splitlines()[-1].partition("error: argument ")[2]

    return of


@pytest.mark.parametrize("module", WRITERS)
def test_results_that_could_not_be_written(module: str, refused: Refused, tmp_path: Path) -> None:
    option = WRITERS[module]
    missing = tmp_path / "missing"
    assert refused(module, option, str(missing / "x.json")) == (
        f"{option}: {missing / 'x.json'} cannot be written, since {missing} is no folder; make it, "
        "or give another"
    )
    assert refused(module, option, str(tmp_path)) == (
        f"{option}: {tmp_path} is a folder; give a file, as {tmp_path / 'results.json'}"
    )


def test_a_file_may_be_new_or_there_or_behind_a_link_and_is_not_made(tmp_path: Path) -> None:
    old, new, link = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "link.json"
    old.write_text("{}")
    link.symlink_to(tmp_path / "missing" / "x.json")
    assert result_file(str(old)) == old
    assert result_file(str(new)) == new
    with pytest.raises(ArgumentTypeError, match=f"since {tmp_path / 'missing'} is no folder"):
        result_file(str(link))
    with pytest.raises(ArgumentTypeError, match=f"since {old} is no folder"):
        result_file(str(old / "x.json"))
    with pytest.raises(ArgumentTypeError, match="file name too long"):
        result_file(str(tmp_path / ("x" * 300)))
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert old.read_text() == "{}"


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old.json"
    old.touch()
    shut = {old, tmp_path}
    monkeypatch.setattr(os, "access", lambda path, _: path not in shut)  # root may write all
    with pytest.raises(ArgumentTypeError, match=f"since {old} is not yours to write"):
        result_file(str(old))
    with pytest.raises(ArgumentTypeError, match=f"since {tmp_path} is not yours to write"):
        result_file(str(tmp_path / "new.json"))


@pytest.mark.parametrize("module", RATES)
@pytest.mark.parametrize("rate", NO_RATES)
def test_rates_that_tc_does_not_hold_to(module: str, rate: str, refused: Refused) -> None:
    said = refused(module, "--rate", rate)
    assert said.startswith(f"--rate: {rate}; give 8kbit to 300gbit, as 400mbit")
    assert said.endswith(", or unlimited") == (module == "emulated_cluster")


@pytest.mark.parametrize("rate", ["8kbit", "0.5mbit", "400mbit", "300gbit"])
def test_rates_that_it_does(rate: str) -> None:
    assert parse(["--rate", rate])[0].rate == rate
    assert parse(["--rate", "unlimited"])[0].rate is None


WHOLE = "give a whole number of 1 or more"
COUNTS = (
    *("nodes", "ranks-per-node", "micro-steps", "repetitions", "max-repetitions", "steps"),
    *("seq-len", "dim", "layers", "batch-size"),
)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two"])
def test_there_is_one_at_least_of_everything(name: str, value: str, refused: Refused) -> None:
    assert refused("emulated_cluster", f"--{name}", value) == f"--{name}: {value}; {WHOLE}"


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "long"])
def test_times_are_numbers_and_not_below_0(value: str, refused: Refused) -> None:
    assert refused("emulated_cluster", "--sleep-ms", value) == (
        f"--sleep-ms: {value}; give a number of 0 or more"
    )
    for timeout in ("0", value):
        assert refused("emulated_cluster", "--timeout", timeout) == (
            f"--timeout: {timeout}; give a number above 0"
        )


def test_what_is_left_out_is_as_help_says() -> None:
    run, path = parse([])
    assert path is None
    assert (run.num_nodes, run.rate, run.repetitions, run.max_repetitions) == (4, "400mbit", 5, 10)
    assert parse(["--max-repetitions", "1"])[0].max_repetitions == 1
    assert parse(["--sleep-ms", "0"])[0].workload["sleep_ms"] == 0
