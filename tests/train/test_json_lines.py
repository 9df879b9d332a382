"""A file of lines grows by whole lines, on a full disk too."""

import json
import logging
from pathlib import Path

import pytest
from harness.crashing import disk_or_skip

from mics_dtensor.train import json_lines


def lines_of(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_lines_stand_behind_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    for step in range(3):
        json_lines.append(path, {"step": step})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_a_line_behind_half_a_line_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 0}\n{"step":')
    json_lines.append(path, {"step": 2})
    assert path.read_text() == '{"step": 0}\n{"step":\n{"step": 2}\n'


def test_on_a_full_disk_a_line_is_lost_whole_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with disk_or_skip(1 << 16) as folder:
        path, rest = folder / "a.jsonl", folder / "rest"
        json_lines.append(path, {"step": 0})
        with pytest.raises(OSError, match="No space"):
            rest.write_bytes(b"x" * (1 << 17))
        with caplog.at_level(logging.WARNING):
            json_lines.append(path, {"step": 1, "words": "x" * 8192})
        assert caplog.messages == [f"a line for {path} is lost: No space left on device"]
        rest.unlink()
        json_lines.append(path, {"step": 2})
        assert [line["step"] for line in lines_of(path)] == [0, 2]
