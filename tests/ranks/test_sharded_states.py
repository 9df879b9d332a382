"""Optimizer states sharded over the replicas: the same training as plain MiCS, on 1/R of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, shard, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mics_dtensor import gradient_accumulation
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of

SIZES = (9, 17, 25)


class Odd(nn.Module):
    """Rows of 9, 17 and 25, a parameter of one element, and one that only some ranks use."""

    def __init__(self, *, gated: bool = True) -> None:
        super().__init__()
        wide = [4, *SIZES]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=b != 17) for a, b in zip(wide, SIZES, strict=False)
        )
        self.one = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Parameter(torch.randn(3, 25))
        self.gated = gated

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x * self.one
        return x @ self.sometimes.t() if use else x


def odd(mesh: DeviceMesh, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(Odd(), mesh["replicate", "shard"], **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def sliced(model: nn.Module, **options: Any) -> ReplicaShardedOptimizer:
    return ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, **options)


def backwards(model: nn.Module, step: int, *, num_micro_steps: int = 2) -> None:
    seat = dist.get_rank()
    with gradient_accumulation(model, num_micro_steps=num_micro_steps) as accumulation:
        for micro in range(num_micro_steps):
            with accumulation.micro_step():
                # used on some ranks only, and by nobody in every fifth step
                use = (step + micro + seat) % 3 == 0 and step % 5 != 4
                model(batch(step, micro, seat, width=4), use).square().mean().backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterator[int]) -> None:
    for step in numbers:
        backwards(model, step)
        optimizer.step()
        optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [local_of(p.detach()).clone() for p in model.parameters()]


def expect_equal(model: nn.Module, plain: nn.Module, *, bits: bool) -> None:
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        a, b = whole(mine.detach()), whole(theirs.detach())
        if bits:
            assert torch.equal(a, b), (name, (a - b).abs().max())
        else:
            assert (a - b).norm() <= 1e-6 * b.norm(), (name, (a - b).norm() / b.norm())


@ranks(4)
def test_fifty_steps_equal_plain_mics_bit_for_bit_on_two_replicas() -> None:
    for foreach in (False, True):
        mesh = mesh_of(2, 2)
        model, plain = odd(mesh), odd(mesh)
        steps(model, sliced(model, foreach=foreach), iter(range(50)))
        steps(plain, adamw(plain, foreach=foreach), iter(range(50)))
        expect_equal(model, plain, bits=True)
        assert equal_over(locals_of(model), mesh.get_group("replicate"))


@ranks(8, timeout_s=110)
def test_fifty_steps_equal_plain_mics_on_four_replicas_and_on_four_shards() -> None:
    for shape in ((4, 2), (2, 4)):
        mesh = mesh_of(*shape)
        model, plain = odd(mesh), odd(mesh)
        steps(model, sliced(model), iter(range(50)))
        steps(plain, adamw(plain), iter(range(50)))
        expect_equal(model, plain, bits=shape[0] == 2)
        assert equal_over(locals_of(model), mesh.get_group("replicate"))
