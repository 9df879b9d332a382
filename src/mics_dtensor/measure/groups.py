"""The groups that a run could use on these ranks: those of every partition size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mics_dtensor.layout import Layout, partition_sizes
from mics_dtensor.mesh import Stages, init_mesh, make_stages, ranks_of
from mics_dtensor.topology import Topology


@dataclass(frozen=True)
class Candidate:
    """My group of one shape; every rank of the world has one, so that all call at once.

    `stages` are those of the hierarchical collectives, where the group spans nodes with several
    ranks in each.
    """

    num_nodes: int
    ranks_per_node: int
    group: dist.ProcessGroup
    stages: Stages | None = None


def candidates(
    topology: Topology, sizes: Sequence[int] | None, *, device_type: str
) -> list[Candidate]:
    """The partition groups, replication groups and stages of these partition sizes (None: of all).

    One of each shape, small ones first. Collective: every rank of the world calls it.
    Raises ConfigError for a size that these ranks cannot be cut into.
    """
    found: dict[tuple[int, int], Candidate] = {}
    flat: list[tuple[tuple[int, ...], ...]] = []
    layouts = [
        Layout(topology=topology, partition_size=size)
        for size in (sizes or partition_sizes(topology))
    ]
    for layout in layouts:
        mesh = init_mesh(layout, device_type=device_type)
        for axis, shape in (("shard", layout.shard_shape), ("replicate", layout.replicate_shape)):
            if shape.size > 1:
                key = (shape.num_nodes, shape.ranks_per_node)
                found.setdefault(key, Candidate(*key, mesh.get_group(axis)))
        spans = layout.nodes_per_partition_group > 1 and layout.shards_per_node > 1
        if spans:
            every = {layout.partition_group(rank) for rank in range(topology.world_size)}
            flat.append(tuple(sorted(every)))
    for groups in flat:
        stages = make_stages(groups, topology, device_type=device_type)
        mine = next(s for ranks, s in stages.items() if dist.get_rank() in ranks)
        nodes, local = mine.num_nodes, mine.within_node.size()
        found.setdefault((nodes, 1), Candidate(nodes, 1, mine.across_nodes))
        found.setdefault((1, local), Candidate(1, local, mine.within_node))
        whole = found[nodes, local]
        if ranks_of(whole.group) == mine.ranks:
            found[nodes, local] = Candidate(nodes, local, whole.group, mine)
    return [found[key] for key in sorted(found, key=lambda key: (key[0] * key[1], key))]
