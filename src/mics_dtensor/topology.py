"""Which ranks share a fast domain: eight GPUs of a server, or the 72 of an NVLink rack."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mics_dtensor.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """The node of every rank. Pure; raises TopologyError for nodes that are not equal in size.

    `nodes[i]` holds the ranks of node i in ascending order, e.g. `((0, 1), (2, 3))`: two nodes of
    two ranks. Nodes are numbered by their lowest rank; `names[i]` is the host name where known.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(f"node {i}" for i in range(len(self.nodes))))
        if len(self.names) != len(self.nodes):
            raise TopologyError(
                f"{len(self.names)} names for {len(self.nodes)} nodes; give one for each, or none"
            )
        sizes = {len(ranks) for ranks in self.nodes}
        if len(sizes) != 1 or 0 in sizes:
            listed = ", ".join(
                f"{name}: {len(ranks)}" for name, ranks in zip(self.names, self.nodes, strict=True)
            )
            raise TopologyError(
                f"nodes hold unequal numbers of ranks ({listed or 'no nodes at all'}); every node "
                "must hold the same number: start as many ranks on each, or leave the odd node out"
            )
        ranks = [rank for node in self.nodes for rank in node]
        if wrong := sorted(set(ranks) ^ set(range(len(ranks)))):
            raise TopologyError(
                f"the ranks of all nodes must be 0..{len(ranks) - 1}, each once; "
                f"missing or out of that range: {_some(wrong)}"
            )
        ordered = tuple(sorted(tuple(sorted(node)) for node in self.nodes))
        if self.nodes != ordered:
            raise TopologyError(
                f"ranks ascend inside a node and nodes by their lowest rank; "
                f"got {_some(self.nodes)}, give {_some(ordered)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return len(self.nodes) * self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks in each node."""
        return len(self.nodes[0])

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether node i holds ranks i * ranks_per_node and those that follow, as launchers do."""
        size = self.ranks_per_node
        return all(
            ranks == tuple(range(node * size, (node + 1) * size))
            for node, ranks in enumerate(self.nodes)
        )

    def node_of(self, rank: int) -> int:
        """The node of `rank`. Raises TopologyError where the world has no such rank."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not one of 0..{self.world_size - 1}")
        if self.is_contiguous:
            return rank // self.ranks_per_node
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)

    @classmethod
    def uniform(cls, *, world_size: int, ranks_per_node: int) -> Topology:
        """Nodes of `ranks_per_node` consecutive ranks each. Pure: no process group, no torch."""
        for name, ranks in (("world_size", world_size), ("ranks_per_node", ranks_per_node)):
            if not isinstance(ranks, int):
                raise TopologyError(f"{name} {ranks!r} is not a number of ranks; give a whole one")
        if world_size < 1:
            raise TopologyError(f"world_size {world_size} is not a number of ranks; give 1 or more")
        if ranks_per_node < 1 or world_size % ranks_per_node:
            works = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise TopologyError(
                f"ranks_per_node {ranks_per_node} does not divide the world size {world_size}; "
                f"choose from {works}"
            )
        return cls(
            nodes=tuple(
                tuple(range(first, first + ranks_per_node))
                for first in range(0, world_size, ranks_per_node)
            )
        )

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> Topology:
        """Nodes by host name, `hosts[rank]` being the host of `rank`. Pure."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        return cls(nodes=tuple(tuple(r) for r in by_host.values()), names=tuple(by_host))

    @classmethod
    def detect(cls, *, ranks_per_node: int | None = None) -> Topology:
        """The nodes from the host names of the ranks. Collective: every rank of the world calls it.

        With `ranks_per_node` the nodes are of that many consecutive ranks, whatever the hosts are
        called (a host may hold several fast domains, a rack may be one); ranks that were given
        different values are told so. Raises TopologyError on every rank where it raises on one.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise TopologyError(
                "Topology.detect() asks the other ranks for their host names and needs a process "
                "group: call torch.distributed.init_process_group() first, or say the nodes "
                "outright with Topology.uniform(world_size=..., ranks_per_node=...)"
            )
        seen: list[tuple[str, int | None]] = [("", None)] * dist.get_world_size()
        dist.all_gather_object(seen, (socket.gethostname(), ranks_per_node))
        said = sorted({str(given) for _, given in seen})
        if len(said) > 1:
            raise TopologyError(
                f"ranks were given different ranks_per_node: {', '.join(said)}; give all the same"
            )
        if ranks_per_node is not None:
            return cls.uniform(world_size=len(seen), ranks_per_node=ranks_per_node)
        return cls.from_hosts([host for host, _ in seen])


def _some(items: Sequence[object]) -> str:
    """The first of many, for a message: a world may have thousands of ranks."""
    return ", ".join(map(str, items[:8])) + (", ..." if len(items) > 8 else "")
