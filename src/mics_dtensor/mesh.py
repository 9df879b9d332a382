"""Layout -> DeviceMesh, and the sub-groups of the hierarchy: the only maker of process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import set_timeout, timeout_of

Ranks = tuple[int, ...]


def mesh_over(group: dist.ProcessGroup, *, device_type: str) -> DeviceMesh:
    """A mesh of the one axis "shard" over a group that is there already. Not collective."""
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, ascending: what groups are compared by, since objects may differ."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True, eq=False)
class Stages:
    """The two groups of this rank through which a partition group that spans nodes communicates.

    Ranks 0..3 on two nodes: rank 1 has ranks (0, 1, 2, 3), across_nodes (1, 3), within_node (0, 1).
    """

    ranks: Ranks
    across_nodes: dist.ProcessGroup  # axis `node`: my peers at my place in the other nodes; slow
    within_node: dist.ProcessGroup  # axis `local`: the ranks of the group in my node; fast

    @property
    def num_nodes(self) -> int:
        """Nodes that the partition group spans."""
        return len(self.ranks) // self.within_node.size()


def init_mesh(layout: Layout, *, device_type: str) -> DeviceMesh:
    """The mesh of `layout`, axes ("replicate", "shard") or ("replicate", "shard", "tp").

    Its groups have the timeout of the world's group. Collective: every rank of the world calls it.
    Raises ConfigError where the world that runs is not the one of the layout.
    """
    if not isinstance(layout, Layout):
        raise ConfigError(
            f"layout is no Layout but a {type(layout).__name__}: give Layout(topology=..., "
            "partition_size=...)"
        )
    running = dist.get_world_size() if dist.is_initialized() else None
    wanted = layout.topology.world_size
    if running is not None and running != wanted:
        raise ConfigError(
            f"the layout is of {wanted} ranks, but {running} are running: start {wanted} ranks, "
            f"or make the topology of world_size={running}"
        )
    mesh = init_device_mesh(device_type, layout.mesh_shape, mesh_dim_names=layout.axis_names)
    # torch gives the groups of a mesh the backend's timeout, not the one that the user chose.
    if (timeout := timeout_of(dist.group.WORLD, device_type)) is not None:
        for axis in range(mesh.ndim):
            set_timeout(timeout, mesh.get_group(axis))
    return mesh


def node_mesh(stages: Stages, *, device_type: str) -> DeviceMesh:
    """The ranks of one partition group as a mesh with the axes ("node", "local"); no new groups."""
    return DeviceMesh.from_group(
        [stages.across_nodes, stages.within_node],
        device_type,
        mesh=torch.tensor(stages.ranks).view(stages.num_nodes, -1),
        mesh_dim_names=("node", "local"),
    )


def node_blocks(ranks: Ranks, topology: Topology) -> list[Ranks]:
    """The ranks of a group, cut by node, in the order of the group. Pure.

    Raises ConfigError where the nodes do not hold equally many, each node's ranks in one block:
    the stages could not put every shard at its place.
    """
    blocks: list[list[int]] = []
    for position, rank in enumerate(ranks):
        if position and topology.node_of(rank) == topology.node_of(ranks[position - 1]):
            blocks[-1].append(rank)
        else:
            blocks.append([rank])
    nodes = {topology.node_of(rank) for rank in ranks}
    if len(blocks) != len(nodes) or len({len(block) for block in blocks}) != 1:
        raise ConfigError(
            f"the shard group of ranks {list(ranks)} lies on the nodes as {blocks}; a partition "
            "group must lie inside a node or hold equally many consecutive ranks of every node "
            "that it touches: choose another partition_size, or order the ranks node by node"
        )
    return [tuple(block) for block in blocks]


def remember_hop_stages(parts: Iterable[object], stages: Mapping[Ranks, Stages]) -> None:
    """Keep with a model (its parts) the stages of its replication groups, for the second hop."""
    for part in parts:
        object.__setattr__(part, "mics_hop_stages", dict(stages))


def hop_stages_of(parts: Iterable[object]) -> dict[Ranks, Stages]:
    """What `remember_hop_stages` kept."""
    found: dict[Ranks, Stages] = {}
    for part in parts:
        found |= getattr(part, "mics_hop_stages", {})
    return found


def make_stages(
    groups: Sequence[Ranks], topology: Topology, *, device_type: str
) -> dict[Ranks, Stages]:
    """The stages of every group of this rank that spans nodes with several ranks in each.

    `groups` lists those of the whole world, each once, in the same order on every rank.
    Collective: every rank of the world calls it; each sub-group is made by all, in this order,
    with the timeout of the world's group. A group of one rank a node needs no stages.
    """
    rank, timeout = dist.get_rank(), timeout_of(dist.group.WORLD, device_type)
    stages: dict[Ranks, Stages] = {}
    for ranks in groups:
        blocks = node_blocks(ranks, topology)  # [node][local]
        if len(blocks) == 1 or len(blocks[0]) == 1:
            continue
        across = [dist.new_group(peers, timeout) for peers in zip(*blocks, strict=True)]
        within = [dist.new_group(block, timeout) for block in blocks]
        for block, within_node in zip(blocks, within, strict=True):
            if rank in block:
                stages[ranks] = Stages(ranks, across[block.index(rank)], within_node)
    return stages


def background_group() -> dist.ProcessGroup | None:
    """All ranks, on CPU, and patient: for what waits for disks. None without a world.

    Collective: every rank of the world calls it.
    """
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
