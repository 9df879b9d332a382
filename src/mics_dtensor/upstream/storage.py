"""Shards as an optimizer of slices needs them: their storage, their place, hooks on parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mics_dtensor.upstream.parameter import ShardedParameter


def flat_shard(param: ShardedParameter) -> torch.Tensor:
    """The shard of this rank, 1-D, without padding; shares the parameter's storage."""
    return param.local.detach().view(-1)


def lay_end_to_end(params: Sequence[ShardedParameter], *, least_numel: int) -> torch.Tensor | None:
    """Move the shards of a unit into one storage, end to end, and re-point FSDP2 to it.

    Returns that storage, 1-D, of at least `least_numel` elements; None, with nothing changed, where
    the shards are not plain tensors of one dtype and device. FSDP2 gathers a shard with its
    padding, whose content nobody reads: here it is what lies behind, at the end zeros.
    """
    locals_ = [param.local for param in params]
    kept = [param.fsdp._sharded_param_data for param in params]
    alike = {(type(each), each.dtype, each.device) for each in (*locals_, *kept)}
    if len(alike) != 1 or type(locals_[0]) is not torch.Tensor or locals_[0].is_meta:
        return None
    if not all(each.is_contiguous() for each in locals_):
        return None
    starts = list(accumulate((each.numel() for each in locals_), initial=0))
    padded = [start + param.padded_numel for start, param in zip(starts, params, strict=False)]
    room = torch.zeros(
        max(least_numel, *padded),
        dtype=locals_[0].dtype,
        device=locals_[0].device,
        pin_memory=bool(kept[0].is_pinned()),
    )
    for param, local, start, end in zip(params, locals_, starts, padded, strict=False):
        kept_here = _from_its_own_start(room, start, end)
        view = kept_here[: local.numel()]
        view.copy_(local.detach().reshape(-1))
        param.fsdp._sharded_param_data = kept_here
        param.fsdp.sharded_param._local_tensor = view.view(local.shape)
    return room


def _from_its_own_start(room: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """A part of `room`, of the same memory, whose storage starts with it.

    Torch cannot copy a DTensor whose shard starts further on in its storage (copy.deepcopy, and
    with it the asynchronous saving of DCP); and FSDP2 tells by the storage that a shard is its own.
    """
    storage = room.untyped_storage()[start * room.itemsize : end * room.itemsize]
    return room.new_empty(0).set_(storage, 0, (end - start,), (1,))


def lies_end_to_end(params: Sequence[ShardedParameter], room: torch.Tensor) -> bool:
    """Whether the shards are still where `lay_end_to_end` has put them."""
    at = room.data_ptr()
    for param in params:
        local = param.local
        if local.dtype != room.dtype or (local.numel() and local.data_ptr() != at):
            return False
        at += local.numel() * local.itemsize
    return True


def narrow_parameters(
    parts: Iterable[Any], parameters: Iterable[nn.Parameter], dtype: torch.dtype
) -> None:
    """As `module.to(dtype)`, of these parameters alone: buffers and the others stay."""
    chosen = {id(parameter) for parameter in parameters}

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if id(tensor) in chosen else tensor

    for part in parts:
        part._apply(narrow)


def rewrites_state_dict(module: nn.Module) -> bool:
    """Whether a hook that is neither torch's nor ours may compute with the state dict's values.

    torchtitan's fused projections split themselves so. Torch's own hooks only rename.
    """
    hooks: Iterable[Any] = module._state_dict_hooks.values()
    theirs = (getattr(hook, "func", hook).__module__ or "" for hook in hooks)
    return any(name.partition(".")[0] not in ("torch", "mics_dtensor") for name in theirs)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, has been written to in place."""
    return tensor._version


def is_replaced(param: ShardedParameter, parameter: nn.Parameter) -> bool:
    """Whether FSDP2 holds another object than `parameter` by now (load_state_dict(assign=True))."""
    return param.fsdp.sharded_param is not parameter


def mesh_of_parameter(param: ShardedParameter) -> DeviceMesh:
    """The mesh of the parameter's placements: (replicate, shard), with tensor parallel one more."""
    mesh: DeviceMesh = param.fsdp._sharding_spec.mesh
    return mesh


def as_summand(param: ShardedParameter, local: torch.Tensor, *, axis: int | None) -> DTensor:
    """`local`, of the shape of this rank's shard, as a gradient; no copy.

    It is a summand over `axis` of the parameter's mesh, and of a dtype of its own.
    """
    spec = param.fsdp._sharding_spec
    placements = list(spec.placements)
    if axis is not None:
        placements[axis] = Partial()
    return DTensor.from_local(
        local, spec.mesh, placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def place_of_shard(parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets and the sizes of this rank's shard in the whole tensor."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offsets), tuple(sizes)


def hooks_of(parameter: torch.Tensor) -> list[Any]:
    """The post-accumulate-grad hooks of a parameter."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def add_hook(parameter: Any, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call `hook` after each accumulation into `.grad`; returns the undoing."""
    remove: Callable[[], None] = parameter.register_post_accumulate_grad_hook(hook).remove
    return remove


def run_load_hooks(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Those before loading, which may exchange the state dict; without one, those after."""
    its: Any = optimizer
    if state_dict is None:
        for hook in its._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)
        return {}
    for hook in its._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where DCP's `.metadata` says that a value lies: bytes [offset, offset + length) of `file`."""
    return _StorageInfo(file, offset, length)
