"""Optimizer states sharded over the replicas: the same training as plain MiCS, on 1/R of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.counting import Collectives, count_collectives
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, said_by_all, shard, stack, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mics_dtensor import apply_mics, gradient_accumulation
from mics_dtensor.errors import CheckpointError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.topology import Topology
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
                x = batch(step, micro, seat, width=4).to(model.one.dtype)
                model(x, use).square().mean().backward()


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


@ranks(4, timeout_s=110)
def test_fifty_steps_equal_plain_mics_bit_for_bit_on_two_replicas() -> None:
    for foreach in (False, True):
        mesh = mesh_of(2, 2)
        model, plain = odd(mesh), odd(mesh)
        steps(model, sliced(model, foreach=foreach), iter(range(50)))
        steps(plain, adamw(plain, foreach=foreach), iter(range(50)))
        expect_equal(model, plain, bits=True)
        assert equal_over(locals_of(model), mesh.get_group("replicate"))


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)], ids=["4x2", "2x4"])
@ranks(8, timeout_s=110)
def test_fifty_steps_equal_plain_mics_on_four_replicas_and_on_four_shards(
    shape: tuple[int, int],
) -> None:
    mesh = mesh_of(*shape)
    model, plain = odd(mesh), odd(mesh)
    steps(model, sliced(model), iter(range(50)))
    steps(plain, adamw(plain), iter(range(50)))
    expect_equal(model, plain, bits=shape[0] == 2)
    assert equal_over(locals_of(model), mesh.get_group("replicate"))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(25, 18), nn.Linear(18, 25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def towers(mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel on one layer, rows of 9, 17, 25 on the others, and a frozen one."""
    torch.manual_seed(0)
    model = Odd()
    model.layers.append(Feedforward())
    model.layers[1].weight.requires_grad_(False)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.layers[3], mesh["tp"], plan)
    return shard(model, mesh["replicate", "shard"])


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices alone, as everyone has it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


@ranks(8, timeout_s=110)
def test_tensor_parallel_frozen_parameters_groups_and_a_scheduler() -> None:
    mesh = mesh_of(2, 2, 2)
    model, plain = towers(mesh), towers(mesh)
    mine = ReplicaShardedOptimizer(
        model, torch.optim.AdamW, param_groups=grouped(model), lr=1e-2, foreach=False
    )
    theirs = torch.optim.AdamW(grouped(plain), lr=1e-2, foreach=False)
    for each, optimizer in ((model, mine), (plain, theirs)):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=50)
        seat = dist.get_rank() // 2
        for step in range(50):
            if step % 4 == 3:  # plain HSDP, outside of the context
                each(batch(step, seat, width=4)).square().mean().backward()
            else:
                with gradient_accumulation(each, num_micro_steps=1) as a, a.micro_step():
                    each(batch(step, seat, width=4), step % 3 != 0).sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    expect_equal(model, plain, bits=True)
    assert equal_over(locals_of(model), mesh.get_group("replicate"))


