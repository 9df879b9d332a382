"""How the world is cut: world = replicate x node x local (x tp). Pure: no torch, no groups made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from mics_dtensor.errors import ConfigError
from mics_dtensor.topology import Topology


@dataclass(frozen=True)
class Coordinate:
    """The place of a rank. `node` and `local` are those inside the partition group."""

    replicate: int
    node: int
    local: int
    tp: int = 0


@dataclass(frozen=True)
class GroupShape:
    """How groups of one kind lie on the nodes; what the bytes on each link follow from.

    `num_groups` of them exist in the world and communicate at once; each has `ranks_per_node`
    ranks in each of `num_nodes` nodes. (4, 1, 8): eight groups of four ranks, one a node.
    """

    num_nodes: int
    ranks_per_node: int
    num_groups: int

    @property
    def size(self) -> int:
        """Ranks in one group."""
        return self.num_nodes * self.ranks_per_node

    @property
    def has_two_levels(self) -> bool:
        """Several ranks in each of several nodes: what goes in two stages, if any does."""
        return self.num_nodes > 1 and self.ranks_per_node > 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The partition groups of a world (MiCS, arXiv 2205.00119, section 3.1).

    `partition_size` is the number of shards of a parameter. A partition group occupies
    partition_size x tensor_parallel_size ranks: either inside a node, dividing it, or a whole
    number of nodes. Ranks are ascending along (replicate, node, local, tp), tp innermost.
    Raises ConfigError for what cannot be; an object that exists is valid.
    """

    topology: Topology
    partition_size: int
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        world, node = self.topology.world_size, self.topology.ranks_per_node
        tp = self.tensor_parallel_size
        _refuse_other_than_int("tensor_parallel_size", tp, f"an int, such as {node}")
        a_node = f"{node // max(1, tp)} for one partition group a node (ranks_per_node / tp)"
        _refuse_other_than_int("partition_size", self.partition_size, a_node)
        if not self.topology.is_contiguous:
            first = self.topology.nodes[0]
            raise ConfigError(
                f"the ranks of a node must be consecutive; {self.topology.names[0]} holds "
                f"{list(first[:4])}{'...' if len(first) > 4 else ''}: start the ranks node by node "
                "(torchrun's --node-rank in the order of the hosts)"
            )
        if tp < 1 or node % tp:
            raise ConfigError(
                f"tensor_parallel_size {tp} does not divide the {node} ranks of a node; "
                f"choose from {divisors(node)}"
            )
        works = partition_sizes(self.topology, tensor_parallel_size=tp)
        if self.partition_size not in works:
            occupied = self.partition_size * tp
            if self.partition_size < 1 or world % occupied:
                why = f"does not divide the {world} ranks of the world"
            else:
                why = f"crosses nodes of {node} ranks unevenly"
            what = f"partition_size {self.partition_size}"
            if tp > 1:
                what += f" x tensor_parallel_size {tp} = {occupied} ranks"
            raise ConfigError(f"{what} {why}; choose partition_size from {works}")

    @property
    def num_replicas(self) -> int:
        """Copies of the model states: the size of a replication group."""
        return self.topology.world_size // (self.partition_size * self.tensor_parallel_size)

    @property
    def nodes_per_partition_group(self) -> int:
        """Nodes that a partition group spans; 1 where it lies inside a node."""
        occupied = self.partition_size * self.tensor_parallel_size
        return max(1, occupied // self.topology.ranks_per_node)

    @property
    def shards_per_node(self) -> int:
        """Shards of a partition group that one node holds: the size of the `local` axis."""
        return self.partition_size // self.nodes_per_partition_group

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the axes of `init_mesh`."""
        tp = (self.tensor_parallel_size,) if self.tensor_parallel_size > 1 else ()
        return (self.num_replicas, self.partition_size, *tp)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """("replicate", "shard"), and "tp" where there is tensor parallelism."""
        return ("replicate", "shard", "tp")[: len(self.mesh_shape)]

    def coordinate(self, rank: int) -> Coordinate:
        """The place of `rank`. Raises ConfigError where the world has no such rank."""
        if not 0 <= rank < self.topology.world_size:
            raise ConfigError(f"rank {rank} is not one of 0..{self.topology.world_size - 1}")
        rest, tp = divmod(rank, self.tensor_parallel_size)
        rest, local = divmod(rest, self.shards_per_node)
        replicate, node = divmod(rest, self.nodes_per_partition_group)
        return Coordinate(replicate=replicate, node=node, local=local, tp=tp)

    def rank_of(self, at: Coordinate) -> int:
        """The rank at a place: the inverse of `coordinate`."""
        block = at.replicate * self.nodes_per_partition_group + at.node
        return (block * self.shards_per_node + at.local) * self.tensor_parallel_size + at.tp

    def partition_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold one sharded copy together with `rank`, ascending."""
        at = self.coordinate(rank)
        nodes, places = range(self.nodes_per_partition_group), range(self.shards_per_node)
        return tuple(
            self.rank_of(replace(at, node=node, local=local)) for node in nodes for local in places
        )

    def replication_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as `rank`, one a replica, ascending."""
        at, replicas = self.coordinate(rank), range(self.num_replicas)
        return tuple(self.rank_of(replace(at, replicate=replicate)) for replicate in replicas)

    def node_group(self, rank: int) -> tuple[int, ...]:
        """The peers of `rank` at its place in the other nodes of its partition group (slow link).

        With `rank` itself, ascending.
        """
        at, nodes = self.coordinate(rank), range(self.nodes_per_partition_group)
        return tuple(self.rank_of(replace(at, node=node)) for node in nodes)

    def local_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the partition group of `rank` in its own node (fast link), ascending."""
        at, places = self.coordinate(rank), range(self.shards_per_node)
        return tuple(self.rank_of(replace(at, local=local)) for local in places)

    @property
    def shard_shape(self) -> GroupShape:
        """How the partition groups lie on the nodes."""
        groups = self.num_replicas * self.tensor_parallel_size
        return GroupShape(self.nodes_per_partition_group, self.shards_per_node, groups)

    @property
    def replicate_shape(self) -> GroupShape:
        """How the replication groups lie on the nodes."""
        replicas_per_node = max(
            1, self.topology.ranks_per_node // (self.partition_size * self.tensor_parallel_size)
        )
        nodes = self.num_replicas // replicas_per_node
        groups = self.partition_size * self.tensor_parallel_size
        return GroupShape(nodes, replicas_per_node, groups)


def _refuse_other_than_int(name: str, given: object, works: str) -> None:
    if not isinstance(given, int) or isinstance(given, bool):
        raise ConfigError(f"{name} {given!r} is not a number of ranks; give {works}")


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def partition_sizes(topology: Topology, *, tensor_parallel_size: int = 1) -> list[int]:
    """The partition sizes that a world can be cut into, ascending; none where tp cannot be."""
    node, tp = topology.ranks_per_node, tensor_parallel_size
    if tp < 1 or node % tp:
        return []
    return [
        size
        for size in divisors(topology.world_size // tp)
        if node % (size * tp) == 0 or (size * tp) % node == 0
    ]
