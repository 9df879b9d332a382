"""Refuses what torch accepts and gets wrong: group order, axis order, groups unlike their mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mics_dtensor.errors import AccumulationError, ConfigError
from mics_dtensor.mesh import Ranks, node_blocks, ranks_of
from mics_dtensor.slices import Slice, slice_of
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import ShardedParameter, Unit, hooks_of


def audit_units(units: Sequence[Unit], topology: Topology) -> None:
    """Raise ConfigError for the first unit that cannot be trained right. No communication."""
    if not units:
        raise ConfigError(
            "the model has no FSDP units: call torch.distributed.fsdp.fully_shard on its blocks "
            "and on the model, with mesh=mesh['replicate', 'shard'], before apply_mics"
        )
    if not isinstance(topology, Topology):
        raise ConfigError(
            f"topology is no Topology but {topology!r}: give Topology.detect(), or "
            "Topology.uniform(world_size=..., ranks_per_node=...)"
        )
    running = dist.get_world_size()
    if topology.world_size != running:
        raise ConfigError(
            f"the topology is of {topology.world_size} ranks, but {running} are running; give "
            f"Topology.uniform(world_size={running}, ranks_per_node=...) or Topology.detect()"
        )
    for unit in units:
        _audit_axes(unit)
        _audit_order(unit)
        if unit.shard_group is not None:
            blocks = node_blocks(ranks_of(unit.shard_group), topology)
            _audit_nodes(unit, blocks, topology)


def unheld_parameter(parts: Iterable[nn.Module], units: Sequence[Unit]) -> str | None:
    """What is wrong where the model and its units have different parameters; None if nothing.

    Such a parameter is trained by a gradient that nobody reduces, and replicas part in silence.
    """
    if all(unit.num_shards * unit.num_replicas == 1 for unit in units):
        return None  # there is nobody to reduce it with
    for unit in units:
        for param in unit.params:
            if all(param.shown is not form for form in param.forms):
                return (
                    f"{param.name} was replaced in its module, and unit {unit.name} still holds "
                    "the one before: copy into parameters in place, or replace one by a DTensor of "
                    "the same placements and call model.to(device) with the device it is on"
                )
    held = {id(form) for unit in units for param in unit.params for form in param.forms}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                return (
                    f"{name} requires a gradient, but no FSDP unit holds it, so that nobody would "
                    "reduce the gradient over the ranks: leave it out of ignored_params and call "
                    "fully_shard on the model, or freeze it"
                )
    return None


def audit_gradients(units: Sequence[Unit], *, static: bool) -> None:
    """Raise AccumulationError for what accumulation would lose or corrupt. No communication."""
    for unit in units:
        if (why := _unfit(unit, static=static)) is not None:
            raise AccumulationError(f"unit {unit.name}: {why}")


def lost_at_boundary(
    units: Sequence[Unit], frozen: Sequence[tuple[ShardedParameter, torch.Tensor | None]]
) -> str | None:
    """What this rank would lose if the second hop began now, in a sentence; None if nothing.

    `frozen` are the parameters that required no gradient when the context opened, with their
    `.grad` of then.
    """
    for unit in units:
        if not unit.reduces_gradients:
            return (
                f"gradient sync of unit {unit.name} is off at the boundary: call "
                "set_requires_gradient_sync(True) before the backward of the last micro-step"
            )
        for param in unit.params:
            if param.has_unreduced_gradient():
                return (
                    f"the gradient of {param.name} was not reduced: run a backward with gradient "
                    "sync on in the last micro-step"
                )
    for param, before in frozen:
        if param.parameter.grad is not before:
            return (
                f"{param.name} has a gradient, but did not require one when the context opened: "
                "set requires_grad before gradient_accumulation"
            )
    return None


def _audit_axes(unit: Unit) -> None:
    """FSDP2 reads the mesh by position, so (shard, replicate) would swap the two in silence."""
    names = unit.mesh.mesh_dim_names
    if names is None or unit.mesh.ndim != 2:
        return
    replicate, shard = unit.mesh_axes
    wrong_replicate = replicate is not None and "shard" in names[replicate]
    wrong_shard = shard is not None and "replicate" in names[shard]
    if wrong_replicate or wrong_shard:
        raise ConfigError(
            f"unit {unit.name}: fully_shard reads a 2-D mesh as (replicate, shard), but its axes "
            f"are named {names}; pass mesh[{names[1]!r}, {names[0]!r}]"
        )


def _audit_nodes(unit: Unit, blocks: list[Ranks], topology: Topology) -> None:
    """A partition group that spans nodes holds all that its mesh has in each of them.

    Other ranks of those nodes may belong to meshes of their own: tensor parallel, pipelines.
    """
    if len(blocks) == 1:
        return
    ranks = {int(rank) for rank in unit.mesh.mesh.flatten().tolist()}
    for block in blocks:
        node = topology.node_of(block[0])
        beside = sorted(r for r in ranks if topology.node_of(r) == node and r not in block)
        if beside:
            group = list(ranks_of(unit.shard_group))
            raise ConfigError(
                f"unit {unit.name}: the partition group of ranks {group} has ranks {list(block)} "
                f"in node {node}, and leaves {beside} there to another group: order the mesh so "
                "that groups fill nodes (init_mesh does)"
            )


def _audit_order(unit: Unit) -> None:
    """Process groups sort their ranks; a mesh in another order gathers wrong weights in silence."""
    for axis, group in zip(unit.mesh_axes, (unit.replicate_group, unit.shard_group), strict=True):
        if axis is None or group is None:
            continue
        in_mesh = _line_of_mesh(unit, axis)
        in_group = list(ranks_of(group))
        if in_mesh != in_group:
            raise ConfigError(
                f"unit {unit.name}: the mesh has the ranks of this rank's group in the order "
                f"{in_mesh}, but its process group has {in_group}; torch would gather wrong "
                "weights without an error: make the mesh with ascending ranks (init_mesh does)"
            )


def _line_of_mesh(unit: Unit, axis: int) -> list[int]:
    """The ranks along `axis` of the unit's mesh, through this rank."""
    mesh, rank = unit.mesh.mesh, dist.get_rank()
    lines = mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis]).tolist()
    return next(([int(r) for r in line] for line in lines if rank in line), [])


