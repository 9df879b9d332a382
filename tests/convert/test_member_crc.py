"""A byte of DeepSpeed's files that is not as it was written is found before anything is written."""

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from convert.fixtures import FIXTURES, tag_of
from torch.serialization import get_crc32_options, set_crc32_options

from mics_dtensor.checkpoint.convert.member_crc import refuse_damaged
from mics_dtensor.cli import main
from mics_dtensor.errors import CheckpointError

CASE = "zero3_bf16_2"


def flip(file: Path, member: str) -> None:
    """One bit in the middle of a member's bytes."""
    with ZipFile(file) as whole:
        (its,) = [each for each in whole.infolist() if each.filename.endswith(f"/{member}")]
    raw = bytearray(file.read_bytes())
    header = raw[its.header_offset : its.header_offset + 30]
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    raw[its.header_offset + 30 + name + extra + its.file_size // 2] ^= 4
    file.write_bytes(raw)


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_flipped_bit_is_refused_by_file_and_member(
    kind: str, weights_only: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(FIXTURES / CASE, copy)
    file = sorted(tag_of(copy).glob(f"*_{kind}_states.pt"))[-1]
    argv = ["convert", "deepspeed", str(copy), str(out / "step-3")]
    argv += ["--weights-only"] if weights_only else []
    flip(file, "data/1")
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert str(file) in said.err
    assert "/data/1 is not what torch.save wrote" in said.err
    assert not out.exists()
    flip(file, "data/1")
    assert main(argv) == 0


def test_what_carries_nothing_to_check_by_is_let_through(tmp_path: Path) -> None:
    tensor, before = torch.arange(1000), get_crc32_options()
    torch.save(tensor, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    try:
        set_crc32_options(False)
        torch.save(tensor, tmp_path / "without.pt")
    finally:
        set_crc32_options(before)
    torch.save(tensor, tmp_path / "with.pt")
    files = [tmp_path / f"{name}.pt" for name in ("old", "without", "with")]
    refuse_damaged(files)
    flip(tmp_path / "without.pt", "data/0")
    refuse_damaged(files)
    flip(tmp_path / "with.pt", "data/0")
    with pytest.raises(CheckpointError, match=r"with.pt: with/data/0 is not what"):
        refuse_damaged(files)
