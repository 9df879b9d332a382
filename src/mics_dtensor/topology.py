"""Which ranks share a fast domain: eight GPUs of a server, or the 72 of an NVLink rack."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from mics_dtensor.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """The node of every rank. Nodes are equal in size; an object that exists is valid.

    `nodes[i]` holds the ranks of node i in ascending order, e.g. `((0, 1), (2, 3))`: two nodes of
    two ranks. Nodes are numbered by their lowest rank; `names[i]` is the host name where known.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(f"node {i}" for i in range(len(self.nodes))))
        sizes = {len(ranks) for ranks in self.nodes}
        if len(sizes) != 1 or 0 in sizes:
            listed = ", ".join(
                f"{name}: {len(ranks)}" for name, ranks in zip(self.names, self.nodes, strict=True)
            )
            raise TopologyError(
                f"nodes hold unequal numbers of ranks ({listed}); every node must hold the same "
                "number: start as many ranks on each, or leave the odd node out"
            )
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))):
            raise TopologyError(
                f"the ranks of all nodes must be 0..{len(ranks) - 1}, each once; got {ranks}"
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

    @property
    def is_contiguous(self) -> bool:
        """Whether node i holds ranks i * ranks_per_node and those that follow, as launchers do."""
        size = self.ranks_per_node
        return all(
            ranks == tuple(range(node * size, (node + 1) * size))
            for node, ranks in enumerate(self.nodes)
        )

    def node_of(self, rank: int) -> int:
        """The node of `rank`."""
        if self.is_contiguous:
            return rank // self.ranks_per_node
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)

    @classmethod
    def uniform(cls, *, world_size: int, ranks_per_node: int) -> Topology:
        """Nodes of `ranks_per_node` consecutive ranks each. Pure: no process group, no torch."""
        if ranks_per_node < 1 or world_size < 1 or world_size % ranks_per_node:
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
