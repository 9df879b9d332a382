"""`mics plan --write`: the file is the same file afterwards, but for the lines that are said."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tomlkit")
from mics_dtensor.cli import main
from mics_dtensor.train.load import load

TEXT = '# ours\n[model]\nname = "llama3"\nflavor = "8B"\n\n[training]\nseq_len = 4096  # short\n'


def write(path: Path) -> None:
    ask = ["plan", "--config-file", str(path), "--cluster", "p4d", "--nodes", "2", "--write"]
    assert main([*ask, "--training.global_batch_size", "32"]) == 0
    assert load(["--config-file", str(path)]).config.training.global_batch_size == 32


def test_a_link_stays_a_link_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "kept" / "run.toml", tmp_path / "link.toml"
    target.parent.mkdir()
    target.write_text(TEXT)
    target.chmod(0o640)
    link.symlink_to(Path("kept") / "run.toml")
    write(link)
    assert link.is_symlink()
    assert "global_batch_size = 32" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.rglob("*.new")) == []


def test_a_file_that_nobody_may_write_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    path.chmod(0o444)
    ask = ["plan", "--config-file", str(path), "--cluster", "p4d", "--nodes", "2", "--write"]
    assert main([*ask, "--training.global_batch_size", "32"]) == 2
    said = f"--write: {path} is not to be written (mode 444); chmod u+w {path}, or give another"
    assert said in capsys.readouterr().err
    assert path.read_text() == TEXT


def test_a_mark_of_utf_8_before_the_file_is_read_over_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT, encoding="utf-8-sig")
    write(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"\ufeff{TEXT[:5]}")
    assert text.count("\ufeff") == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_as_they_did(tmp_path: Path, end: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT, newline=end)
    write(path)
    text = path.read_bytes().decode()
    assert text.startswith(TEXT.partition("seq_len")[0].replace("\n", end))
    assert text.count("\n") == text.count(end)
    assert text.count("\r") == text.count("\r\n")
    assert "global_batch_size = 32" in text
