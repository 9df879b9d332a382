"""apply_mics: the one call that a sharded model needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mics_dtensor.audit import audit_units, unheld_parameter
from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.errors import ConfigError, MicsError
from mics_dtensor.mesh import (
    Ranks,
    Stages,
    hop_stages_of,
    make_stages,
    node_blocks,
    node_mesh,
    ranks_of,
    remember_hop_stages,
)
from mics_dtensor.parts import parts_of
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import (
    Unit,
    can_reshard_over_smaller_group,
    reshard_after_forward_over,
    units_of,
)


def apply_mics(
    model: nn.Module | Iterable[nn.Module],
    *,
    topology: Topology,
    hierarchical: bool = True,
    node_local_backward: bool = False,
) -> None:
    """Install the hierarchical collectives on every FSDP unit whose shard group spans nodes.

    `model` is whatever `fully_shard` has been applied to, torchtitan's included, or a list of model
    parts. A unit whose group lies inside one node is left exactly as torch made it. Call it any
    time after sharding, before or after loading a checkpoint; twice is the same as once. With
    `hierarchical=False` the model is only audited, and remembered for `explain`. Where a node holds
    several replicas, the second hop sums inside the node before it crosses.

    `node_local_backward`: what the forward has gathered stays cut inside each node, so that the
    backward gathers without crossing nodes (ZeRO++, arXiv 2306.10209, section 3.2, without a second
    copy that can go stale). The same gradients, bit for bit; two thirds of the bytes between nodes
    of a micro-step; in memory, until the backward, one local_size-th of every such unit per rank.
    It holds for units that reshard after the forward.

    Collective: every rank of the world calls it. Raises ConfigError, on every rank and before
    anything is changed, where the model or its mesh cannot be trained right on any of them.
    """
    parts = parts_of(model)
    units = units_of(parts)
    if node_local_backward and not hierarchical:
        raise ConfigError("node_local_backward is a part of the hierarchy: leave hierarchical on")
    there = hop_stages_of(parts)
    groups = _agree(parts, there, _Arguments(topology, hierarchical, node_local_backward))
    stages = make_stages(groups, topology, device_type=_device_type(units))
    hop_groups = {ranks_of(unit.replicate_group) for unit in units if hierarchical}
    remember_hop_stages(
        parts, {ranks: its for ranks, its in {**there, **stages}.items() if ranks in hop_groups}
    )
    for unit in units if hierarchical else ():
        if (its := stages.get(ranks_of(unit.shard_group))) is not None and not _installed(unit):
            unit.set_collectives(
                HierarchicalAllGather(its, unit=unit.name),
                HierarchicalReduceScatter(its, unit=unit.name),
            )
    if node_local_backward:
        _keep_cut_inside_nodes(units)
    for part in parts:
        # explain() has no topology to read: groups inside a node carry no trace of ours.
        object.__setattr__(part, "mics_topology", topology)


def stage_groups(model: nn.Module | Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The process groups that apply_mics made for this rank, for those who set timeouts."""
    made: dict[dist.ProcessGroup, None] = {}
    parts = parts_of(model)
    for unit in units_of(parts):
        if isinstance(unit.all_gather, HierarchicalAllGather):
            stages = unit.all_gather.stages
            made |= {stages.across_nodes: None, stages.within_node: None}
    for stages in hop_stages_of(parts).values():
        made |= {stages.across_nodes: None, stages.within_node: None}
    return list(made)


def _keep_cut_inside_nodes(units: list[Unit]) -> None:
    meshes: dict[Ranks, DeviceMesh] = {}
    for unit in units:
        if (stages := _installed(unit)) is not None and unit.reshards_after_forward:
            if stages.ranks not in meshes:
                meshes[stages.ranks] = node_mesh(stages, device_type=unit.device.type)
            reshard_after_forward_over(unit, meshes[stages.ranks])


