"""The program under our scripts: a rank is killed, a scheduler wants the machine back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
from train.small_run import SMALL
from train.test_crash import SAVING, losses, newest, ranks_of

from mics_dtensor.checkpoint.manifest import Manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
ROOT = Path(__file__).parents[2]
STEPS = 12
PYTHON = f"""#!/usr/bin/env bash
# A python that installs nothing, for scripts/venv.sh; under the name torchrun the real one.
case "$0" in */torchrun) exec "{sys.executable}" -m torch.distributed.run "$@" ;; esac
case "$*" in
    *"-m venv "*) mkdir -p "${{@: -1}}/bin" && touch "${{@: -1}}/pyvenv.cfg" &&
        cp "$0" "${{@: -1}}/bin/python" && cp "$0" "${{@: -1}}/bin/torchrun" ;;
    *importlib.metadata*) echo "torch==2.13.0" ;;
esac
"""


def written(folder: Path) -> Path:
    """The file of a run of `STEPS` steps on 2 ranks, two replicas, that saves after every step."""
    folder.mkdir(exist_ok=True)
    text = SMALL.replace("steps = 20", f"steps = {STEPS}")
    text = text.replace("ranks_per_node = 2\npartition_size = 2", "ranks_per_node = 1")
    text = text.replace("[mics]\n", "[mics]\npartition_size = 1\n")
    (folder / "run.toml").write_text(f'{text}{SAVING}[job]\ndump_folder = "{folder}"\n')
    return folder / "run.toml"


def started(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, **variables}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def torchrun(folder: Path, *options: str, more: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """scripts/torchrun.sh with 2 ranks."""
    launch = ["--standalone", "--nproc-per-node", "2", *options, "-m", "mics_dtensor.train"]
    command = [str(ROOT / "scripts" / "torchrun.sh"), *launch, "--config-file"]
    (folder.parent / "torchrun").write_text(
        f'#!/usr/bin/env bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    )
    (folder.parent / "torchrun").chmod(0o755)
    path = str(folder.parent / "torchrun")
    return started([*command, str(written(folder)), *more], folder, TORCHRUN=path)


def wait_for(there: Callable[[], bool], run: subprocess.Popen[bytes], folder: Path) -> None:
    deadline_s = time.monotonic() + 300
    while not there():
        assert run.poll() is None, (folder / "log").read_text()[-4000:]
        assert time.monotonic() < deadline_s, (folder / "log").read_text()[-4000:]
        time.sleep(0.02)


def ends_well(run: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        assert run.wait(400) == 0, (folder / "log").read_text()[-6000:]
    finally:
        end(run)


def end(run: subprocess.Popen[bytes]) -> None:
    """Whatever this test has started: torchrun has a process group of its own."""
    launched = ranks_of(run.pid) if run.poll() is None else []
    for process in [*(rank for each in launched for rank in ranks_of(each)), *launched]:
        os.kill(process, signal.SIGKILL)
    if run.poll() is None:
        run.kill()
        run.wait(20)


def steps_by_start(folder: Path) -> list[list[int]]:
    """Steps of metrics.jsonl, a list for each start of the program."""
    starts: dict[str, list[int]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        starts.setdefault(line["run_id"], []).append(line["step"])
    return list(starts.values())


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_torchrun_starts_the_ranks_again_and_they_resume(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir(), killed.mkdir()
    ends_well(torchrun(straight), straight)
    assert steps_by_start(straight) == [list(range(1, STEPS + 1))]
    run = torchrun(killed, "--max-restarts", "2")
    try:
        for number in range(2):  # rank 1, then rank 0, whose process also keeps torch's store
            goal = newest(killed) + 3
            wait_for(lambda goal=goal: newest(killed) >= goal, run, killed)
            (launcher,) = ranks_of(run.pid)
            before = ranks_of(launcher)
            assert len(before) == 2
            os.kill(before[1 - number], signal.SIGKILL)
            wait_for(lambda its=launcher, gone=before: not {*gone} & {*ranks_of(its)}, run, killed)
        ends_well(run, killed)
    finally:
        end(run)
    starts = steps_by_start(killed)
    assert len(starts) == 3  # nobody started it again but torchrun
    for earlier, later in pairwise(starts):
        assert 1 < later[0] <= earlier[-1] + 1  # from the last whole checkpoint
    assert starts[-1][-1] == STEPS
    assert losses(killed) == losses(straight)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_sigterm_to_the_training_script_saves_and_ends_with_status_0(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = written(folder)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    command = [str(ROOT / "scripts" / "train.sh"), "--training.steps=1000"]
    command += ["--checkpoint.interval=1000"]  # nothing is saved but for the signal
    run = started(
        command,
        folder,
        NGPU="2",
        CONFIG_FILE=str(file),
        PYTHON=str(tmp_path / "python"),
        MICS_VENV=str(tmp_path / "venv"),
    )
    try:
        wait_for((folder / "metrics.jsonl").exists, run, folder)
        run.send_signal(signal.SIGTERM)  # as a scheduler does: to the script alone
        ends_well(run, folder)
    finally:
        end(run)
    (steps,) = steps_by_start(folder)
    saved = folder / "checkpoint" / f"step-{steps[-1]}"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    manifest = Manifest.read(saved)
    manifest.check(saved)
    assert (manifest.step, manifest.contents) == (steps[-1], "training")
    assert steps[-1] < 1000


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_where_nothing_is_saved_sigterm_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = torchrun(folder, more=("--training.steps=1000", "--checkpoint.enable=false"))
    try:
        wait_for((folder / "metrics.jsonl").exists, run, folder)
        run.send_signal(signal.SIGTERM)
        assert run.wait(100) != 0
    finally:
        end(run)
    assert not (folder / "checkpoint").exists()
