"""One run writes into a checkpoint folder; what is left of a killed one is in nobody's way."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mics_dtensor.checkpoint.commit import begin, partial_of
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.owner import NAME, Claim, Owner, Process
from mics_dtensor.errors import CheckpointError

TAKEN = """
import sys
from pathlib import Path
from mics_dtensor.checkpoint.owner import Owner
Owner().take(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""
ELSEWHERE = Process(host="elsewhere", boot="another", pid=1, started="1")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has taken the folder and lives on."""
    argv = [sys.executable, "-c", TAKEN, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        yield process
        process.kill()


def owner_of(folder: Path) -> Process:
    return Process(**json.loads((folder / NAME).read_text())["process"])


def test_a_second_run_on_this_host_is_refused_until_the_first_is_dead(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    mine = Owner()
    for ask in (mine.take, mine.refuse_busy):
        with pytest.raises(CheckpointError, match=f"written by process {other.pid} of .*, which"):
            ask(tmp_path)
    assert owner_of(tmp_path).pid == other.pid
    other.send_signal(signal.SIGKILL)
    while owner_of(tmp_path).is_alive:  # not waited for: it stays in the table of processes
        pass
    assert other.returncode is None
    mine.take(tmp_path)
    assert owner_of(tmp_path) == Process.here()
    mine.take(tmp_path)


@pytest.mark.parametrize("given", [ELSEWHERE, replace(Process.here(), boot="the one before")])
def test_what_cannot_be_told_from_here_is_taken_over_and_the_earlier_run_stops(
    tmp_path: Path, given: Process
) -> None:
    mine, place = Owner(), str(tmp_path)
    Claim(given, place).write(tmp_path)
    mine.refuse_busy(tmp_path)
    mine.take(tmp_path)  # as a restart after a crash there
    Claim(ELSEWHERE, place).write(tmp_path)
    partial_of(tmp_path / "step-9").mkdir()
    with pytest.raises(CheckpointError, match="taken over by process 1 of elsewhere, a later run"):
        begin(tmp_path / "step-3", mine)
    assert partial_of(tmp_path / "step-9").exists()  # theirs is not swept
    assert not partial_of(tmp_path / "step-3").exists()
    mine.release()
    assert owner_of(tmp_path) == ELSEWHERE
    Owner().take(tmp_path)  # this run, started again


def test_a_run_that_is_over_leaves_no_claim(tmp_path: Path) -> None:
    first, second = Owner(), Owner()
    first.take(tmp_path)
    second.take(tmp_path)  # of one process: they know of each other
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.release()


def test_a_pid_that_came_again_and_a_copied_folder_are_no_claim(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    shutil.copytree(tmp_path, tmp_path / "copy")
    Owner().take(tmp_path / "copy")
    Claim(replace(owner_of(tmp_path), started="1"), str(tmp_path)).write(tmp_path)
    Owner().take(tmp_path)
    assert other.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": {"pid": 1}, "folder": "x"}'])
def test_what_is_not_ours_to_read_is_no_claim(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    Owner().take(tmp_path)
    assert owner_of(tmp_path) == Process.here()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_ask(tmp_path: Path, other: subprocess.Popen[bytes], asynchronous: bool) -> None:
    torch = pytest.importorskip("torch")
    from mics_dtensor.checkpoint.saving import Saving
    from mics_dtensor.checkpoint.transfer import Keeping

    about = Manifest(step=1, contents="training", files=())
    saving = Saving(asynchronous=asynchronous)

    def save() -> None:
        values = {"w": torch.ones(2)}
        saving.save(lambda: values, tmp_path / "step-1", about=about, keeping=Keeping())
        saving.wait()

    for ask in (save, lambda: saving.refuse_busy(tmp_path)):
        with pytest.raises(CheckpointError, match=f"written by process {other.pid}"):
            ask()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    other.kill()
    other.wait()
    save()
    assert owner_of(tmp_path) == Process.here()
    saving.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