def _agree(
    parts: list[nn.Module], hop_stages: Mapping[Ranks, Stages], given: _Arguments
) -> list[Ranks]:
    """The groups of the world that still need stages, sorted; or one error on every rank."""
    mine: list[Ranks] = []
    error: str | None = None
    units = units_of(parts)
    try:
        audit_units(units, given.topology)
        if (why := unheld_parameter(parts, units)) is not None:
            raise ConfigError(why)
        for unit in units:
            ranks = ranks_of(unit.shard_group)
            blocks = node_blocks(ranks, given.topology) if ranks else []
            if (stages := _installed(unit)) is not None:
                _refuse_other_stages(unit, stages, blocks if given.hierarchical else [])
            elif given.hierarchical and len(blocks) > 1:
                _refuse_foreign_collectives(unit)
                mine.append(ranks)
            if given.node_local_backward and len(blocks) > 1:
                _refuse_node_local(unit)
            if given.hierarchical and _needs_hop_stages(unit, hop_stages, given.topology):
                mine.append(ranks_of(unit.replicate_group))
    except MicsError as refusal:
        error = str(refusal)
    said = _Said(list(dict.fromkeys(mine)), error, "" if error else str(given))
    everyone: list[_Said] = [said] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    if error is not None:
        raise ConfigError(error)
    for rank, theirs in enumerate(everyone):
        if theirs.error is not None:
            raise ConfigError(f"{theirs.error} (said by rank {rank})")
    calls = sorted({its.arguments for its in everyone})
    if len(calls) > 1:
        raise ConfigError(
            f"ranks called apply_mics differently: {' | '.join(calls)}; give every rank the same"
        )
    return sorted({ranks for its in everyone for ranks in its.groups})


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others before anything is made."""

    groups: list[Ranks]  # that need stages
    error: str | None
    arguments: str


@dataclass(frozen=True)
class _Arguments:
    """What every rank must have called apply_mics with."""

    topology: Topology
    hierarchical: bool
    node_local_backward: bool

    def __str__(self) -> str:
        its = self.topology
        words = f"{its.num_nodes} nodes of {its.ranks_per_node} ranks"
        words = words if its.is_contiguous else f"{words}, {list(its.nodes)}"
        local = ", node_local_backward=True" if self.node_local_backward else ""
        return f"{words}, hierarchical={self.hierarchical}{local}"


def _device_type(units: list[Unit]) -> str:
    return units[0].device.type if units else "cpu"


def _installed(unit: Unit) -> Stages | None:
    gather = unit.all_gather
    return gather.stages if isinstance(gather, HierarchicalAllGather) else None


def _needs_hop_stages(unit: Unit, there: Mapping[Ranks, Stages], topology: Topology) -> bool:
    """Whether the replication group has several ranks in each of several nodes, and no stages."""
    ranks = ranks_of(unit.replicate_group)
    try:
        blocks = node_blocks(ranks, topology) if ranks else []
    except ConfigError:  # nothing is wrong with it: a flat all-reduce takes any order of ranks
        return False
    if len(blocks) < 2 or len(blocks[0]) == 1:
        return False
    return ranks not in there or ranks_of(there[ranks].within_node) not in blocks


def _refuse_other_stages(unit: Unit, stages: Stages, blocks: list[Ranks]) -> None:
    """The stages that an earlier call installed must be those that this one would."""
    if ranks_of(stages.within_node) not in blocks:
        raise ConfigError(
            f"unit {unit.name} has hierarchical collectives of another apply_mics, with ranks "
            f"{list(ranks_of(stages.within_node))} in one node: give the same topology, and not "
            "hierarchical=False, or shard the model anew"
        )


def _refuse_node_local(unit: Unit) -> None:
    if not can_reshard_over_smaller_group(unit):
        raise ConfigError(
            f"unit {unit.name}: node_local_backward needs plain parameters; tensor, context and "
            "expert parallel make DTensors, which torch cannot reshard to a smaller group; drop it"
        )


def _refuse_foreign_collectives(unit: Unit) -> None:
    if not unit.has_default_collectives:
        raise ConfigError(
            f"unit {unit.name} already has collectives of its own "
            f"({type(unit.all_gather).__name__}, {type(unit.reduce_scatter).__name__}), and its "
            "partition group spans nodes: leave them out, or call apply_mics(hierarchical=False)"
        )
