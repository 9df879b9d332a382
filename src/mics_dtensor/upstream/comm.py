"""Private names of torch's communication."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_Collective = Callable[..., dist.Work | None]
all_gather: _Collective
reduce_scatter: _Collective
if hasattr(dist, "all_gather_single"):  # the names of torch >= 2.13
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def coalescing(group: dist.ProcessGroup, *, async_op: bool) -> Any:
    """Torch's coalescing manager: the collectives inside go out in one launch."""
    return dist.distributed_c10d._coalescing_manager(group, async_ops=async_op)


def timeout_of(group: dist.ProcessGroup | None, device_type: str) -> timedelta | None:
    """The timeout of a group (default: the world); new_group() would take the backend's instead."""
    world = group or dist.distributed_c10d._get_default_group()
    options = getattr(world._get_backend(torch.device(device_type)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a group (default: the world); public from torch 2.14 on."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor, *, foreach: bool | None) -> None:
    """Multiply each tensor by a scalar tensor, in place."""
    if foreach is not False and tensors:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def norms_of(
    tensors: list[torch.Tensor], norm_type: float, *, foreach: bool | None
) -> list[torch.Tensor]:
    """The norm of each tensor, in fp32 at least, in some order."""
    norms: list[torch.Tensor] = []
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (_, dtype), its in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        if foreach is not False:
            norms += torch._foreach_norm(its, norm_type, dtype=wide)
        else:
            norms += [torch.linalg.vector_norm(tensor, norm_type, dtype=wide) for tensor in its]
    return norms
