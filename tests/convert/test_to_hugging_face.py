"""Weights that go out: every tensor, read back by safetensors and by torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert.fixtures import FIXTURES, tag_of

from mics_dtensor.checkpoint.convert.resumable import Target, write_resumable
from mics_dtensor.checkpoint.convert.stored import stored_weights
from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint
from mics_dtensor.cli import main
from mics_dtensor.cli.convert_hf import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    found = ZeroCheckpoint.open(FIXTURES / "zero3_bf16_2")
    write_resumable(found, tmp_path / "step-3", Target())
    return tmp_path / "step-3", {name: its.read() for name, its in found.model().items()}


def test_safetensors_in_several_files_with_their_index(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, wanted = checkpoint
    said = run([str(path), str(tmp_path / "hf"), "--file-bytes", "400"])
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    got = {}
    for name in files:
        with safetensors.safe_open(tmp_path / "hf" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert all(index["weight_map"][key] == name for key in held)
        got |= held
    assert got.keys() == wanted.keys()  # head.weight too, which shares its values
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert f"{len(wanted)} tensors" in said
    assert "without config.json" in said
    assert "\n1 file of safetensors and " in run([str(path), str(tmp_path / "one")])


def test_one_torch_file_in_another_dtype(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, wanted = checkpoint
    run([str(path), str(tmp_path / "all.pt"), "--dtype", "bfloat16"])
    got = torch.load(tmp_path / "all.pt", weights_only=True)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        expected = value.bfloat16() if value.is_floating_point() else value
        assert torch.equal(got[name], expected)


@pytest.mark.parametrize("prefix", [("model",), ("app", "model")])
def test_checkpoints_as_torchs_recipes_nest_them(prefix: tuple[str, ...], tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.randn(3, 5), "model.w": torch.randn(2)}
    state: dict[str, object] = {"model": weights, "optimizer": {"state": {"w": torch.ones(3)}}}
    for name in prefix[:-1]:
        state = {name: state}
    dcp.save(state, checkpoint_id=tmp_path / "out", no_dist=True)
    found = stored_weights(tmp_path / "out", verify=False)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].read(), value) for name, value in weights.items())


def test_what_cannot_be_is_told_in_a_sentence_and_leaves_nothing(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = checkpoint
    before = sorted(each.name for each in tmp_path.iterdir())

    def said(*words: str) -> str:
        assert main(["convert", "hf", *words]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "hf")
    assert "does not exist; name the folder of a checkpoint" in said(str(tmp_path / "no"), out)
    assert "exists; name what does not" in said(str(path), str(path))
    assert "--file-bytes 0; give 1 or more" in said(str(path), out, "--file-bytes", "0")
    deepspeeds = FIXTURES / "zero3_bf16_2"
    for folder in (deepspeeds, tag_of(deepspeeds)):
        assert f"`mics convert deepspeed {folder} .../step-N` makes" in said(str(folder), out)
    data = next(path.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "has other bytes than were written" in said(str(path), out)
    data.write_bytes(whole[:-5])
    assert "this checkpoint is damaged" in said(str(path), out)
    data.unlink()
    assert "is missing" in said(str(path), out)
    (path / "manifest.json").unlink()
    assert "has no manifest.json" in said(str(path), out)
    assert sorted(each.name for each in tmp_path.iterdir()) == before
