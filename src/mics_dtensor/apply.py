"""apply_mics: the one call that a sharded model needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from mics_dtensor.audit import audit_units
from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.errors import ConfigError, MicsError
from mics_dtensor.mesh import Ranks, Stages, make_stages, node_blocks, ranks_of
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
    shard_groups = _agree(units, topology, hierarchical=hierarchical)
    stages = make_stages(shard_groups, topology, device_type=_device_type(units))
    for unit in units if hierarchical else ():
        if (its := stages.get(ranks_of(unit.shard_group))) is not None and not _installed(unit):
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


def _agree(units: list[Unit], topology: Topology, *, hierarchical: bool) -> list[Ranks]:
    """The shard groups of the world that still need stages, sorted; or one error on every rank."""
    mine: list[Ranks] = []
    error: str | None = None
    try:
        audit_units(units, topology)
        for unit in units:
            ranks = ranks_of(unit.shard_group)
            blocks = node_blocks(ranks, topology) if ranks else []
            if (stages := _installed(unit)) is not None:
                _refuse_other_stages(unit, stages, blocks if hierarchical else [])
            elif hierarchical and len(blocks) > 1:
                _refuse_foreign_collectives(unit)
                mine.append(ranks)
    except MicsError as refusal:
        error = str(refusal)
    said = _Said(list(dict.fromkeys(mine)), error, _in_words(topology), hierarchical)
    everyone: list[_Said] = [said] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    if error is not None:
        raise ConfigError(error)
    for rank, theirs in enumerate(everyone):
        if theirs.error is not None:
            raise ConfigError(f"{theirs.error} (said by rank {rank})")
    given = sorted({f"{its.topology}, hierarchical={its.hierarchical}" for its in everyone})
    if len(given) > 1:
        raise ConfigError(
            f"ranks called apply_mics differently: {' | '.join(given)}; give every rank the same"
        )
    return sorted({ranks for its in everyone for ranks in its.shard_groups})


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others before anything is made."""

    shard_groups: list[Ranks]  # that need stages
    error: str | None
    topology: str
    hierarchical: bool


def _in_words(topology: Topology) -> str:
    words = f"{topology.num_nodes} nodes of {topology.ranks_per_node} ranks"
    return words if topology.is_contiguous else f"{words}, {list(topology.nodes)}"


def _device_type(units: list[Unit]) -> str:
    return units[0].device.type if units else "cpu"


def _installed(unit: Unit) -> Stages | None:
    gather = unit.all_gather
    return gather.stages if isinstance(gather, HierarchicalAllGather) else None


def _refuse_other_stages(unit: Unit, stages: Stages, blocks: list[Ranks]) -> None:
    """The stages that an earlier call installed must be those that this one would."""
    if ranks_of(stages.within_node) not in blocks:
        raise ConfigError(
            f"unit {unit.name} has hierarchical collectives of another apply_mics, with ranks "
            f"{list(ranks_of(stages.within_node))} in one node: give the same topology, and not "
            "hierarchical=False, or shard the model anew"
        )


def _refuse_foreign_collectives(unit: Unit) -> None:
    if not unit.has_default_collectives:
        raise ConfigError(
            f"unit {unit.name} already has collectives of its own "
            f"({type(unit.all_gather).__name__}, {type(unit.reduce_scatter).__name__}), and its "
            "partition group spans nodes: leave them out, or call apply_mics(hierarchical=False)"
        )
