"""The launchers, run with stand-ins for torchrun, srun and scontrol: what each rank is told."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TORCHRUN = """#!/usr/bin/env python3
# Writes down its arguments; then one rank in a session of its own, as torchrun's are.
import os, subprocess, sys
told = [f"{n}={os.environ[n]}" for n in ("FI_PROVIDER", "NCCL_SOCKET_IFNAME") if n in os.environ]
print("torchrun", *sys.argv[1:], *told, flush=True)
if "RANK_STATUS" not in os.environ:
    sys.exit(0)
sys.exit(subprocess.run([os.path.dirname(__file__) + "/rank"], start_new_session=True).returncode)
"""
RANK = """#!/usr/bin/env python3
import os, signal, time
def save(*_):
    os.write(1, b"saved\\n")
    os._exit(int(os.environ["RANK_STATUS"]))
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
time.sleep(60)
"""
SRUN = """#!/usr/bin/env bash
# Every node in turn, as tasks of it.
while [ "$1" != bash ]; do echo "srun $1"; shift; done
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames left,right" ] && printf 'left\\nright\\n'
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    texts = {"torchrun": TORCHRUN, "rank": RANK, "srun": SRUN, "scontrol": SCONTROL}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_by_hand_nodes_are_numbered_by_the_first_argument(stand_ins: dict[str, str]) -> None:
    done = run("launch/by_hand.sh", "1", "4", "left", "--config-file", "x.toml", **stand_ins)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "torchrun",
        "--signals-to-handle",
        "SIGINT,SIGHUP,SIGQUIT",
        "--nnodes",
        "4",
        "--node-rank",
        "1",
        "--nproc-per-node",
        "8",
        "--master-addr",
        "left",
        "--master-port",
        "29500",
        "-m",
        "mics_dtensor.train",
        "--config-file",
        "x.toml",
    ]


@pytest.mark.parametrize("given", [(), ("0", "2"), ("2", "2", "left"), ("one", "2", "left")])
def test_by_hand_what_cannot_be_is_refused(
    stand_ins: dict[str, str], given: tuple[str, ...]
) -> None:
    done = run("launch/by_hand.sh", *given, **stand_ins)
    assert done.returncode == 2
    assert "NODE_RANK" in done.stderr
    assert done.stdout == ""


def test_slurm_starts_a_torchrun_on_each_node_in_order(stand_ins: dict[str, str]) -> None:
    slurm = {
        "SLURM_JOB_NODELIST": "left,right",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "70001",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    done = run("launch/slurm.sh", "--config-file", "a b.toml", **stand_ins, **slurm)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("torchrun ")]
    for node, line in enumerate(lines):
        assert f"--nnodes 2 --node-rank {node} --nproc-per-node 4 --master-addr left " in line
        assert "--master-port 30001 " in line
        assert "-m mics_dtensor.train --config-file a b.toml" in line
        assert "FI_PROVIDER=efa NCCL_SOCKET_IFNAME=^docker,lo" in line
    assert len(lines) == 2
    assert "srun --ntasks-per-node" in done.stdout


def test_slurm_outside_of_a_job_says_how_to_start(stand_ins: dict[str, str]) -> None:
    done = run("launch/slurm.sh", **stand_ins)
    assert done.returncode == 2
    assert "sbatch --nodes N" in done.stderr


def test_every_setting_of_efa_and_nccl_has_its_reason() -> None:
    for line in (SCRIPTS / "launch" / "slurm.sh").read_text().splitlines():
        if re.match(r"export (FI|NCCL)_", line):
            assert re.search(r" # .{10,}", line), line


def test_the_manifest_starts_a_run_that_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((SCRIPTS / "launch" / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    kinds = manifest["spec"]["pytorchReplicaSpecs"]
    assert set(kinds) == {"Master", "Worker"}
    assert kinds["Master"]["replicas"] == 1
    assert kinds["Master"]["template"] == kinds["Worker"]["template"]
    pod = kinds["Master"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert [(ROOT / path.removeprefix("/app/")).exists() for path in container["command"]] == [True]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert str(gpus) == manifest["spec"]["nprocPerNode"]
    arguments = [each.replace("/app/", f"{ROOT}/") for each in container["args"]]
    assert arguments[:2] == ["-m", "mics_dtensor.train"]
    run, _ = resolve(load(arguments[2:]), world_size=2 * gpus, local_world_size=gpus)
    assert run.config.checkpoint.enable
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("status", [0, 3])
def test_sigterm_goes_to_the_ranks_and_their_status_comes_back(
    stand_ins: dict[str, str], status: int
) -> None:
    env = {**stand_ins, "RANK_STATUS": str(status)}
    command = [str(SCRIPTS / "torchrun.sh"), "-m", "x"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        told = [started.stdout.readline().strip() for _ in range(2)]
        os.kill(started.pid, signal.SIGTERM)
        assert told[1] == "ready"
        assert started.wait(30) == status
        assert started.stdout.read().strip() == "saved"


def test_hosts_whose_ranks_interleave_are_refused() -> None:
    config = load(["--config-file", str(ROOT / "train_configs" / "debug.toml")])
    with pytest.raises(ConfigError, match=r"consecutive; left holds \[0, 2\]\.\.\.: start the"):
        resolve(config, world_size=4, local_world_size=2, hosts=["left", "right"] * 2)
