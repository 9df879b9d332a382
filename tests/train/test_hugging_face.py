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

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.load import load
from mics_dtensor.train.trainer import MicsTrainer
from mics_dtensor.train.weights import RunWeights, refuse_lost_weights

OWN = "--model.name=train.tiny_experts"
SMALL = ("--model.n_layers=2", "--parallelism.spmd_backend=partial_dtensor")
"""deepseek_v3 has experts from the second block on. On torch 2.14.1 torchtitan itself cannot cut
qwen3's experts under its default there, spmd_types: "different mesh objects"."""
MODELS = {
    "llama3": (),
    "qwen3": ("--model.name=qwen3", "--model.flavor=debugmodel"),
    "qwen3 with experts": (OWN, "--model.flavor=qwen3"),
    "deepseek_v3": (OWN, "--model.flavor=deepseek_v3"),
}
BY_DEFAULT = [("qwen3 with experts", 2)]  # the rest is the matrix


def weights(trainer: MicsTrainer) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    named = [pair for part in trainer.model_parts for pair in part.named_parameters()]
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in named
    }


@pytest.mark.parametrize(
    ("model", "partition_size"),
    [
        pytest.param(model, size, marks=() if (model, size) in BY_DEFAULT else pytest.mark.matrix)
        for model in MODELS
        for size in (1, 2, 4)
    ],
)
@ranks(4, timeout_s=150)
def test_what_goes_out_comes_in(tmp_path: Path, model: str, partition_size: int) -> None:
    """With 4, 2 and 1 replicas; the weights are whole on every rank, and the same in both runs."""
    chosen = (
        *MODELS[model],
        *SMALL,
        f"--mics.partition_size={partition_size}",
        "--checkpoint.enable=true",
        "--training.global_batch_size=4",
    )
    first = ours(*configured(tmp_path, *chosen, "--checkpoint.last_save_in_hf=true"))
    initial = weights(first)
    with torch.no_grad():
        for part in first.model_parts:
            for number, parameter in enumerate(part.parameters()):
                parameter.mul_(1 + number / 64).add_(0.125)
    trained = weights(first)
    assert model not in ("qwen3 with experts", "deepseek_v3") or any("EFD" in n for n in trained)
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


@ranks(3, timeout_s=100)
def test_experts_that_the_adapter_cannot_take_apart_are_refused_before_training(
    tmp_path: Path,
) -> None:
    cut = (
        *MODELS["qwen3 with experts"],  # 8 of them
        *SMALL,
        "--mics.partition_size=3",
        "--mics.ranks_per_node=3",
        "--training.global_batch_size=3",
        "--checkpoint.enable=true",
    )
    with pytest.raises(ConfigError, match=r"evenly divided by shard degree \(3\).*mics convert hf"):
        ours(*configured(tmp_path, *cut, "--checkpoint.last_save_in_hf=true"))
    ours(*configured(tmp_path, *cut)).close()


@pytest.mark.parametrize("key", ["last_save_in_hf", "initial_load_in_hf"])
def test_parameters_without_a_name_at_hugging_face_are_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "gpt_oss"\nflavor = "debugmodel"\nn_layers = 1\n'
    )
    asked = ("--config-file", str(tmp_path / "run.toml"), f"--checkpoint.{key}=true")
    refuse_lost_weights(load(asked).config)  # nothing is read or written
    run = load([*asked, "--checkpoint.enable=true"])
    with pytest.raises(ConfigError) as refused:
        refuse_lost_weights(run.config)
    assert f"checkpoint.{key} = true: torchtitan's adapter for gpt_oss" in str(refused.value)
    lost, _ = RunWeights(run.config).not_exported()
    assert f"for {len(lost)} parameters ({lost[0]}, {lost[1]}, " in str(refused.value)
    assert all("experts" in name for name in lost)
    of_llama = [each.replace("gpt_oss", "llama3") for each in asked]
    Path(tmp_path / "run.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    refuse_lost_weights(load([*of_llama, "--checkpoint.enable=true"]).config)
