"""Several Checkpoints of one process: in a folder of each, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness.checkpointed import made, same, train, values
from harness.ranks import ranks

from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.checkpoint.owner import NAME
from mics_dtensor.errors import CheckpointError

ANOTHER = r"where another Checkpoints of this process saves another model, .* a folder of its own"


def checkpoints(folder: Path, its: Any, **options: Any) -> Checkpoints:
    given = CheckpointOptions(**options)
    return Checkpoints(folder, model=its[0], optimizer=its[1], options=given)


def save_whole(its: Checkpoints, step: int) -> None:
    its.save(step)
    its.wait()


def save_and_fail(its: Checkpoints, step: int) -> None:
    with its:
        its.save(step)
        raise ValueError("the loop failed")


@ranks(4, timeout_s=110)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_models_of_one_process_need_a_folder_each(tmp_path: Path, asynchronous: bool) -> None:
    one, two = made(2, 2), made(2, 2, seed=5)
    first = checkpoints(tmp_path, one, asynchronous=asynchronous)
    second = checkpoints(tmp_path, two, asynchronous=asynchronous)
    assert second.resume() is None  # to look is no harm
    first.save(1)
    before = values(one[0])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=ANOTHER):
            save_whole(second, 1)
    first.save(2)
    first.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == [NAME, "step-1", "step-2"]
    elsewhere = checkpoints(tmp_path / "two", two, asynchronous=asynchronous)
    elsewhere.save(1)
    elsewhere.close()
    checkpoints(tmp_path, two).load(1)
    assert same(values(two[0]), before)
    first.close()
    second.save(3)  # the folder is free
    second.close()
    dist.barrier()
    assert Manifest.read(tmp_path / "step-3").step == 3


@ranks(4, timeout_s=110)
def test_one_that_is_over_is_in_nobodys_way(tmp_path: Path) -> None:
    """Closed, garbage, left by an exception, or followed by another of the same model."""
    one = made(2, 2)
    closed = checkpoints(tmp_path, one)
    closed.save(1)
    closed.close()
    dist.barrier()
    checkpoints(tmp_path, made(2, 2, seed=1)).save(2)  # and then garbage, with its model
    two = made(2, 2, seed=2)
    left = checkpoints(tmp_path, two)
    with pytest.raises(ValueError, match="the loop failed"):
        save_and_fail(left, 3)
    three = made(2, 2, seed=3)
    kept = checkpoints(tmp_path, three)
    kept.save(4)
    again = checkpoints(tmp_path, three)  # the loop has failed, and another begins
    again.save(5)
    kept.save(6)
    assert left is not None
    assert again.resume() is not None
    again.close()


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Every checkpoint takes so long to be completed."""
    real = Manifest.write

    def slowly(self: Manifest, folder: Path) -> None:
        time.sleep(seconds)
        real(self, folder)

    Manifest.write = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        Manifest.write = real  # type: ignore[method-assign]


@ranks(4, timeout_s=110)
@pytest.mark.parametrize("act", ["resume", "load", "save"])
def test_what_follows_an_exception_waits_for_the_save_under_way(tmp_path: Path, act: str) -> None:
    its = made(2, 2)
    train(*its, 0)
    saved = values(its[0])
    with slow_disk(2.0):
        began = time.monotonic()
        left = checkpoints(tmp_path, its, asynchronous=True)
        with pytest.raises(ValueError, match=r"^the loop failed$"):  # it is told, and at once
            save_and_fail(left, 1)
        assert time.monotonic() - began < 1.5
        assert not (tmp_path / "step-1").exists()
        dist.barrier()
        fresh = made(2, 2, seed=4)
        successor = checkpoints(tmp_path, fresh, asynchronous=act == "save")
        if act == "save":
            successor.save(2)
            successor.close()
            assert {p.name for p in tmp_path.glob("step-*")} == {"step-1", "step-2"}
            return
        manifest = successor.resume() if act == "resume" else successor.load(1)
    assert manifest is not None
    assert manifest.step == 1
    assert same(values(fresh[0]), saved)


@ranks(4, timeout_s=110)
def test_a_save_under_way_that_fails_is_no_error_of_the_successor(tmp_path: Path) -> None:
    its = made(2, 2)
    checkpoints(tmp_path, its).save(1)

    def full(*_: Any) -> None:
        time.sleep(1.0)
        raise OSError(28, "No space left on device")

    real, Manifest.write = Manifest.write, full  # type: ignore[method-assign]
    try:
        left = checkpoints(tmp_path, its, asynchronous=True)
        with pytest.raises(ValueError, match="failed"):
            save_and_fail(left, 2)
        manifest = checkpoints(tmp_path, made(2, 2)).resume()
    finally:
        Manifest.write = real  # type: ignore[method-assign]
    assert manifest is not None
    assert manifest.step == 1
