"""manifest.json: written, read, and each way in which it or a file can be wrong, by name."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mics_dtensor.checkpoint.manifest import NAME, Manifest, files_of, step_folders, step_of
from mics_dtensor.errors import CheckpointError


def written(folder: Path, **more: object) -> Manifest:
    folder.mkdir()
    (folder / "a").write_bytes(bytes(range(256)) * 40)
    (folder / "b").write_bytes(b"")
    manifest = Manifest(step=7, contents="training", files=files_of(folder, ("b", "a")), **more)  # type: ignore[arg-type]
    manifest.write(folder)
    return manifest


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    manifest = written(
        folder,
        tokens=9,
        layout={"world_size": 4, "partition_size": 2},
        versions={"torch": "2.13.0"},
        config={"mics": {"partition_size": 2}},
        data={"lanes": 4, "sequences": 12},
    )
    assert Manifest.read(folder) == manifest
    assert [file.name for file in manifest.files] == ["a", "b"]
    assert manifest.size_bytes() == 10_240
    manifest.check(folder)
    assert json.loads((folder / NAME).read_text())["schema"] == 2


def flip(folder: Path) -> None:
    data = bytearray((folder / "a").read_bytes())
    data[1234] ^= 1
    (folder / "a").write_bytes(data)


def edit(folder: Path, **keys: object) -> None:
    its = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(its | keys))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (flip, "/a has other bytes than were written"),
        (lambda f: (f / "a").write_bytes(b"short"), "/a has 5 bytes, and 10240 were written"),
        (lambda f: (f / "a").unlink(), "/a is missing: this checkpoint is damaged"),
        (lambda f: edit(f, schema=3), "has schema 3, and this version .* reads up to 2: install"),
        (lambda f: edit(f, schema=3, versions=3), r"that wrote it \(unknown\)"),
        (lambda f: (f / NAME).write_text("{"), "manifest.json cannot be read"),
        (lambda f: (f / NAME).write_bytes(b"\xff"), "manifest.json is not text"),
        (lambda f: (f / NAME).write_text("[]"), "manifest.json cannot be read"),
        (lambda f: (f / NAME).write_text('{"schema": 1}'), "manifest.json lacks a key"),
        (lambda f: edit(f, contents="half"), "contents 'half'"),
        (lambda f: (f / NAME).unlink(), "step-7 is not a checkpoint: it has no manifest.json"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, break_it: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "step-7"
    written(folder)
    break_it(folder)
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(folder).check(folder)


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    written(tmp_path / "step-7")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").touch()
    for name, words in {
        "nowhere": "does not exist; name the folder of a checkpoint, such as step-7 beside it",
        "file": "is a file; name",
        "none/step-1": r"does not exist; name the folder of a checkpoint, such as \.\.\./step-100",
        ".": "holds checkpoints and is none itself; name one of them: step-7",
        "other": "either it was never completed, or another program wrote it",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            Manifest.read(tmp_path / name)


def test_what_schema_1_wrote_is_verified_by_its_sha256(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    manifest = written(folder)
    told = json.loads((folder / NAME).read_text())
    for entry in told["files"]:
        del entry["digest"]
        entry["sha256"] = hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest()
    (folder / NAME).write_text(json.dumps(told | {"schema": 1}))
    read = Manifest.read(folder)
    assert [its.name for its in read.files] == [its.name for its in manifest.files]
    read.check(folder)
    flip(folder)
    with pytest.raises(CheckpointError, match=r"/a has other bytes .* \(sha256 \w{12}, not \w{12}"):
        read.check(folder)


def test_the_digest_is_that_of_zip(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    a, b = written(folder).files
    assert a.digest == f"crc32:{zlib.crc32((folder / 'a').read_bytes()):08x}"
    assert b.digest == "crc32:00000000"


def test_keys_of_a_later_version_with_the_same_number_are_let_be(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    manifest = written(folder)
    edit(folder, added=1)
    assert Manifest.read(folder) == manifest


def test_steps_by_their_number(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "step-9.partial", "step-", "step-01", "a-step-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-11").touch()
    assert [path.name for path in step_folders(tmp_path)] == ["step-9", "step-10"]
    assert step_folders(tmp_path / "nowhere") == []
    assert step_of("step-0") == 0
