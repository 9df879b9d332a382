"""The program under torchrun, killed and started again: it goes on by itself, and ends the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
from train.small_run import SMALL, entries_but_read_ahead

from mics_dtensor.checkpoint.commit import named
from mics_dtensor.checkpoint.manifest import Manifest

STEPS, RANKS = 16, 4
SAVING = """
[checkpoint]
enable = true
interval = 1
keep_latest_k = 3
last_save_model_only = false
async_mode = "async"
"""


def started(folder: Path) -> subprocess.Popen[bytes]:
    """Torchrun with 4 ranks, two replicas of two, in a session of its own."""
    folder.mkdir(exist_ok=True)
    text = SMALL.replace("steps = 20", f"steps = {STEPS}")
    (folder / "run.toml").write_text(text + SAVING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "mics_dtensor.train", "--config-file", str(folder / "run.toml")]
    command += [f"--job.dump_folder={folder}"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def ranks_of(launcher: int) -> list[int]:
    """The process ids of the ranks that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def newest(folder: Path) -> int:
    return max(named(folder / "checkpoint"), default=0)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}  # the last one counts


def ends_well(run: subprocess.Popen[bytes], folder: Path, timeout_s: float = 400) -> None:
    assert run.wait(timeout_s) == 0, (folder / "log").read_text()[-4000:]


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.timeout(3000)
def test_killed_five_times_it_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    ends_well(started(straight), straight)
    chance = random.Random(3)
    for number in range(5):
        run, before = started(killed), newest(killed)
        try:
            deadline_s = time.monotonic() + 400
            while newest(killed) < before + 2:
                assert run.poll() is None, (killed / "log").read_text()[-4000:]
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            time.sleep(chance.random() * 0.3)
            ranks = ranks_of(run.pid)
            assert len(ranks) == RANKS
            for rank in ranks if number % 2 else ranks[chance.randrange(RANKS) :][:1]:
                os.kill(rank, signal.SIGKILL)
            assert run.wait(120) != 0
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        for path in named(killed / "checkpoint").values():
            Manifest.read(path).check(path)
    assert before + 2 < STEPS
    ends_well(started(killed), killed)
    assert losses(killed) == losses(straight)
    ends = [
        entries_but_read_ahead(run / "checkpoint" / f"step-{STEPS}") for run in (killed, straight)
    ]
    assert ends[0] == ends[1]  # to the last byte
    assert list(named(killed / "checkpoint")) == [STEPS - 2, STEPS - 1, STEPS]
