"""What DeepSpeed wrote is what we read: every parameter and moment, bit for bit."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.fixtures import CASES, FIXTURES, expected, tag_of

from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint
from mics_dtensor.errors import CheckpointError


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_moments_are_deepspeeds_own(case: str) -> None:
    wanted = expected(case)
    found = ZeroCheckpoint.open(FIXTURES / case)
    assert set(found.weights) | set(found.frozen) == set(wanted["parameters"])
    for name, value in wanted["parameters"].items():
        its = {**found.weights, **found.frozen}[name]
        assert its.shape == value.shape
        assert torch.equal(its.read(), value.to(its.dtype)), name
    for kind in ("exp_avg", "exp_avg_sq"):
        assert set(found.moments[kind]) == set(wanted[kind]) == set(found.weights)
        for name, value in wanted[kind].items():
            assert value.any()
            assert torch.equal(found.moments[kind][name].read(), value), (kind, name)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_fp32_masters(case: str) -> None:
    found = ZeroCheckpoint.open(FIXTURES / case)
    assert {its.dtype for its in found.weights.values()} == {torch.float32}
    low = torch.bfloat16 if "fp32" not in case and "fp16" not in case else torch.float16
    if "fp32" not in case:  # else they would say no more than the model did
        assert any(
            not torch.equal(w.read(), w.read().to(low).float()) for w in found.weights.values()
        )


def test_tied_frozen_buffers_groups_and_steps() -> None:
    found = ZeroCheckpoint.open(FIXTURES / "zero3_fp16_3")
    model = found.model()
    assert found.tied == {"head.weight": "embed.weight"}
    assert torch.equal(model["head.weight"].read(), model["embed.weight"].read())
    assert set(found.frozen) == {"old.weight", "old.bias"}
    assert found.frozen["old.weight"].shape == (3, 5)
    assert set(found.buffers) == {"seen", "mean"}  # not the buffer that is not persistent
    assert int(found.buffers["seen"].read()) == 6
    assert torch.equal(found.buffers["mean"].read(), torch.linspace(-1, 1, 5))
    assert set(found.steps.values()) == {float(found.progress.schedule_steps)}
    assert (found.progress.step, found.progress.data_parallel_size) == (3, 3)
    assert any(words.startswith("lr_scheduler: ") for words in found.left_behind)

    grouped = ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2")
    assert [group["weight_decay"] for group in grouped.options] == [0.1, 0.0]
    assert [group["lr"] for group in grouped.options] == [1e-2, 2e-3]
    assert set(grouped.options[0]["params"]) == {"embed.weight", "up.weight", "down.weight"}
    assert set(grouped.options[1]["params"]) == {"scale", "up.bias", "norm.weight", "norm.bias"}


def test_the_scripts_own_state_is_named() -> None:
    found = ZeroCheckpoint.open(FIXTURES / "zero3_fp32_4")
    assert [words for words in found.left_behind if words.startswith("epoch: ")]


def test_a_tag_may_be_named_itself() -> None:
    tag = tag_of(FIXTURES / "zero3_fp32_4")
    assert ZeroCheckpoint.open(tag).path == ZeroCheckpoint.open(tag.parent).path == tag


def test_without_latest_the_tags_that_are_there_are_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero3_fp32_4", tmp_path / "run")
    (tmp_path / "run" / "latest").unlink()
    tag = tag_of(FIXTURES / "zero3_fp32_4").name
    with pytest.raises(CheckpointError, match=f"the folder of one: {tmp_path}/run/{tag}$"):
        ZeroCheckpoint.open(tmp_path / "run")


def damage(change: Callable[[Path], Any], tmp_path: Path, case: str = "zero3_bf16_2") -> str:
    """What is said of a copy of a fixture that `change` has been at."""
    copy = tmp_path / case
    shutil.copytree(FIXTURES / case, copy)
    change(copy)
    with pytest.raises(CheckpointError) as raised:
        ZeroCheckpoint.open(copy)
    return str(raised.value)


def _edit(file: Path, **changes: Any) -> None:
    read = torch.load(file, weights_only=False) if "model_states" in file.name else None
    assert read is not None
    torch.save({**read, **changes}, file)


def _rename(path: Path, to: str) -> None:
    path.rename(path.with_name(to))


MODEL, OPTIMIZER = (
    "zero_pp_rank_{}_mp_rank_00_model_states.pt",
    ("bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
)
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (shutil.rmtree, "does not exist; name the folder that DeepSpeed saved to"),
    "latest names nothing": (
        lambda path: (path / "latest").write_text("global_step9"),
        "names global_step9, which is not there; name one of the folders that are: global_step3",
    ),
    "latest leads out": (
        lambda path: (path / "latest").write_text("../elsewhere"),
        "holds '../elsewhere', which is not the name of a folder",
    ),
    "a rank's optimizer file is gone": (
        lambda path: (tag_of(path) / OPTIMIZER.format(0)).unlink(),
        "*_optim_states.pt of 1 ranks and lacks those of ranks 0; copy them from the nodes",
    ),
    "the last rank's files are gone": (
        lambda path: [(tag_of(path) / f.format(1)).unlink() for f in (OPTIMIZER, MODEL)],
        "was saved by 2 ranks, and",
    ),
    "no optimizer files": (
        lambda path: [(tag_of(path) / OPTIMIZER.format(n)).unlink() for n in (0, 1)],
        "has no *_optim_states.pt: it was saved without ZeRO, or is not whole",
    ),
    "no model files": (
        lambda path: [(tag_of(path) / MODEL.format(n)).unlink() for n in (0, 1)],
        "has optimizer files and no *_model_states.pt",
    ),
    "two runs in one folder": (
        lambda path: shutil.copy(
            tag_of(path) / OPTIMIZER.format(0),
            tag_of(path) / OPTIMIZER.format(0).removeprefix("bf16_"),
        ),
        "both of rank 0: two runs saved into it; keep the files of one",
    ),
    "two steps in one folder": (
        lambda path: _edit(tag_of(path) / MODEL.format(1), global_steps=7),
        "is of step 7 and zero_pp_rank_0_mp_rank_00_model_states.pt of step 3",
    ),
    "shapes of another model": (
        lambda path: _edit(
            tag_of(path) / MODEL.format(0), param_shapes=[{"embed.weight": torch.Size([4, 6])}]
        ),
        "elements of fp32 in sub-group 0, and the shapes in the model files want 12",
    ),
    "a truncated file": (
        lambda path: (tag_of(path) / OPTIMIZER.format(1)).write_bytes(
            (tag_of(path) / OPTIMIZER.format(1)).read_bytes()[:3000]
        ),
        "is not a whole file of torch.save",
    ),
    "a file of something else": (
        lambda path: torch.save({"weights": 1}, tag_of(path) / OPTIMIZER.format(0)),
        "is not an optimizer file of ZeRO: it has no optimizer_state_dict",
    ),
    "universal": (
        lambda path: (tag_of(path) / "zero" / "embed.weight").mkdir(parents=True),
        "is a universal checkpoint (of ds_to_universal.py), which is not read; convert the ZeRO "
        "checkpoint that it was made from",
    ),
    "NVMe": (
        lambda path: (tag_of(path) / "offloaded_tensors").mkdir(),
        "optimizer states that were swapped to NVMe (offloaded_tensors)",
    ),
    "tensor parallel": (
        lambda path: _rename(
            tag_of(path) / MODEL.format(1), "zero_pp_rank_0_mp_rank_01_model_states.pt"
        ),
        "was saved with tensor parallel (zero_pp_rank_0_mp_rank_01_model_states.pt)",
    ),
    "a pipeline": (
        lambda path: (tag_of(path) / "layer_01-model_00-model_states.pt").touch(),
        "was saved by a pipeline (layer_01-model_00-model_states.pt)",
    ),
    "experts": (
        lambda path: (tag_of(path) / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
        "holds experts of DeepSpeed-MoE",
    ),
    "one of ours": (
        lambda path: (
            [file.unlink() for file in tag_of(path).iterdir()],
            (tag_of(path) / ".metadata").touch(),
        ),
        "is not DeepSpeed's: it is a checkpoint of torch.distributed.checkpoint",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_no_such_checkpoint_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, said = DAMAGES[what]
    assert said in damage(change, tmp_path)


class Malice:
    """What an unrestricted unpickler would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.copyfile, (__file__, str(self.path))


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    pickle.loads(pickle.dumps(Malice(ran)))
    assert ran.exists()  # it is what it says
    ran.unlink()
    said = damage(lambda path: _edit(tag_of(path) / MODEL.format(1), epoch=Malice(ran)), tmp_path)
    assert "holds objects of shutil.copyfile: unpickling would run code" in said
    assert "nothing was read" in said
    assert not ran.exists()


def test_a_known_class_is_read_as_an_empty_object(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURES / "zero3_bf16_2", copy)
    ran = tmp_path / "ran"
    _edit(tag_of(copy) / MODEL.format(0), epoch=Malice(ran))
    found = ZeroCheckpoint.open(copy, inert=["shutil.copyfile"])
    assert set(found.weights) == set(ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2").weights)
    assert not ran.exists()


def test_the_fixtures_are_small_and_their_versions_are_known() -> None:
    size = sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file())
    assert size < 1_000_000
    versions = {case: ZeroCheckpoint.open(FIXTURES / case).version for case in CASES}
    assert set(versions.values()) >= {"0.19.8", "0.16.9"}, json.dumps(versions)
