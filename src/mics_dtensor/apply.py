"""apply_mics: the one call that a sharded model needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from mics_dtensor.audit import audit_units
from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.errors import ConfigError
from mics_dtensor.mesh import Ranks, make_stages, ranks_of
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import Unit, units_of


def apply_mics(
    model: nn.Module | Iterable[nn.Module], *, topology: Topology, hierarchical: bool = True
) -> None:
    """Install the hierarchical collectives on every FSDP unit whose shard group spans nodes.

    `model` is whatever `fully_shard` has been applied to, torchtitan's included, or a list of model
    parts. A unit whose group lies inside one node is left exactly as torch made it. Call it any
    time after sharding, before or after loading a checkpoint; twice is the same as once. With
    `hierarchical=False` the model is only audited, and remembered for `explain`.

    Collective: every rank of the world calls it. Raises ConfigError, on every rank and before
    anything is changed, where the model or its mesh cannot be trained right on any of them.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    units = units_of(parts)
    stage_units = units if hierarchical else []
    shard_groups = _agree(units, stage_units, topology)
    stages = make_stages(shard_groups, topology, device_type=_device_type(units))
    for unit in stage_units:
        if (its := stages.get(ranks_of(unit.shard_group))) is not None and not _is_installed(unit):
            unit.set_collectives(
                HierarchicalAllGather(its, unit=unit.name),
                HierarchicalReduceScatter(its, unit=unit.name),
            )
    for part in parts:
        # explain() has no topology to read: groups inside a node carry no trace of ours.
        object.__setattr__(part, "mics_topology", topology)


def stage_groups(model: nn.Module | Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The process groups that apply_mics made for this rank, for those who set timeouts."""
    made: dict[dist.ProcessGroup, None] = {}
    for unit in units_of(model):
        if isinstance(unit.all_gather, HierarchicalAllGather):
            stages = unit.all_gather.stages
            made |= {stages.across_nodes: None, stages.within_node: None}
    return list(made)


def _agree(units: list[Unit], stage_units: list[Unit], topology: Topology) -> list[Ranks]:
    """The shard groups of the world that still need stages, sorted; or one error on every rank."""
    mine: list[Ranks] = []
    error: str | None = None
    try:
        audit_units(units, topology)
        for unit in stage_units:
            if _is_installed(unit) or unit.shard_group is None:
                continue
            if len({topology.node_of(rank) for rank in ranks_of(unit.shard_group)}) > 1:
                _refuse_foreign_collectives(unit)
                mine.append(ranks_of(unit.shard_group))
    except ConfigError as refusal:
        error = str(refusal)
    everyone: list[tuple[list[Ranks], str | None]] = [([], None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (list(dict.fromkeys(mine)), error))
    if error is not None:
        raise ConfigError(error)
    for rank, (_, theirs) in enumerate(everyone):
        if theirs is not None:
            raise ConfigError(f"{theirs} (said by rank {rank})")
    return sorted({ranks for groups, _ in everyone for ranks in groups})


def _device_type(units: list[Unit]) -> str:
    return units[0].device.type if units else "cpu"


def _is_installed(unit: Unit) -> bool:
    return isinstance(unit.all_gather, HierarchicalAllGather)


def _refuse_foreign_collectives(unit: Unit) -> None:
    if not unit.has_default_collectives:
        raise ConfigError(
            f"unit {unit.name} already has collectives of its own "
            f"({type(unit.all_gather).__name__}, {type(unit.reduce_scatter).__name__}), and its "
            "partition group spans nodes: leave them out, or call apply_mics(hierarchical=False)"
        )
