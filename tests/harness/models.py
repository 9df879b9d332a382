"""Toy models whose gradients are whole numbers known by hand, and the data to feed them.

The gradient of an element is value * pattern(element), summed over ranks and micro-steps: different
on every element, rank and micro-step, and exact in bf16 as long as it stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]
Use = Mapping[str, float]  # parameter name: value, for those that a micro-step uses on this rank
Plan = Callable[[int, int], Use]  # (rank, micro-step) -> what is used

AXES = ("replicate", "shard")


def pattern(shape: Shape) -> torch.Tensor:
    """1, 2, 3, 1, 2, 3, ...: a gradient at the wrong place shows."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) % 3 + 1).reshape(shape)


class Weights(nn.Module):
    """One unit: the parameters it is given; each micro-step uses those it is told to."""

    def __init__(self, shapes: Mapping[str, Shape], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, hidden: torch.Tensor, use: Use) -> torch.Tensor:
        total = hidden * 1
        for name, value in use.items():
            weight = getattr(self, name)
            total = total + (weight * (pattern(weight.shape) * value).to(weight.dtype)).sum()
        return total


class Toy(nn.Module):
    """Units one behind the other. A parameter is named "unit.name"; unused units do not run."""

    def __init__(
        self, units: Mapping[str, Mapping[str, Shape]], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.grad_input = False  # whether the first unit's input requires a gradient
        self.units = nn.ModuleDict({name: Weights(shapes, dtype) for name, shapes in units.items()})

    def forward(self, use: Use) -> torch.Tensor:
        hidden = torch.zeros((), requires_grad=self.grad_input)
        for unit, module in self.units.items():
            its = {key.split(".")[1]: v for key, v in use.items() if key.split(".")[0] == unit}
            if any(key.split(".")[0] == unit for key in use):
                hidden = module(hidden, {name: v for name, v in its.items() if v})
        return hidden

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by the names that `use` gives them."""
        return {
            f"{unit}.{name}": parameter
            for unit, module in self.units.items()
            for name, parameter in module.named_parameters()
        }


@dataclass(frozen=True)
class Sharding:
    """How a toy is sharded: the mesh's shape, and what FSDP2 is told about numbers."""

    replicate: int = 2
    shard: int = 2
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    divide_factor: float | None = None
    force_sum: bool = False
    reshard: bool | int | None = True

    @property
    def divisor(self) -> float:
        """What the sum over all data-parallel ranks is divided by."""
        return self.divide_factor or self.replicate * self.shard


def mesh_of(replicate: int, shard: int, *more: int) -> DeviceMesh:
    """A (replicate, shard) mesh, or (replicate, shard, tp)."""
    names = (*AXES, "tp")[: 2 + len(more)]
    return init_device_mesh("cpu", (replicate, shard, *more), mesh_dim_names=names)


def shard_toy(model: nn.Module, sharding: Sharding, mesh: DeviceMesh | None = None) -> nn.Module:
    """fully_shard on every unit of the toy and on the whole, and the settings on each."""
    mesh = mesh or mesh_of(sharding.replicate, sharding.shard)
    policy = MixedPrecisionPolicy(
        param_dtype=sharding.param_dtype,
        reduce_dtype=sharding.reduce_dtype,
        cast_forward_inputs=False,
    )
    for module in getattr(model, "units", {}).values():
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard)
    set_scale(model, sharding.divide_factor, force_sum=sharding.force_sum)
    return model


def set_scale(model: nn.Module, factor: float | None, *, force_sum: bool) -> None:
    """On every unit: neither call recurses."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            if force_sum:
                module.set_force_sum_reduction_for_comms(True)


def right_gradients(
    shapes: Mapping[str, Shape],
    plan: Plan,
    *,
    num_micro_steps: int,
    divisor: float,
    world_size: int | None = None,
) -> dict[str, torch.Tensor | None]:
    """What one process that sees all ranks' data has in `.grad`, in fp64."""
    sums: dict[str, float | None] = dict.fromkeys(shapes)
    for rank in range(world_size or dist.get_world_size()):
        for micro_step in range(num_micro_steps):
            for name, value in plan(rank, micro_step).items():
                if value:
                    sums[name] = (sums[name] or 0.0) + value
    return {
        name: None if total is None else pattern(shapes[name]).double() * total / divisor
        for name, total in sums.items()
    }


def flat_shapes(units: Mapping[str, Mapping[str, Shape]]) -> dict[str, Shape]:
    """Shapes by "unit.name"."""
    return {f"{u}.{name}": shape for u, its in units.items() for name, shape in its.items()}


def whole_gradients(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """`.grad` as one process would have it; None where this rank has None."""
    return {name: None if p.grad is None else _whole(p.grad).detach() for name, p in named.items()}


def assert_gradients(
    named: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor | None],
    *,
    rtol: float = 0.0,
    what: object = "",
) -> None:
    """Every `.grad` is right: None where it must be, equal to the last bit if rtol is 0."""
    got = {name: named[name].grad for name in right}
    missing = {name: gradient is None for name, gradient in got.items()}
    assert missing == {name: gradient is None for name, gradient in right.items()}, what
    for name, value in right.items():
        if value is None:
            continue
        gradient = _whole(got[name]).double()  # type: ignore[arg-type]
        torch.testing.assert_close(
            gradient, value, rtol=rtol, atol=0, msg=lambda text, n=name: f"{what}: {n}: {text}"
        )


def assert_replicas_equal(parameters: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Parameters and gradients are equal on all replicas to the last bit."""
    group = mesh.get_group(0)
    for tensor in parameters:
        for held in (tensor.detach(), tensor.grad):
            if held is not None:
                local = held.to_local() if isinstance(held, DTensor) else held
                seen = [torch.empty_like(local) for _ in range(group.size())]
                dist.all_gather(seen, local.contiguous(), group=group)
                assert all(torch.equal(seen[0], other) for other in seen[1:])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
