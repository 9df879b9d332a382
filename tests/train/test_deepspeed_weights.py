"""From DeepSpeed's Hugging Face names into a run of the program, and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.fixtures import FIXTURES, expected, held

pytest.importorskip("torchtitan")
pytest.importorskip("safetensors")
from safetensors.torch import load_file
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from train import tiny_llama

from mics_dtensor.cli import main
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.weights import RunWeights

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(240),
]
CASE = "zero3_llama_2"
RUN = """
[model]
name = "train.tiny_llama"
hf_assets_path = ""
[training]
dataset = "python_docs"
seq_len = 32
[optimizer]
implementation = "foreach"
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(RUN)
    return str(tmp_path / "run.toml")


def as_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of torchtitan's model once it has loaded `tensors`, all at once."""
    spec = tiny_llama.model_registry("tiny")
    model = spec.model.build()
    native = Llama3StateDictAdapter(spec.model, None).from_hf(tensors)
    model.load_state_dict(native)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_weights_and_moments_are_what_torchtitan_itself_would_load(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step-3"
    words = ["convert", "deepspeed", str(FIXTURES / CASE), str(out), "--config-file", run]
    assert main(words) == 0, capsys.readouterr().err
    values, wanted = held(out), expected(CASE)
    spec = tiny_llama.model_registry("tiny")
    native = Llama3StateDictAdapter(spec.model, None).from_hf(dict(wanted["parameters"]))
    assert all(torch.equal(values[name], value) for name, value in native.items())
    names = set(dict(spec.model.build().named_parameters()))
    assert any("wqkv" in name for name in names)  # fused in the module, split in the state dict
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = as_parameters(wanted[kind])
        assert moments.keys() == names
        for name, value in moments.items():
            assert torch.equal(values[f"optimizer.state.{name}.{kind}"], value), (name, kind)
    start = "optimizer.param_groups."
    options = {name.removeprefix(start) for name in values if name.startswith(start)}
    assert {name.rpartition(".")[0] for name in options} == names
    assert values[f"{start}norm.weight.foreach"] is True
    assert values[f"{start}norm.weight.fused"] is False
    assert values["train_state.ntokens_seen"] == 24 // 2 * 32  # a rank's own samples
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["step"], manifest["tokens"]) == (3, 24 * 32)


@pytest.mark.parametrize("by_manifest", [True, False])
def test_there_and_back_is_the_same_bit_for_bit(
    by_manifest: bool, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (assets := tmp_path / "assets").mkdir()
    (assets / "config.json").write_text("{}")
    out, hf = tmp_path / "step-3", tmp_path / "hf"
    assert main(["convert", "deepspeed", str(FIXTURES / CASE), str(out), "--config-file", run]) == 0
    words = ["convert", "hf", str(out), str(hf), "--file-bytes", "9000"]
    if by_manifest:
        assert main(words) == 0
    else:
        assert main([*words, "--config-file", run, f"--model.hf_assets_path={assets}"]) == 0
        assert "with config.json of" in capsys.readouterr().out
    got: dict[str, torch.Tensor] = {}
    for file in sorted(hf.glob("*.safetensors")):
        got |= load_file(file)
    wanted = expected(CASE)["parameters"]
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_another_model_is_named_before_anything_is_written(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["convert", *words]) == 2
        assert not out.exists()
        return capsys.readouterr().err

    out = tmp_path / "step-3"
    other = str(FIXTURES / "zero3_bf16_2")
    told = said("deepspeed", other, str(out), "--config-file", run)
    assert "the checkpoint is not of tiny_llama debugmodel: it lacks layers.0.attention" in told
    assert "of another shape are norm.weight [7], not [16]" in told
    words = ("deepspeed", str(FIXTURES / CASE), str(out), "--config-file", run)
    told = said(*words, "--model.name=llama3")
    assert "the checkpoint is not of llama3 debugmodel: it lacks model.layers.2" in told
    assert "of another shape are lm_head.weight [96, 16], not [2048, 256]" in told


def config(name: str) -> RunConfig:
    return replace_at(RunConfig(), "model.name", name)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3"])
def test_every_parameter_of_torchtitans_models_has_a_name_there(name: str) -> None:
    assert RunWeights(config(name)).not_exported()[0] == []


def test_what_torchtitan_would_lose_is_known() -> None:
    lost, buffers = RunWeights(config("gpt_oss")).not_exported()
    assert any("mlp1_weight" in name for name in lost)
    assert all("expert_bias" in name for name in buffers)


def test_a_checkpoint_in_the_runs_own_names_is_recognised() -> None:
    weights = RunWeights(config("llama3"))
    assert weights.are_named(weights.shapes)
    assert not weights.are_named(weights.to_hf(_zeros(weights)))


def _zeros(weights: RunWeights) -> dict[str, Any]:
    return {name: torch.zeros(shape) for name, shape in weights.shapes.items()}
