"""A script on FSDP2 goes on where DeepSpeed stopped: the next step is that of one process."""

from __future__ import annotations

from pathlib import Path

import torch
from convert.deepspeed_models import Odd
from convert.fixtures import FIXTURES, expected
from harness.ranks import ranks
from harness.sharded import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mics_dtensor import gradient_accumulation
from mics_dtensor.checkpoint.checkpoints import Checkpoints
from mics_dtensor.checkpoint.convert.resumable import Target, write_resumable
from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint

CASE = "zero3_fp32_4"  # tied weights, two groups of the optimizer, sizes that nothing divides


def adam(model: Odd) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.groups(), lr=1e-2, betas=(0.8, 0.95), eps=1e-7)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def one_process() -> dict[str, torch.Tensor]:
    """DeepSpeed's values put into torch's AdamW by hand, and one step over the data of 4 ranks."""
    wanted = expected(CASE)
    model = Odd()
    model.load_state_dict(wanted["parameters"], strict=False)
    optimizer = adam(model)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": wanted["exp_avg"][name].clone(),
            "exp_avg_sq": wanted["exp_avg_sq"][name].clone(),
        }
    (sum(loss_of(model, rank) for rank in range(4)) / 4).backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(folder: Path, replicate: int, partition: int) -> None:
    model = Odd()
    fully_shard(model, mesh=mesh_of(replicate, partition)["replicate", "shard"])
    optimizer = adam(model)
    with Checkpoints(folder, model=model, optimizer=optimizer) as checkpoints:
        manifest = checkpoints.resume()
    assert manifest is not None
    assert (manifest.step, manifest.versions["deepspeed"]) == (3, "0.19.8")
    assert int(model.seen) == 6
    wanted = expected(CASE)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), wanted["parameters"][name])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[parameter][kind]), wanted[kind][name])
    with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
        loss_of(model, torch.distributed.get_rank()).backward()
    optimizer.step()
    for name, value in one_process().items():
        torch.testing.assert_close(whole(dict(model.named_parameters())[name]), value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


@ranks(4)
def test_the_next_step_is_that_of_one_process(tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        write_resumable(ZeroCheckpoint.open(FIXTURES / CASE), tmp_path / "step-3", Target())
    torch.distributed.barrier()
    for replicate, partition in ((2, 2), (1, 4), (4, 1)):
        check(tmp_path, replicate, partition)