@ranks(4, timeout_s=110)
def test_with_shards_on_the_cpu_and_with_the_fused_kernel() -> None:
    for options, policy in (
        ({"foreach": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ({"fused": True}, {}),
    ):
        model, plain = odd(mesh_of(2, 2), **policy), odd(mesh_of(2, 2), **policy)
        steps(model, sliced(model, **options), iter(range(10)))
        steps(plain, adamw(plain, **options), iter(range(10)))
        expect_equal(model, plain, bits=not options.get("fused"))


@ranks(4, timeout_s=110)
def test_every_elementwise_optimizer_of_torch() -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    ]
    for kind, options in kinds:
        model, plain = odd(mesh_of(2, 2)), odd(mesh_of(2, 2))
        mine = ReplicaShardedOptimizer(model, kind, lr=1e-2, **options)
        steps(model, mine, iter(range(10)))
        steps(plain, kind(plain.parameters(), lr=1e-2, **options), iter(range(10)))
        expect_equal(model, plain, bits=True)


@ranks(4, timeout_s=110)
def test_fifty_steps_over_a_save_and_a_load_in_the_middle() -> None:
    model, plain = odd(mesh_of(2, 2)), odd(mesh_of(2, 2))
    optimizer = sliced(model)
    steps(model, optimizer, iter(range(25)))
    path = said_by_all(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=path)
    model = odd(mesh_of(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    optimizer = sliced(model)
    held: dict[str, Any] = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(held, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    steps(model, optimizer, iter(range(25, 50)))
    steps(plain, adamw(plain), iter(range(50)))
    expect_equal(model, plain, bits=True)


@ranks(4, timeout_s=110)
def test_states_take_a_share_of_the_memory() -> None:
    for shape in ((2, 2), (4, 1)):
        model = odd(mesh_of(*shape))
        optimizer = sliced(model)
        steps(model, optimizer, iter(range(1)))
        for name in ("exp_avg", "exp_avg_sq"):
            held = sum(s[name].flat.numel() for s in optimizer.state.values())
            here = sum(local_of(p).numel() for p in model.parameters() if p in optimizer.state)
            num_units = len(SIZES) + 1
            assert abs(held - here / shape[0]) < shape[0] * num_units


@ranks(4, timeout_s=110)
def test_slices_follow_a_shard_that_moves() -> None:
    model, plain = odd(mesh_of(2, 2)), odd(mesh_of(2, 2))
    mine, theirs = sliced(model), adamw(plain)
    model.to(torch.float64)  # before the first step
    plain.to(torch.float64)
    for each, optimizer in ((model, mine), (plain, theirs)):
        steps(each, optimizer, iter(range(2)))
        saved = {name: whole(t).clone() for name, t in each.state_dict().items()}
        each.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                parameter.copy_(
                    distribute_tensor(saved[name], parameter.device_mesh, parameter.placements)
                )
        steps(each, optimizer, iter(range(2, 5)))
    expect_equal(model, plain, bits=True)


@ranks(8, timeout_s=110)
def test_where_a_node_holds_several_replicas_slices_cross_in_stages() -> None:
    """Bytes out of all nodes are those of the all-reduce in stages."""
    topology = Topology.uniform(world_size=8, ranks_per_node=4)
    sent = []
    models = [shard(stack(64), mesh_of(8, 1)) for _ in "ab"]
    for model in models:
        apply_mics(model, topology=topology)
    optimizers = [sliced(models[0], overlap_update=True), adamw(models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(4):
            with count_collectives() as counted:
                with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
                    model(batch(step, dist.get_rank(), width=64)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        sent.append(bytes_between(counted, topology))
    optimizers[0].wait()
    expect_equal(*models, bits=False)
    assert sent[0] <= 1.01 * sent[1], sent


def bytes_between(counted: Collectives, topology: Topology) -> float:
    """Out of all nodes, by the rings that explain counts with; of this rank's messages."""
    between = 0.0
    for call in counted.calls:
        size, nodes = len(call.ranks), {topology.node_of(rank) for rank in call.ranks}
        twice = 2 if call.kind == "all_reduce" else 1
        if len(nodes) > 1:
            between += len(nodes) * twice * call.message_bytes * (size - 1) / size / size
    total = torch.tensor(between)
    dist.all_reduce(total)
    return total.item()


@ranks(4, timeout_s=110)
def test_states_of_a_plain_optimizer_are_loaded_by_number() -> None:
    """As torch has it: states are numbered as `model.parameters()` are."""
    mesh = mesh_of(2, 2)
    plain, model = (shard(stack(depth=3), mesh) for _ in range(2))  # the root's unit comes first
    optimizers = adamw(plain), sliced(model)

    def train(its: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            with gradient_accumulation(its, num_micro_steps=2) as accumulation:
                for micro in range(2):
                    with accumulation.micro_step():
                        its(batch(step, micro, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain, optimizers[0], range(3))
    model.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    train(plain, optimizers[0], range(3, 6))
    train(model, optimizers[1], range(3, 6))
    expect_equal(model, plain, bits=True)

    other = torch.optim.AdamW(list(reversed(list(plain.parameters()))), lr=1e-2)
    other.load_state_dict(optimizers[0].state_dict())
    saved = other.state_dict()
    saved["state"] = dict(zip(saved["state"], reversed(saved["state"].values()), strict=True))
    with pytest.raises(CheckpointError, match="its parameters in another order, or is of another"):
        optimizers[1].load_state_dict(saved)
    other_model = shard(stack(depth=3), mesh)
    groups = [{"params": [p]} for p in other_model.parameters()]
    with pytest.raises(CheckpointError, match=r"groups of \[\d+\] parameters, this one of \[1, 1"):
        sliced(other_model, param_groups=groups).load_state_dict(optimizers[0].state_dict())
