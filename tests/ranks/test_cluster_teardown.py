"""Whatever ends the emulated cluster, nothing of it is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.cluster import Cluster, ClusterError, what_is_missing  # noqa: E402

WHY_NOT = what_is_missing() if sys.platform == "linux" else "network namespaces are Linux's"
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

LAUNCHER = """
import signal, subprocess, sys, time
from benchmarks.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began it with &
with Cluster(2, rate="400mbit") as cluster:
    inside = subprocess.Popen(cluster.command(1, ["sleep", "600"]), start_new_session=True)
    (cluster.folder / "socket").touch()
    print(inside.pid, cluster.folder, flush=True)
    time.sleep(600)
"""


def left_of(pid: int) -> list[str]:
    """Namespaces and links of the cluster that process `pid` made."""
    listed = [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
        for what in (["netns", "list"], ["-o", "link"])
    ]
    return [line for text in listed for line in text.splitlines() if f"mics{pid}" in line]


def eventually(holds: Callable[[], bool], *, timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if holds():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_killed_leaves_nothing(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        try:
            assert launcher.stdout is not None
            pid, folder = launcher.stdout.readline().split()
            inside = int(pid)
            assert len(left_of(launcher.pid)) >= 5  # two namespaces, a bridge, two links
            assert is_running(inside)
            assert Path(folder, "socket").exists()
            launcher.send_signal(number)
            assert eventually(lambda: not left_of(launcher.pid) and not is_running(inside))
            assert eventually(lambda: not Path(folder).exists())
        finally:
            launcher.kill()


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_leaves_no_file() -> None:
    command = [sys.executable, "-m", "benchmarks.emulated_cluster", "--nodes", "2"]
    with (
        tempfile.TemporaryDirectory() as folder,  # tmp_path is too long for a Unix socket
        subprocess.Popen(
            [*command, "--systems", "mics", "--dim", "64", "--repetitions", "1000", "--no-stages"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher,
    ):
        try:
            assert launcher.stderr is not None
            assert any(line.startswith("repetition 1:") for line in launcher.stderr)
            assert list(Path(folder).rglob("socket"))
            launcher.kill()
            assert eventually(lambda: not left_of(launcher.pid) and not any(Path(folder).iterdir()))
        finally:
            launcher.kill()


def test_an_error_inside_leaves_nothing() -> None:
    def fail() -> None:
        with cluster:
            assert left_of(os.getpid())
            (cluster.folder / "file").touch()
            raise RuntimeError("inside")

    cluster = Cluster(2, rate=None)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert not left_of(os.getpid())
    assert not cluster.folder.exists()


def test_an_error_while_it_is_made_leaves_nothing() -> None:
    cluster = Cluster(2, rate="no rate")
    with pytest.raises(ClusterError, match="tbf"), cluster:
        pass
    assert not left_of(os.getpid())
    assert not cluster.folder.exists()
