"""`mics plan --plot`: the pictures, and what stands on them."""

from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.cli import main, plot
from mics_dtensor.cli.plan import run

pytest.importorskip("matplotlib")

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"
ASK = ("--config-file", str(FILE), "--cluster", "p4de", "--as-written")
BATCH = ("--training.global_batch_size", "128")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure as it is saved."""
    saved: list[Any] = []
    save = plot._save
    monkeypatch.setattr(plot, "_save", lambda figure, at: (saved.append(figure), save(figure, at)))
    return saved


def test_bars_have_a_title_room_and_marks(figures: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    told = run([*ASK, *BATCH, "--nodes", "8", "--plot", str(path)])
    assert f"{path}: drawn" in told
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,), (axes,) = figures, figures[0].axes
    assert figure.get_suptitle() == (
        "llama3 8B on 8 nodes of 8 A100-80GB (p4de): 128 sequences of 8192 tokens a step"
    )
    marks = [text.get_text() for text in axes.texts]
    assert marks.count("best") == told.count("  take this")
    assert marks.count("tie") == told.count("  tie: ") > 0
    assert set(marks) == {"best", "tie", ""}  # what does not fit has none
    highest = max(bar.get_y() + bar.get_height() for bar in axes.patches)
    assert axes.get_ylim()[1] > 1.05 * highest


def test_lines_have_a_title_room_and_plain_numbers(figures: list[Any], tmp_path: Path) -> None:
    run([*ASK, *BATCH, "--scale", "1,2,8", "--plot", str(tmp_path / "lines.png")])
    (figure,), (axes,) = figures, figures[0].axes
    assert figure.get_suptitle() == (
        "llama3 8B on nodes of 8 A100-80GB (p4de): 16 sequences of 8192 tokens a GPU and step"
    )
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16", "64"]
    assert axes.get_ylim()[1] > 1.05 * max(max(line.get_ydata()) for line in axes.lines)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in (tmp_path / "nowhere" / "a.png", tmp_path):
        assert main(["plan", *ASK, *BATCH, "--nodes", "2", "--plot", str(where)]) == 2
        assert f"--plot {where}" in capsys.readouterr().err
