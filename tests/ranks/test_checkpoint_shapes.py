"""Checkpoints are exact: a run goes on bit for bit, and any shape and world loads any other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.checkpointed import (
    FEED,
    SLICED,
    TENSOR_PARALLEL,
    Run,
    entries,
    made,
    same,
    states_of,
    stored,
    train,
    values,
)
from harness.ranks import ranks, run_on_ranks

from mics_dtensor.checkpoint.checkpoints import Checkpoints

Shape = tuple[int, int, str]  # replicas, partition size, kind


def saved_and_loaded(folder: Path, layouts: list[Shape]) -> None:
    """From each layout into each other, and back: parameters and moments equal."""
    models = {layout: made(*layout[:2], kind=layout[2]) for layout in layouts}
    its = {at: Checkpoints(folder / str(at), model=m, optimizer=o) for at, (m, o) in models.items()}
    for seed, (source, (model, optimizer)) in enumerate(models.items()):
        train(model, optimizer, seed, seed + 1)
        weights, states = values(model), states_of(optimizer)
        its[source].save(seed)
        for target, (other, others) in models.items():
            if target == source:
                continue
            train(other, others, 9)
            there = Checkpoints(folder / str(source), model=other, optimizer=others)
            assert there.load(seed).step == seed
            assert same(values(other), weights)
            # The states too: saved from there they are, piece by piece, what was saved here.
            its[target].save(seed)
            train(model, optimizer, 8)
            Checkpoints(folder / str(target), model=model, optimizer=optimizer).load(seed)
            assert same(values(model), weights)
            assert same(states_of(optimizer), states), (source, target)


@ranks(4, timeout_s=110)
def test_saved_on_any_shape_loaded_on_any_other(tmp_path: Path) -> None:
    saved_and_loaded(tmp_path, [(2, 2, ""), (1, 4, ""), (2, 2, SLICED)])


@ranks(4, timeout_s=110)
def test_with_tensor_parallel_and_without(tmp_path: Path) -> None:
    saved_and_loaded(tmp_path, [(1, 2, TENSOR_PARALLEL), (2, 1, TENSOR_PARALLEL), (2, 2, FEED)])


@pytest.mark.matrix
@ranks(8, timeout_s=500)
def test_every_shape_of_eight_ranks(tmp_path: Path) -> None:
    plain = [(r, 8 // r, "") for r in (1, 2, 4, 8)]
    saved_and_loaded(tmp_path, [*plain, (2, 4, SLICED), (4, 2, SLICED), (8, 1, SLICED)])
    feed = [(1, 8, FEED), (4, 2, FEED)]
    tensor_parallel = [(r, 4 // r, TENSOR_PARALLEL) for r in (1, 2, 4)]
    saved_and_loaded(tmp_path / "tp", [*tensor_parallel, *feed])


def expect_to_go_on(folder: Path, shape: Shape) -> None:
    """Four steps, and two, a checkpoint and two more: the same losses, values and files."""
    straight = Run(*made(*shape[:2], kind=shape[2]))
    losses = straight.go_on(4)
    first = Run(*made(*shape[:2], kind=shape[2]))
    assert first.go_on(2) == losses[:4]
    first.checkpoints(folder).save(2, tokens=70)
    second = Run(*made(*shape[:2], kind=shape[2], seed=5))
    second.go_on(1)  # what is loaded replaces all of it
    manifest = second.checkpoints(folder).resume()
    assert manifest is not None
    assert (manifest.step, manifest.contents, manifest.tokens) == (2, "training", 70)
    assert second.go_on(2) == losses[4:], shape
    assert same(values(second.model), values(straight.model)), shape
    assert same(states_of(second.optimizer), states_of(straight.optimizer)), shape
    assert second.position == straight.position
    assert second.scheduler.state_dict() == straight.scheduler.state_dict()
    for name, run in (("straight", straight), ("second", second)):
        run.checkpoints(folder / name).save(4)
    ends = [entries(folder / name / "step-4") for name in ("straight", "second")]
    assert ends[0] == ends[1], shape  # to the last byte


@ranks(8, timeout_s=110)
def test_a_run_goes_on_bit_for_bit_on_every_partition_size(tmp_path: Path) -> None:
    for partition in (1, 2, 4, 8):
        expect_to_go_on(tmp_path / str(partition), (8 // partition, partition, ""))


@ranks(8, timeout_s=110)
def test_a_run_with_slices_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expect_to_go_on(tmp_path, (4, 2, SLICED))


@pytest.mark.matrix
@ranks(8, timeout_s=500)
def test_every_other_run_of_eight_ranks_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for replicate in (2, 8):
        expect_to_go_on(tmp_path / f"{replicate}s", (replicate, 8 // replicate, SLICED))
    for replicate in (1, 2, 4):
        shape = (replicate, 4 // replicate, TENSOR_PARALLEL)
        expect_to_go_on(tmp_path / f"{replicate}t", shape)


def size_of(shape: Shape) -> int:
    """Its ranks."""
    return shape[0] * shape[1] * (2 if shape[2] == TENSOR_PARALLEL else 1)


def expect_each_to_load_each(folder: Path, shapes: list[Shape]) -> None:
    """Each in a world of its own, of as many ranks as it has: weights and states are equal."""
    paths = {shape: folder / str(number) for number, shape in enumerate(shapes)}

    def saves(shape: Shape) -> None:
        model, optimizer = made(*shape[:2], kind=shape[2], seed=size_of(shape))
        train(model, optimizer, 0, 1)
        Checkpoints(paths[shape], model=model, optimizer=optimizer).save(1)
        weights = values(model)
        if dist.get_rank() == 0:
            torch.save(weights, paths[shape] / "weights")

    def loads(shape: Shape) -> None:
        model, optimizer = made(*shape[:2], kind=shape[2], seed=99)
        for path in paths.values():
            train(model, optimizer, 7)
            assert Checkpoints(path, model=model, optimizer=optimizer).load(1).step == 1
            assert same(values(model), torch.load(path / "weights")), (path, shape)
            again = path / "again" / str(shape)
            Checkpoints(again, model=model, optimizer=optimizer).save(1)
            train(model, optimizer, 8)

    for act in (saves, loads):
        for shape in shapes:
            run_on_ranks(size_of(shape), lambda a=act, s=shape: a(s), timeout_s=110)  # type: ignore[misc]
    for source, path in paths.items():
        its = stored(path / "step-1")
        assert any(name.endswith("exp_avg_sq") for name in its)
        for target in shapes:
            assert same(stored(path / "again" / str(target) / "step-1"), its), (source, target)


@pytest.mark.timeout(300)
def test_saved_on_any_number_of_ranks_loaded_on_any_other(tmp_path: Path) -> None:
    expect_each_to_load_each(tmp_path, [(1, 3, ""), (2, 2, SLICED), (1, 1, "")])


@pytest.mark.matrix
@pytest.mark.timeout(3000)
def test_every_number_of_ranks(tmp_path: Path) -> None:
    plain: list[Shape] = [(1, 1, ""), (2, 1, ""), (1, 3, ""), (1, 4, ""), (3, 2, ""), (2, 4, "")]
    sliced: list[Shape] = [(2, 1, SLICED), (3, 1, SLICED), (2, 3, SLICED), (4, 2, SLICED)]
    expect_each_to_load_each(tmp_path / "plain", [*plain, *sliced])
    feed: list[Shape] = [(1, 1, FEED), (1, 3, FEED), (2, 4, FEED)]
    tensor: list[Shape] = [(r, p, TENSOR_PARALLEL) for r, p in ((1, 1), (1, 3), (2, 2), (4, 1))]
    expect_each_to_load_each(tmp_path / "feed", [*feed, *tensor])
