"""What gradient_accumulation asks of FSDP2's insides: the exchange of meshes, and the reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)

from mics_dtensor.upstream.parameter import ShardedParameter
from mics_dtensor.upstream.units import ORIGINAL, MeshInfo, Unit, groups_of, original_of


@contextmanager
def first_hop_only(units: Sequence[Unit]) -> Iterator[None]:
    """Within, FSDP2 reduces gradients inside the partition group and knows no replicas.

    Each group's mesh_info is exchanged for one of the same mesh without the replicate axis;
    placements stay. On leaving ours becomes the original again, and what was written meanwhile
    (lazy init, set_reshard_after_forward, set_separate_reduce_scatter_group) stays. The divide
    factor of a unit with one shard is taken out: with it FSDP2 may divide twice (force-sum, fp16).
    """
    narrowed: dict[int, MeshInfo] = {}  # id(original) -> ours
    factors: list[tuple[Any, float]] = []
    for unit in units:
        if unit.num_shards == 1 and (factor := unit.group.gradient_divide_factor) is not None:
            factors.append((unit.group, factor))
            unit.group.gradient_divide_factor = None
        original = unit.group.mesh_info
        if not isinstance(original, DDPMeshInfo):
            continue
        if id(original) not in narrowed:
            narrowed[id(original)] = _without_replicas(original)
        ours = narrowed[id(original)]
        if unit.group.post_forward_mesh_info == original:
            unit.group.post_forward_mesh_info = ours
        unit.group.mesh_info = ours
    try:
        yield
    finally:
        for group, factor in factors:
            if group.gradient_divide_factor is None:
                group.gradient_divide_factor = factor
        for ours in narrowed.values():
            _copy_reduce_scatter_group(ours, getattr(ours, ORIGINAL))
        for unit in units:
            group = unit.group
            group.post_forward_mesh_info = original_of(group.post_forward_mesh_info)
            group.mesh_info = original_of(group.mesh_info)


def _without_replicas(original: MeshInfo) -> MeshInfo:
    spmd = {
        name: getattr(original, name)
        for name in ("dp_mesh_dims", "spmd_mesh")
        if hasattr(original, name)  # torch >= 2.13
    }
    ours: MeshInfo
    if isinstance(original, HSDPMeshInfo):
        ours = FSDPMeshInfo(original.mesh, shard_mesh_dim=original.shard_mesh_dim, **spmd)
        _copy_reduce_scatter_group(original, ours)
    else:  # replicate(): nothing is sharded, and in a micro-step nothing is sent
        ours = DataParallelMeshInfo(
            original.mesh, replicate_mesh_dim=original.replicate_mesh_dim, **spmd
        )
    setattr(ours, ORIGINAL, original)
    return ours


def _copy_reduce_scatter_group(source: MeshInfo, target: MeshInfo) -> None:
    if hasattr(source, "reduce_scatter_process_group"):  # torch >= 2.13
        target.reduce_scatter_process_group = source.reduce_scatter_process_group  # type: ignore[attr-defined]


REDUCED_ALONE = "mics_reduced_alone"  # our attribute, on FSDPParamGroup


def reduce_alone(unit: Unit, params: Sequence[ShardedParameter]) -> None:
    """From now on `params` are left out of what `whole_units` fills up with zeros.

    For those whose gradients come, on every rank or on none, in a message of their own: zeros for
    them beside the others' would be that message once more.
    """
    setattr(unit.group, REDUCED_ALONE, tuple(param.fsdp for param in params))


@contextmanager
def whole_units(units: Sequence[Unit], foresee: Callable[[Unit], None]) -> Iterator[None]:
    """Within, every unit that takes part in a backward is reduced whole, zeros where it was unused.

    FSDP2 reduces what has a gradient on this rank; where ranks of a partition group have used
    other parameters of a unit, it mixes them in silence, or hangs. `foresee` is called before,
    while what this rank has used can be told. A unit out of the backward sends nothing, as before.
    """
    replaced = [(unit.group, vars(unit.group).get("post_backward")) for unit in units]
    for unit in units:
        unit.group.post_backward = partial(_post_backward, unit, unit.group.post_backward, foresee)
    try:
        yield
    finally:
        for group, before in replaced:
            del group.post_backward
            if before is not None:
                group.post_backward = before


def _post_backward(
    unit: Unit, then: Callable[..., None], foresee: Callable[[Unit], None], *unused: Any
) -> None:
    foresee(unit)
    state, group = unit.group._training_state, unit.group
    # Of a group of several modules some may run alone (a loss in chunks): each call then reduces
    # its own, and zeros for the others would be sent once a chunk.
    in_part = len(getattr(group, "modules", ())) > 1 and state == TrainingState.FORWARD
    has_gradient = any(param.has_unreduced_gradient() for param in unit.params)
    if group.reduce_grads and not in_part and (has_gradient or state == TrainingState.PRE_BACKWARD):
        for param in unit.params:
            if param.fsdp not in getattr(group, REDUCED_ALONE, ()):
                param.fill_unreduced_gradient()
        if any(param.fsdp.unsharded_accumulated_grad is not None for param in unit.params):
            for param in unit.params:  # of one dtype: FSDP2 asserts it
                if param.has_unreduced_gradient():
                    param.fsdp.accumulate_unsharded_grad_if_needed()  # else the sum is replaced
                    param.fsdp.to_accumulated_grad_if_needed()
    trained = [param for param in unit.params if param.parameter.requires_grad]
    if not any(param.parameter.grad_dtype is None for param in trained):
        then(*unused)
        return
    # Some optimizer takes gradients wider than the parameters: FSDP2 is not to round them before
    # they are added up. Set each time, since unshard() sets it back.
    narrow, group._orig_dtype = group._orig_dtype, torch.float32
    try:
        then(*unused)
    finally:
        group._orig_dtype = narrow


def show_shards(units: Sequence[Unit]) -> None:
    """Let every unit show its shards. FSDP2 leaves a root gathered after a forward alone, and a
    unit that had no part in the backward as it was.
    """
    for unit in units:
        unit.group.reshard()


OWED = "mics_owed"  # our attribute, on FSDPParamGroup


def owe(units: Sequence[Unit], pay: Callable[[], None]) -> None:
    """`pay` is to be called before anything else is sent for `units`."""
    for unit in units:
        setattr(unit.group, OWED, pay)


def owed(units: Sequence[Unit]) -> list[Callable[[], None]]:
    """What is owed for `units`, each once; from now on it is not."""
    found = [vars(unit.group).pop(OWED, None) for unit in units]
    return list(dict.fromkeys(pay for pay in found if pay is not None))


def reset_after_exception(units: Sequence[Unit]) -> None:
    """Bring the FSDP roots of `units` to where a forward may start; drop what is unreduced."""
    roots = {id(unit.state._state_ctx): unit.state._state_ctx for unit in units}
    for context in roots.values():
        for state in context.all_states:
            if state._is_root and hasattr(state, "_reset_iter_state"):  # torch >= 2.13
                state._reset_iter_state()
            elif state._is_root:
                _reset_iter_state_2_11(state)
    for unit in units:
        for param in unit.params:
            param.drop_unreduced_gradient()


def _reset_iter_state_2_11(root: Any) -> None:
    """What reset_iter_state() of torch 2.13 does, for a release that lacks it."""
    stream = root._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        held = getattr(root._comm_ctx, name)
        if held is not None and held.event is not None:
            stream.wait_event(held.event)
        setattr(root._comm_ctx, name, None)
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in groups_of(state):
            if (result := group._all_gather_result) is not None:
                if result.all_gather_event is not None:
                    stream.wait_event(result.all_gather_event)
                if isinstance(result.all_gather_work, dist.Work):
                    result.all_gather_work.wait()
                group._all_gather_result = None
            group._wait_for_post_backward()
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
