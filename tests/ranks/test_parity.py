"""Training with MiCS is training with plain FSDP2 over all ranks, and as one process."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.ranks import ranks
from harness.sharded import batch, every_unit, mesh_of, shard, stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mics_dtensor import apply_mics, clip_grad_norm_, gradient_accumulation
from mics_dtensor.topology import Topology

Curve = tuple[torch.Tensor, torch.Tensor]  # loss and gradient norm of every step


@dataclass(frozen=True)
class Case:
    """A run: `seat` of `num_seats` data-parallel ranks, with its own data in every micro-step."""

    seat: int
    num_seats: int
    num_steps: int = 20
    num_micro_steps: int = 1
    divide_factor: float | None = None
    width: int = 5


def set_divide_factor(model: nn.Module, factor: float | None) -> None:
    if factor is not None:
        every_unit(model, lambda unit: unit.set_gradient_divide_factor(factor))
        every_unit(model, lambda unit: unit.set_force_sum_reduction_for_comms(True))


def loss_of(model: nn.Module, case: Case, *key: int) -> torch.Tensor:
    output = model(batch(*key, width=case.width))
    target = batch(*key, 99, width=case.width)[:, : output.shape[1]]
    return F.mse_loss(output, target) / case.num_micro_steps


def train(model: nn.Module, case: Case, *, mics: bool) -> Curve:
    """AdamW, as plain FSDP2 accumulates (every micro-step reduced) or with two hops."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = torch.zeros(case.num_steps), []
    for step in range(case.num_steps):
        keys = [(step, micro, case.seat) for micro in range(case.num_micro_steps)]
        if mics:
            with gradient_accumulation(model, num_micro_steps=len(keys)) as accumulation:
                for key in keys:
                    with accumulation.micro_step():
                        loss = loss_of(model, case, *key)
                        loss.backward()
                        losses[step] += loss.detach()
        else:
            for key in keys:
                loss = loss_of(model, case, *key)
                loss.backward()
                losses[step] += loss.detach()
        norms.append(clip_grad_norm_(model.parameters(), max_norm=1e9))
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(losses)
    return losses / dist.get_world_size(), torch.stack(norms)


def train_alone(model: nn.Module, case: Case) -> Curve:
    """One process that sees the data of all seats: the mean, or the sum over the divide factor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = torch.zeros(case.num_steps), []
    for step in range(case.num_steps):
        for micro in range(case.num_micro_steps):
            for seat in range(case.num_seats):
                loss = loss_of(model, case, step, micro, seat)
                (loss / (case.divide_factor or case.num_seats)).backward()
                losses[step] += loss.detach() / case.num_seats
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e9))
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.stack(norms)


def expect_equal(curve: Curve, reference: Curve, case: object) -> None:
    (losses, norms), (their_losses, their_norms) = curve, reference
    worst = ((losses - their_losses) / their_losses).abs().max().item()
    assert worst < 1e-5, (case, worst, losses, their_losses)
    worst = ((norms - their_norms) / their_norms).abs().max().item()  # Adam forgives any scale
    assert worst < 1e-4, (case, worst, norms, their_norms)


LAYOUTS = [(1, 2), (2, 2), (4, 4), (4, 2), (8, 4), (8, 2)]  # partition size, ranks a node


def expect_mics_equals_fsdp(
    num_micro_steps: int, factor: float | None, layouts: list[tuple[int, int]]
) -> None:
    case = Case(dist.get_rank(), 8, num_micro_steps=num_micro_steps, divide_factor=factor)
    plain = shard(stack(depth=1), mesh_of(8))
    set_divide_factor(plain, factor)
    reference = train(plain, case, mics=False)
    assert reference[0][-1] < reference[0][0]
    for partition_size, ranks_per_node in layouts:
        model = shard(stack(depth=1), mesh_of(8 // partition_size, partition_size))
        set_divide_factor(model, factor)
        apply_mics(model, topology=Topology.uniform(world_size=8, ranks_per_node=ranks_per_node))
        curve = train(model, case, mics=True)
        expect_equal(curve, reference, (partition_size, ranks_per_node, num_micro_steps, factor))


@ranks(8, timeout_s=170)
def test_every_partition_size_equals_fsdp_over_all_ranks() -> None:
    """Every layout meets a number of micro-steps and a factor; `matrix` has the whole grid."""
    expect_mics_equals_fsdp(1, 1.0, [(1, 2), (4, 4), (8, 4)])
    expect_mics_equals_fsdp(2, None, [(2, 2), (8, 2)])
    expect_mics_equals_fsdp(4, 1.0, [(4, 2)])


@pytest.mark.matrix
@ranks(8, timeout_s=600)
def test_the_whole_grid_equals_fsdp_over_all_ranks() -> None:
    for num_micro_steps in (1, 2, 4):
        for factor in (None, 1.0):
            expect_mics_equals_fsdp(num_micro_steps, factor, LAYOUTS)


@ranks(4)
def test_sizes_that_do_not_divide_equal_one_process() -> None:
    """Widths 3, 16 and 17 over (2, 2), and over (1, 4) on two nodes; no row for some shards."""
    for shape in ((2, 2), (1, 4)):
        for width in (3, 16, 17):
            case = Case(dist.get_rank(), 4, num_steps=5, num_micro_steps=2, width=width)
            model = shard(stack(width, 1), mesh_of(*shape))
            apply_mics(model, topology=Topology.uniform(world_size=4, ranks_per_node=2))
            curve = train(model, case, mics=True)
            expect_equal(curve, train_alone(stack(width, 1), case), (shape, width))


class Feedforward(nn.Module):
    """Two layers that tensor parallel splits, and a norm that it does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feedforward(width)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


def tower(width: int, mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Tower(width)
    if mesh is None:
        return model
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.layers[0], mesh["tp"], plan)
    return shard(model, mesh["replicate", "shard"])


@ranks(8, timeout_s=120)
def test_with_tensor_parallel_equals_one_process() -> None:
    for shape in ((2, 2, 2), (1, 4, 2)):  # the second crosses nodes of 4, its groups are strided
        for width in (3, 5, 16, 17):
            seats = shape[0] * shape[1]
            case = Case(dist.get_rank() // 2, seats, num_steps=4, num_micro_steps=2, width=width)
            model = tower(width, mesh_of(*shape))
            apply_mics(model, topology=Topology.uniform(world_size=8, ranks_per_node=4))
            curve = train(model, case, mics=True)
            expect_equal(curve, train_alone(tower(width), case), (shape, width))
