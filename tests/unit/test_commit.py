"""Folders of checkpoints at every point at which a crash may leave them."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest

from mics_dtensor.checkpoint import commit as committing
from mics_dtensor.checkpoint.commit import (
    abandon,
    aged,
    begin,
    commit,
    is_whole,
    named,
    partial_of,
    retire,
)
from mics_dtensor.checkpoint.manifest import NAME, Manifest, files_of
from mics_dtensor.errors import CheckpointError


def save(path: Path, data: bytes = b"data", contents: str = "training") -> None:
    begin(path)
    partial = path.with_name(path.name + ".partial")
    (partial / "a").write_bytes(data)
    files = files_of(partial, ["a"])
    commit(path, Manifest(step=0, contents=contents, files=files))  # type: ignore[arg-type]


def steps(folder: Path) -> list[int]:
    return list(named(folder))


def test_nothing_has_the_name_before_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-1"
    begin(path)
    assert steps(tmp_path / "run") == []
    abandon(path)
    assert list((tmp_path / "run").iterdir()) == []
    save(path)
    assert is_whole(path)
    assert [p.name for p in path.parent.iterdir()] == ["step-1"]


def test_leftovers_go_and_what_is_needed_stays(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    save(tmp_path / "step-2")
    (tmp_path / "step-2").rename(tmp_path / "step-2.replaced")  # killed between the renames
    for name in ("step-1.replaced", "step-3.partial", "step-9.deleted", "notes.partial"):
        (tmp_path / name).mkdir()
    assert named(tmp_path) == {1: tmp_path / "step-1", 2: tmp_path / "step-2.replaced"}
    begin(tmp_path / "step-3")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["notes.partial", "step-1", "step-2", "step-3.partial"]
    assert is_whole(tmp_path / "step-2")


def test_a_file_is_never_taken_for_a_checkpoint_or_deleted_as_one(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("mine")
    for path in (tmp_path / "step-1", tmp_path / "step-1" / "step-2"):
        with pytest.raises(CheckpointError, match="step-1 is a file, in the way of a folder"):
            begin(path)
    assert (tmp_path / "step-1").read_text() == "mine"
    (tmp_path / "step-3.replaced").touch()  # left by an older version, which renamed such a file
    save(tmp_path / "step-3")
    assert steps(tmp_path) == [3]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path / "step-1", b"first")
    save(tmp_path / "step-1", b"second")
    assert (tmp_path / "step-1" / "a").read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("call", ["rename", "write", "sync_folder", "rmtree"])
@pytest.mark.parametrize("when", [0, 1])
def test_a_crash_in_a_commit_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, when: int
) -> None:
    save(tmp_path / "step-1", b"first")

    class Killed(BaseException):
        pass

    calls = iter(range(9))

    def killed(*_: object, **__: object) -> None:
        if next(calls) == when:
            raise Killed
        monkeypatch.undo()

    owner = {"rename": Path, "write": Manifest, "sync_folder": committing, "rmtree": shutil}[call]
    real = getattr(owner, call)

    def maybe(*args: object, **kwargs: object) -> object:
        killed()
        return real(*args, **kwargs)

    begin(tmp_path / "step-1")
    (tmp_path / "step-1.partial" / "a").write_bytes(b"second")
    manifest = Manifest(
        step=1, contents="training", files=files_of(tmp_path / "step-1.partial", ["a"])
    )
    monkeypatch.setattr(owner, call, maybe)
    with contextlib.suppress(Killed):
        commit(tmp_path / "step-1", manifest)
    monkeypatch.undo()
    (path,) = named(tmp_path).values()
    assert is_whole(path)
    assert (path / "a").read_bytes() in (b"first", b"second")


def test_files_on_the_disk_of_another_node(tmp_path: Path) -> None:
    begin(tmp_path / "step-1")
    partial = tmp_path / "step-1.partial"
    (partial / "__9_0.distcp").touch()
    manifest = Manifest(step=1, contents="model", files=files_of(partial, ["__9_0.distcp"]))
    (partial / "__9_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=r"does not see __9_0.distcp, which other ranks wrote"
    ):
        commit(tmp_path / "step-1", manifest)
    assert steps(tmp_path) == []


def test_old_ones_go_and_damaged_ones_count_for_nothing(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-30" / "a").write_bytes(b"d")
    (tmp_path / "step-20" / NAME).unlink()
    assert retire(tmp_path, keep_last=0) == []
    assert retire(tmp_path, keep_last=2) == []  # 40 and 10 are the good ones
    save(tmp_path / "step-50")
    assert [p.name for p in retire(tmp_path, keep_last=2)] == ["step-10", "step-20", "step-30"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-40", "step-50"]


def test_what_a_run_can_be_resumed_from_outlives_weights_alone(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / f"step-{step}")
    save(tmp_path / "step-30", contents="model")
    save(tmp_path / "step-40", contents="model")
    assert [p.name for p in retire(tmp_path, keep_last=1)] == ["step-10", "step-30"]
    assert steps(tmp_path) == [20, 40]


def test_what_was_completed_last_is_the_newest_whatever_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path / f"step-{step}")
    assert not caplog.records
    at_s = Manifest.read(tmp_path / "step-8").completed_s
    assert at_s is not None
    monkeypatch.setattr(time, "time", lambda: at_s - 1e6)  # nor whatever the clock says
    deleted = list[str]()
    for step in (3, 4, 5):  # the run went back to 2
        save(tmp_path / f"step-{step}")
        deleted += [p.name for p in retire(tmp_path, keep_last=2)]
        assert list(aged(tmp_path))[-1] == step
    assert deleted == ["step-2", "step-4", "step-6", "step-8", "step-3"]
    assert list(aged(tmp_path)) == steps(tmp_path) == [4, 5]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step-3 follows step-8, a later step: the run went back" in said


def test_those_that_cannot_tell_follow_the_steps_before_them(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        save(tmp_path / f"step-{step}")
    for step in (1, 2, 9):  # as an older version wrote it
        path = tmp_path / f"step-{step}" / NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"completed_s": None}))
    assert list(aged(tmp_path)) == [1, 2, 9, 3]
    (tmp_path / "step-2" / NAME).write_text("{")
    (tmp_path / "step-9" / NAME).unlink()
    assert list(aged(tmp_path)) == [1, 2, 3, 9]
    save(tmp_path / "step-4")
    assert [p.name for p in retire(tmp_path, keep_last=1)] == ["step-1", "step-2", "step-3"]
    assert list(aged(tmp_path)) == [4, 9]  # damaged, and not known to be older


@pytest.mark.parametrize("others", ["step-1", "step-2"])
def test_a_second_run_in_the_folder_is_told_as_the_cause_and_loses_nothing(
    tmp_path: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from mics_dtensor.checkpoint import placement
    from mics_dtensor.checkpoint.transfer import Keeping, write

    real = placement.write_item

    def meanwhile(*given: object) -> None:
        begin(tmp_path / others)  # by another run
        (partial_of(tmp_path / others) / "theirs").touch()
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "write_item", meanwhile)
    about = Manifest(step=1, contents="training", files=())
    with pytest.raises(CheckpointError, match="another run writes into the same folder"):
        write({"w": torch.ones(2)}, tmp_path / "step-1", about=about, keeping=Keeping())
    assert [path.name for path in tmp_path.iterdir()] == [f"{others}.partial"]
    assert [path.name for path in partial_of(tmp_path / others).iterdir()] == ["theirs"]
