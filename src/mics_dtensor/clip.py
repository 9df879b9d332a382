"""Gradient norm and clipping over parameters on any mix of meshes."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mics_dtensor.accumulate import refuse_partial_sums
from mics_dtensor.errors import ConfigError
from mics_dtensor.slices import Slice, is_partial, slice_of
from mics_dtensor.upstream import local_of, norms_of, scale_

Axes = tuple[DeviceMesh, tuple[int, ...]] | None  # of which a gradient is sharded over these axes


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`; returns the norm before, a scalar.

    The norm is that of one process, whatever meshes the parameters are on: shards are summed over
    the axes that shard them, and replicas counted once; where each replica has a slice of the
    gradient (ReplicaShardedOptimizer), slices are summed as shards are. Only scalars are sent.
    Collective over those axes: every rank that holds the parameters calls it. Raises
    AccumulationError before the last micro-step of an open gradient_accumulation has ended,
    ConfigError for a norm_type that is not above 0, and RuntimeError for a norm that is not finite
    if asked to; the gradients are then unchanged. Norms of gradients narrower than fp32 are fp32.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = total_norm(parameters, norm_type=norm_type, foreach=foreach)
    if error_if_nonfinite:
        refuse_nonfinite(norm, norm_type=norm_type)
    clip_with_norm_(parameters, max_norm=max_norm, norm=norm, foreach=foreach)
    return norm


def total_norm(
    parameters: Iterable[torch.Tensor], *, norm_type: float = 2.0, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all gradients, a scalar tensor. Collective as clip_grad_norm_ is."""
    norm_type = float(norm_type)  # torch takes "inf" too
    if not norm_type > 0:
        raise ConfigError(f"norm_type is {norm_type}; give a number above 0, or inf")
    parameters = list(parameters)
    refuse_partial_sums(parameters, what="clip_grad_norm_")
    groups: dict[Axes, list[torch.Tensor]] = {}
    for parameter in parameters:  # with and without gradient: all ranks reduce over the same axes
        groups.setdefault(_sharded_axes(parameter), [])
        its_slice = slice_of(parameter)
        if its_slice is not None:
            groups.setdefault(_sharded_axes(parameter, over_slices=its_slice), [])
        if its_slice is not None and is_partial(parameter.grad, its_slice.axis):
            axes = _sharded_axes(parameter, over_slices=its_slice)
            groups[axes].append(its_slice.of(local_of(cast("torch.Tensor", parameter.grad))))
        elif parameter.grad is not None:
            gradient = _without_partial_sums(parameter.grad)
            groups.setdefault(_sharded_axes(gradient), []).append(local_of(gradient))
    device = next((local_of(p).device for p in parameters), torch.device("cpu"))
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    zero = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
    norms = [
        _reduced_norm(gradients, axes, norm_type, foreach, zero)
        for axes, gradients in groups.items()
    ]
    if not norms:
        return zero
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole


def norm_over(
    groups: Iterable[dist.ProcessGroup], norm: torch.Tensor, *, norm_type: float
) -> torch.Tensor:
    """The norm of what the ranks of `groups` hold, each of which gives that of its own. Collective.

    A scalar; nan where one of them has a nan.
    """
    if norm_type == inf:  # a maximum of nan and a number may be the number: it is told beside it
        told = torch.stack([norm.nan_to_num(nan=0.0, posinf=inf), norm.isnan().to(norm)])
        for group in groups:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return torch.where(told[1] > 0, torch.nan, told[0])
    powers = norm**norm_type
    for group in groups:
        dist.all_reduce(powers, group=group)
    powered: torch.Tensor = powers ** (1.0 / norm_type)
    return powered


def refuse_nonfinite(norm: torch.Tensor, *, norm_type: float) -> None:
    """Raise RuntimeError for a total norm by which nothing can be clipped. No communication."""
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot "
            "be clipped; pass error_if_nonfinite=False to clip by it anyway"
        )


def clip_with_norm_(
    parameters: Iterable[torch.Tensor],
    *,
    max_norm: float,
    norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients by max_norm / (norm + 1e-6) where that is below 1. No communication."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_of(parameter.grad)
            alike.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        for (device, _), gradients in alike.items():
            scale_(gradients, factor.to(device), foreach=foreach)


def _sharded_axes(tensor: torch.Tensor, *, over_slices: Slice | None = None) -> Axes:
    """The axes that shard a tensor; with its slice, the one over the replicas too."""
    if not isinstance(tensor, DTensor):
        return None
    axis_of_slices = None if over_slices is None else over_slices.axis
    # Not `is_shard()`: it is False of the strided shards that FSDP2 makes of what tensor parallel
    # has split before.
    at = enumerate(tensor.placements)
    sharded = (
        axis
        for axis, its in at
        if axis == axis_of_slices or not (its.is_replicate() or its.is_partial())
    )
    return tensor.device_mesh, tuple(sharded)


def _without_partial_sums(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is still a sum over some axis is summed, in a copy."""
    if not isinstance(gradient, DTensor) or not any(at.is_partial() for at in gradient.placements):
        return gradient
    whole = [Replicate() if at.is_partial() else at for at in gradient.placements]
    return gradient.redistribute(placements=whole)


@torch.no_grad()
def _reduced_norm(
    gradients: list[torch.Tensor],
    axes: Axes,
    norm_type: float,
    foreach: bool | None,
    zero: torch.Tensor,
) -> torch.Tensor:
    """The norm of gradients that are sharded over the same axes of one mesh."""
    # Shards may be empty: they count as 0, where torch's max-norm raises on that rank alone.
    filled = [gradient for gradient in gradients if gradient.numel()]
    norm = zero.clone()
    if filled:
        norms = [n.to(zero) for n in norms_of(filled, norm_type, foreach=foreach)]
        norm += torch.linalg.vector_norm(torch.stack(norms), norm_type)
    mesh, sharded = axes if axes is not None else (None, ())
    reduce_over = [axis for axis in sharded if mesh is not None and mesh.size(axis) > 1]
    if mesh is None or not reduce_over:
        return norm
    return norm_over([mesh.get_group(axis) for axis in reduce_over], norm, norm_type=norm_type)
