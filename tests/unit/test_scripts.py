"""The two commands: what they install and when, what they pass on, what they refuse.

The interpreter is a stand-in that writes down what it is asked to do, so nothing is installed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/usr/bin/env bash
# A python and a torchrun that only write down their arguments.
case "$*" in
    *"-m pip --version"* | *version_info*) exit 0 ;;
    *"-m venv "*)
        mkdir -p "${@: -1}/bin"
        touch "${@: -1}/pyvenv.cfg"
        cp "$0" "${@: -1}/bin/python"
        cp "$0" "${@: -1}/bin/torchrun"
        ;;
    *importlib.metadata*) echo "torch==${FAKE_TORCH:-2.13.0+cpu}"; exit 0 ;;
esac
printf '%s' "$(basename "$0")" >>"$FAKE_LOG"
printf ' <%s>' "$@" >>"$FAKE_LOG"
printf '\\n' >>"$FAKE_LOG"
[ -z "${FAKE_FAIL:-}" ] || case "$*" in *"$FAKE_FAIL"*) exit 1 ;; esac
"""


class Checkout:
    """A copy of the scripts with a stand-in for python, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        (self.root / "train_configs").mkdir(parents=True)
        (self.root / "train_configs" / "debug.toml").touch()
        (self.root / "with a space.toml").touch()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.python = folder / "fake_python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.log = folder / "log"

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Run a script; `called` then has what it did."""
        self.log.write_text("")
        path = f"{self.root / 'bin'}:/usr/bin:/bin"  # nothing of this machine decides
        return subprocess.run(
            [str(self.root / "scripts" / script), *arguments],
            env={"PATH": path, "PYTHON": str(self.python), "FAKE_LOG": str(self.log), **variables},
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def called(self) -> list[str]:
        """The calls of the last run, the place of the environment left out."""
        return self.log.read_text().replace(str(self.root), "ROOT").splitlines()

    def add_gpu(self) -> None:
        """Put an nvidia-smi on the PATH that sees one GPU."""
        (self.root / "bin").mkdir()
        smi = self.root / "bin" / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
        smi.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


PIP = "python <-m> <pip> <install> <--quiet>"
HELD = "<--constraint> <ROOT/.venv/mics_dtensor.stamp/constraint.txt>"
MADE = ["fake_python <-m> <venv> <ROOT/.venv>", f"{PIP} <torch==2.13.0>"]
TORCHRUN = "torchrun <--signals-to-handle> <SIGINT,SIGHUP,SIGQUIT>"  # SIGTERM is for the ranks
LAUNCHED = (
    f"{TORCHRUN} <--standalone> <--nproc-per-node> <4> <-m> <mics_dtensor.train> "
    "<--config-file> <train_configs/debug.toml>"
)


def test_train_makes_the_environment_torch_first_and_launches(checkout: Checkout) -> None:
    done = checkout.run("train.sh")
    assert done.returncode == 0, done.stderr
    assert checkout.called == [*MADE, f"{PIP} {HELD} <--editable> <.[train]>", LAUNCHED]
    constraint = checkout.root / ".venv" / "mics_dtensor.stamp" / "constraint.txt"
    assert constraint.read_text() == "torch==2.13.0+cpu\n"


def test_a_second_run_installs_nothing_and_a_second_command_what_it_lacks(
    checkout: Checkout,
) -> None:
    checkout.run("train.sh")
    checkout.run("train.sh")
    assert checkout.called == [LAUNCHED]
    checkout.run("test.sh")
    assert checkout.called == [
        f"{PIP} {HELD} <--editable> <.[convert,plan,plot,test]>",
        "python <-m> <pytest>",
    ]
    checkout.run("train.sh")
    assert checkout.called == [LAUNCHED]


def test_another_torch_or_another_pyproject_is_installed_again(checkout: Checkout) -> None:
    checkout.run("test.sh")
    checkout.run("test.sh", TORCH_SPEC="torch==2.14.1", FAKE_TORCH="2.14.1")
    assert checkout.called[0] == f"{PIP} <torch==2.14.1>"
    assert len(checkout.called) == 3
    checkout.run("test.sh")  # and back
    assert checkout.called[0] == f"{PIP} <torch==2.13.0>"
    with (checkout.root / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    checkout.run("test.sh")
    assert len(checkout.called) == 3


@pytest.mark.parametrize("fails", ["torch==2.13.0", "--editable"])
def test_a_failed_installation_is_a_failure_and_is_tried_again(
    checkout: Checkout, fails: str
) -> None:
    assert checkout.run("train.sh", FAKE_FAIL=fails).returncode != 0
    assert LAUNCHED not in checkout.called
    assert checkout.run("train.sh").returncode == 0
    assert f"{PIP} {HELD} <--editable> <.[train]>" in checkout.called


def test_with_a_gpu_a_cuda_build_is_asked_for(checkout: Checkout) -> None:
    checkout.add_gpu()
    checkout.run("test.sh")
    assert f"{PIP} <torch>=2.13,<2.15>" in checkout.called


def test_the_number_of_ranks_the_file_and_the_overrides_are_passed_on(checkout: Checkout) -> None:
    overrides = ("--training.steps", "3", "--job.description", "two words")
    done = checkout.run("train.sh", *overrides, NGPU="8", CONFIG_FILE="with a space.toml")
    assert checkout.called[-1] == (
        f"{TORCHRUN} <--standalone> <--nproc-per-node> <8> <-m> <mics_dtensor.train> "
        "<--config-file> <with a space.toml> <--training.steps> <3> <--job.description> <two words>"
    )
    assert "--nproc-per-node 8 -m mics_dtensor.train" in done.stdout


def test_several_machines(checkout: Checkout) -> None:
    checkout.run("train.sh", TORCHRUN_ARGS="--nnodes 2 --node-rank 1")
    assert checkout.called[-1].startswith(f"{TORCHRUN} <--nnodes> <2> <--node-rank> <1> <--nproc-")


def test_pytest_arguments_are_passed_on(checkout: Checkout) -> None:
    checkout.run("test.sh", "tests/unit", "-k", "layout and not tp")
    assert checkout.called[-1] == "python <-m> <pytest> <tests/unit> <-k> <layout and not tp>"


def test_other_extras_for_the_tests_of_the_integrations(checkout: Checkout) -> None:
    checkout.run("test.sh", "tests/integrations", MICS_EXTRAS="integrations")
    assert checkout.called[-2:] == [
        f"{PIP} {HELD} <--editable> <.[integrations,test]>",
        "python <-m> <pytest> <tests/integrations>",
    ]


def test_another_place_for_the_environment(checkout: Checkout) -> None:
    checkout.run("train.sh", MICS_VENV=".venv-2.14")
    assert checkout.called[0] == "fake_python <-m> <venv> <ROOT/.venv-2.14>"
    assert not (checkout.root / ".venv").exists()


def test_an_older_torch_runs_the_tests_without_the_program(checkout: Checkout) -> None:
    older = {"TORCH_SPEC": "torch==2.11.0", "FAKE_TORCH": "2.11.0"}
    done = checkout.run("test.sh", **older)
    assert f"{PIP} {HELD} <--editable> <.[convert,plan,plot,test]>" in checkout.called
    assert "torchtitan 0.3.0 needs torch 2.13 or later" in done.stdout
    done = checkout.run("train.sh", **older)
    assert done.returncode == 2
    assert "TORCH_SPEC=torch==2.11.0: the program needs torch 2.13 or later" in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NGPU": "0"}, "NGPU=0 is not a number of ranks; give 1 or more"),
        ({"NGPU": "four"}, "NGPU=four is not a number of ranks; give 1 or more"),
        ({"NGPU": "-1"}, "NGPU=-1 is not a number of ranks; give 1 or more"),
        ({"CONFIG_FILE": "none.toml"}, "CONFIG_FILE=none.toml is not a file"),
        ({"MICS_VENV": "scripts"}, "scripts exists and is not a virtual environment"),
        ({"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python 3.11 or later"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    checkout: Checkout, variables: dict[str, str], said: str
) -> None:
    done = checkout.run("train.sh", **variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert checkout.called == []
    assert not (checkout.root / ".venv").exists()


def test_check_takes_no_other_argument(checkout: Checkout) -> None:
    done = checkout.run("check.sh", "--all")
    assert done.returncode == 2
    assert "check.sh takes --fix or nothing; got --all" in done.stderr


@pytest.mark.parametrize("script", ["train.sh", "test.sh", "check.sh"])
def test_the_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / "scripts" / script, os.X_OK)