def _unfit(unit: Unit, *, static: bool) -> str | None:
    if unit.has_pending_partial_sum:
        return (
            "FSDP2 holds a partial sum of set_requires_all_reduce(False): run a backward with "
            "set_requires_all_reduce(True), or zero the step with reset_iter_state(), before"
        )
    if unit.has_all_reduce_hook:
        return (
            "its all-reduce hook would be called in every micro-step with the gradient of one "
            "replica: remove it (set_all_reduce_hook), and act on .grad after the context"
        )
    for param in unit.params:
        if any(not isinstance(hook, Slice) for hook in hooks_of(param.parameter)):
            return (
                f"{param.name} has a post-accumulate-grad hook, which would see the partial sum of "
                "one replica: remove it, and act on .grad after the context"
            )
        if param.has_unreduced_gradient():
            return (
                f"{param.name} has a gradient that a backward without gradient sync has left "
                "unreduced: reduce it with a backward, or drop it with reset_iter_state(), before"
            )
        if static and param.parameter.requires_grad and param.parameter.dtype.itemsize < 4:
            return (
                f"static_gradients cannot hold the fp32 sum of {param.name}, which is "
                f"{param.parameter.dtype}: keep the parameters in fp32 (MixedPrecisionPolicy casts)"
            )
    trained = [param for param in unit.params if param.parameter.requires_grad]
    unsliced = [param.name for param in trained if slice_of(param.parameter) is None]
    if static and len(unsliced) < len(trained):
        return (
            "static_gradients keeps whole gradients, and ReplicaShardedOptimizer has slices of "
            "them; leave static_gradients out, or use a plain optimizer"
        )
    if unsliced and len(unsliced) < len(trained):
        return (
            f"{unsliced[0]} requires a gradient, but did not when ReplicaShardedOptimizer was made "
            "for the unit: freeze it, or make the optimizer anew"
        )
    return None
