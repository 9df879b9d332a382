"""Small sharded models, and data that differs on every rank and in every micro-step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """A residual block: a linear layer with bias and a layer norm, of `width` features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """`depth` blocks and a head: `depth` + 1 units when sharded by `shard`."""

    def __init__(self, width: int, depth: int, out: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack(width: int = 5, depth: int = 2, *, seed: int = 0, out: int = 3) -> Stack:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Stack(width, depth, out)


def mesh_of(*shape: int) -> DeviceMesh:
    """(replicate, shard), (replicate, shard, tp), or (shard,) alone."""
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard", "tp")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Every layer a unit, and the rest one more; gloo has no PREMUL_SUM, so sums are forced."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def every_unit(model: nn.Module, call: Callable[[Any], None]) -> None:
    """Call once with every FSDP module: torch's setters do not recurse."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            call(module)


def batch(*key: int, width: int = 5, rows: int = 3) -> torch.Tensor:
    """Data of a key (step, micro-step, rank, ...), the same wherever it is asked for."""
    seed = 1
    for number in key:
        seed = seed * 1009 + number + 1
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor. Collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def said_by_all(value: object) -> list[Any]:
    """`value` of every rank. Collective over the world."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def equal_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` hold the same bits, shape by shape. Collective."""
    mine = [(tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return all(theirs == mine for theirs in said)
