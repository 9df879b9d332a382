"""A converted checkpoint is whole, verified, and holds every value bit for bit."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from convert.fixtures import CASES, FIXTURES, expected, held

from mics_dtensor.checkpoint.convert import resumable
from mics_dtensor.checkpoint.convert.dcp_writer import write_dcp
from mics_dtensor.checkpoint.convert.lazy import LazyTensor, translated
from mics_dtensor.checkpoint.convert.resumable import Target, write_resumable
from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("case", CASES)
def test_every_value_arrives(case: str, tmp_path: Path) -> None:
    path, wanted = tmp_path / "step-3", expected(case)
    found = ZeroCheckpoint.open(FIXTURES / case)
    manifest = write_resumable(found, path, Target())
    manifest.check(path)
    assert Manifest.read(path) == manifest
    assert (manifest.step, manifest.contents) == (3, "training")
    values = held(path)
    for name, value in wanted["parameters"].items():
        assert torch.equal(values[name], value.to(values[name].dtype))
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, value in wanted[kind].items():
            assert torch.equal(values[f"optimizer.state.{name}.{kind}"], value)
            assert values[f"optimizer.state.{name}.step"] == found.progress.schedule_steps
            assert values[f"optimizer.param_groups.{name}.betas"] == (0.8, 0.95)
            assert values[f"optimizer.param_groups.{name}.eps"] == 1e-7
    assert values["train_state.step"] == 3
    assert values["lr_scheduler.last_epoch"] == found.progress.schedule_steps
    assert [file.name for file in tmp_path.iterdir()] == ["step-3"]


def test_options_are_those_of_each_parameters_group(tmp_path: Path) -> None:
    write_resumable(ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2"), tmp_path / "out", Target())
    values = held(tmp_path / "out")
    for name, decay, lr in (("up.weight", 0.1, 1e-2), ("up.bias", 0.0, 2e-3)):
        assert values[f"optimizer.param_groups.{name}.weight_decay"] == decay
        assert values[f"optimizer.param_groups.{name}.lr"] == lr
        assert values[f"optimizer.param_groups.{name}.amsgrad"] is False
        assert f"optimizer.param_groups.{name}.fused" not in values  # the new run's own


def test_files_are_of_a_limited_size(tmp_path: Path) -> None:
    tensors = {f"t{n}": _lazy(torch.full((10,), float(n))) for n in range(7)}
    write_dcp(tmp_path / "out", {"model": tensors, "step": 3}, file_bytes=80)
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 4
    values = held(tmp_path / "out")
    assert all(torch.equal(values[f"model.{name}"], its.read()) for name, its in tensors.items())
    assert values["step"] == 3


def test_the_tensors_of_one_file_are_in_memory_at_a_time(tmp_path: Path) -> None:
    alive, most = set[int](), 0

    def read() -> torch.Tensor:
        nonlocal most
        memory = np.zeros(100, dtype=np.float32)  # kept alive by every tensor that is made of it
        weakref.finalize(memory, alive.discard, id(memory))
        alive.add(id(memory))
        most = max(most, len(alive))
        return torch.from_numpy(memory)

    lazy = LazyTensor(torch.Size([100]), torch.float32, read)
    write_dcp(tmp_path / "out", {f"t{n}": lazy for n in range(20)}, file_bytes=800)
    assert most <= 3  # two, and the last of the file before


def test_nothing_is_overwritten_and_nothing_is_left_by_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists; name a folder that does not"):
        write_resumable(found, tmp_path / "there", Target())
    (tmp_path / "busy.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"busy.partial is in the way"):
        write_resumable(found, tmp_path / "busy", Target())

    def full_disk(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(resumable, "write_dcp", full_disk)
    with pytest.raises(CheckpointError, match=r"new cannot be written: .*No space left on device"):
        write_resumable(found, tmp_path / "new", Target())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy.partial", "there"]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    def broken() -> torch.Tensor:
        raise OSError(28, os.strerror(28))

    lazy = LazyTensor(torch.Size([4]), torch.float32, broken)
    with pytest.raises(OSError, match="No space left"):
        write_dcp(tmp_path / "out", {"t": lazy})


def test_a_translation_sees_one_layer_at_a_time() -> None:
    tensors = {
        f"layers.{n}.{part}": _lazy(torch.tensor([n, k]))
        for n in range(3)
        for k, part in enumerate("ab")
    }
    real: list[set[str]] = []

    def fused(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        real.append({name for name, its in whole.items() if not its.is_meta})
        return {
            f"block.{n}.ab": torch.cat([whole[f"layers.{n}.a"], whole[f"layers.{n}.b"]])
            for n in range(3)
        }

    made = translated(tensors, fused)
    for n in range(3):
        assert made[f"block.{n}.ab"].read().tolist() == [n, 0, n, 1]
        assert made[f"block.{n}.ab"].read().tolist() == [n, 0, n, 1]  # held, not made again
    assert real == [set(), *({f"layers.{n}.a", f"layers.{n}.b"} for n in range(3))]


def test_a_translation_that_mixes_layers_is_refused() -> None:
    tensors = {f"layers.{n}.a": _lazy(torch.ones(2)) for n in range(2)}
    made = translated(tensors, lambda whole: {"layers.1.a": whole["layers.0.a"]})
    with pytest.raises(CheckpointError, match=r"layers.1.a is made of tensors of several layers"):
        made["layers.1.a"].read()


def test_parameters_that_become_one_must_have_been_treated_alike() -> None:
    found = ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2")
    joined = {"up": ("up.weight", "up.bias")}  # of two groups of the optimizer

    def of_moments(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {new: torch.cat([whole[a], whole[b][:, None]], 1) for new, (a, b) in joined.items()}

    with pytest.raises(
        CheckpointError, match=r"up is made of several parameters .* --weights-only"
    ):
        resumable.resumable_states(found, Target(of_moments=of_moments))


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor)
