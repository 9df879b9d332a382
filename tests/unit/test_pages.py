"""What the README and the pages tell people to type works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.train.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLANS = ("mics plan ", "mics explain ")
TRAINS = "-m mics_dtensor.train "


def blocks(language: str) -> list[str]:
    fences = re.compile(rf"^```{language}\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return [block for page in PAGES for block in fences.findall(page.read_text(encoding="utf-8"))]


def commands() -> list[str]:
    """The lines of all shell blocks, joined where they go on."""
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(" ".join(line.split()) for line in lines))


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder as a reader has it: the checkout, and the files that pages write."""
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    for block in blocks("toml"):
        if "[cluster]" in block:
            (tmp_path / "my_cluster.toml").write_text(block)
        if "# From ds_config.json" in block:
            (tmp_path / "run.toml").write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(PLANS)])
def test_a_command_of_the_planner_runs(
    command: str, at_the_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert at_the_root.exists()
    assert main(shlex.split(command, comments=True)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in commands() if TRAINS in c])
@pytest.mark.usefixtures("at_the_root")
def test_a_run_that_is_started_has_a_file_and_known_keys(command: str) -> None:
    load(shlex.split(command.split(TRAINS)[1], comments=True))


def test_the_cluster_of_the_page_is_read(at_the_root: Path) -> None:
    assert cluster(str(at_the_root / "my_cluster.toml")).origin == "measured"


def test_there_are_commands() -> None:
    assert sum(command.startswith(PLANS) for command in commands()) >= 4
    assert sum(TRAINS in command for command in commands()) >= 3
