"""The program goes on from a converted checkpoint: on every rank, every value and every counter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from convert.fixtures import FIXTURES, expected
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from train import tiny_llama
from train.small_run import configured, ours

from mics_dtensor.cli import main
from mics_dtensor.errors import CheckpointError

CASE = "zero3_llama_2"


def as_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torchtitan's own adapter and model make of a whole state dict."""
    spec = tiny_llama.model_registry("tiny")
    model = spec.model.build()
    model.load_state_dict(Llama3StateDictAdapter(spec.model, None).from_hf(dict(tensors)))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


# torchtitan's scheduler asks torch's for its rate when it is loaded.
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@ranks(4, timeout_s=150)
def test_the_program_resumes(tmp_path: Path) -> None:
    run = (
        "--model.name=train.tiny_llama",
        "--model.n_layers=none",
        "--checkpoint.enable",
        "--checkpoint.exclude_from_loading=dataloader",
    )
    wanted = {kind: as_parameters(tensors) for kind, tensors in expected(CASE).items()}
    config, layout = configured(tmp_path, *run)
    if dist.get_rank() == 0:
        words = ["convert", "deepspeed", str(FIXTURES / CASE), str(tmp_path / "checkpoint/step-3")]
        assert main([*words, "--config-file", str(tmp_path / "small.toml"), *run]) == 0
    dist.barrier()
    trainer = ours(config, layout)
    assert trainer.checkpointer.load()
    [model], [optimizer] = trainer.model_parts, trainer.optimizers.optimizers
    parameters = dict(model.named_parameters())
    assert parameters.keys() == wanted["parameters"].keys()
    for name, parameter in parameters.items():
        assert torch.equal(whole(parameter), wanted["parameters"][name]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[parameter][kind]), wanted[kind][name]), name
        assert optimizer.state[parameter]["step"] == 3
    assert {(group["eps"], group["betas"]) for group in optimizer.param_groups} == {
        (1e-7, (0.8, 0.95))
    }
    assert {group["fused"] for group in optimizer.param_groups} == {True}  # the run's own choice
    assert trainer.step == 3
    assert {its.last_epoch for its in trainer.lr_schedulers.schedulers} == {3}
    trainer.close()


@ranks(4, timeout_s=150)
def test_one_that_was_converted_for_a_script_says_what_was_left_out(tmp_path: Path) -> None:
    run = ("--model.name=train.tiny_llama", "--model.n_layers=none", "--checkpoint.enable")
    loads = "--checkpoint.exclude_from_loading=dataloader"
    path = tmp_path / "checkpoint/step-3"
    config, layout = configured(tmp_path, *run, loads)
    if dist.get_rank() == 0:
        assert main(["convert", "deepspeed", str(FIXTURES / CASE), str(path)]) == 0
    dist.barrier()
    trainer = ours(config, layout)
    with pytest.raises(CheckpointError) as raised:
        trainer.checkpointer.load()
    said = str(raised.value)
    assert said.startswith(f"{path} is of another model: it lacks ")
    assert "it was converted from DeepSpeed without --config-file" in said
    assert "mics convert deepspeed OLD_RUN CHECKPOINT --config-file RUN.toml" in said
    assert "\n" not in said
    trainer.close()
