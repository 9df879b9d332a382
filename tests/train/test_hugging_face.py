"""Hugging Face weights leave a run and enter another through torchtitan's state-dict adapters."""

from pathlib import Path

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")
pytest.importorskip("safetensors")
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from train.small_run import configured, ours

from mics_dtensor.train.trainer import MicsTrainer

MODELS = {
    "llama3": ("--model.n_layers=2",),
    "qwen3": ("--model.name=train.tiny_experts", "--model.flavor=qwen3"),
    "deepseek_v3": ("--model.name=train.tiny_experts", "--model.flavor=deepseek_v3"),
}


def weights(trainer: MicsTrainer) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    named = [pair for part in trainer.model_parts for pair in part.named_parameters()]
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in named
    }


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m == "qwen3" else pytest.mark.matrix) for m in MODELS]
)
@ranks(4, timeout_s=150)
def test_what_goes_out_comes_in(tmp_path: Path, model: str) -> None:
    chosen = (*MODELS[model], "--checkpoint.enable=true", "--training.global_batch_size=4")
    first = ours(*configured(tmp_path, *chosen, "--checkpoint.last_save_in_hf=true"))
    initial = weights(first)
    with torch.no_grad():
        for part in first.model_parts:
            for parameter in part.parameters():
                parameter.add_(0.125)
    trained = weights(first)
    first.checkpointer.save(1, last_step=True)
    first.close()
    dist.barrier()
    folder = tmp_path / "checkpoint" / "step-1"
    assert list(folder.glob("*.safetensors"))
    load = ("--checkpoint.initial_load_in_hf=true", f"--checkpoint.initial_load_path={folder}")
    second = ours(*configured(tmp_path, *chosen, *load, "--checkpoint.folder=another"))
    second.checkpointer.load(step=-1)
    loaded = weights(second)
    assert loaded.keys() == trained.keys()
    for name, weight in loaded.items():
        assert torch.equal(weight, trained[name]), name
        assert not torch.equal(weight, initial[name]), name
    second.close()
