"""Which ranks share a node: said outright, or read from host names; what cannot be is refused."""

import re
from collections.abc import Sequence

import pytest

from mics_dtensor.errors import MicsError, TopologyError
from mics_dtensor.topology import Topology


def interleaved(*, num_nodes: int, ranks_per_node: int) -> Topology:
    """Ranks dealt out host by host, as some launchers do."""
    return Topology.from_hosts([f"host{i}" for i in range(num_nodes)] * ranks_per_node)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"), [(1, 1), (4, 2), (4, 4), (24, 8), (576, 72), (16_384, 8)]
)
def test_nodes_are_a_partition_of_the_world(world_size: int, ranks_per_node: int) -> None:
    topology = Topology.uniform(world_size=world_size, ranks_per_node=ranks_per_node)
    assert topology.world_size == world_size
    assert topology.ranks_per_node == ranks_per_node
    assert topology.num_nodes * ranks_per_node == world_size
    assert [rank for node in topology.nodes for rank in node] == list(range(world_size))
    assert topology.is_contiguous
    for rank in range(world_size):
        assert rank in topology.nodes[topology.node_of(rank)]


def test_host_names_say_the_nodes() -> None:
    topology = Topology.from_hosts(["b", "b", "a", "a"])
    assert topology.nodes == ((0, 1), (2, 3))
    assert topology.names == ("b", "a")
    assert topology.is_contiguous


def test_interleaved_hosts_are_nodes_that_are_not_contiguous() -> None:
    topology = interleaved(num_nodes=2, ranks_per_node=3)
    assert topology.nodes == ((0, 2, 4), (1, 3, 5))
    assert not topology.is_contiguous
    assert [topology.node_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_uniform_equals_the_hosts_that_it_stands_for() -> None:
    named = Topology.from_hosts(["a", "a", "b", "b"])
    said = Topology.uniform(world_size=4, ranks_per_node=2)
    assert named.nodes == said.nodes
    assert said.names == ("node 0", "node 1")
    assert hash(said) == hash(Topology.uniform(world_size=4, ranks_per_node=2))


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (
            ["a", "a", "b"],
            "nodes hold unequal numbers of ranks (a: 2, b: 1); every node must hold the same "
            "number: start as many ranks on each, or leave the odd node out",
        ),
        (
            [],
            "nodes hold unequal numbers of ranks (no nodes at all); every node must hold the same "
            "number: start as many ranks on each, or leave the odd node out",
        ),
    ],
)
def test_unequal_nodes_are_refused_by_name(hosts: Sequence[str], said: str) -> None:
    with pytest.raises(TopologyError, match=f"^{re.escape(said)}$"):
        Topology.from_hosts(hosts)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "said"),
    [
        (
            12,
            8,
            "ranks_per_node 8 does not divide the world size 12; choose from [1, 2, 3, 4, 6, 12]",
        ),
        (4, 0, "ranks_per_node 0 does not divide the world size 4; choose from [1, 2, 4]"),
        (4, -2, "ranks_per_node -2 does not divide the world size 4; choose from [1, 2, 4]"),
        (0, 8, "world_size 0 is not a number of ranks; give 1 or more"),
        ("4", 2, "world_size '4' is not a number of ranks; give a whole one"),
        (4, 2.0, "ranks_per_node 2.0 is not a number of ranks; give a whole one"),
    ],
)
def test_uniform_nodes_must_divide_the_world(
    world_size: int, ranks_per_node: int, said: str
) -> None:
    with pytest.raises(TopologyError, match=f"^{re.escape(said)}$"):
        Topology.uniform(world_size=world_size, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("nodes", "names", "said"),
    [
        (
            ((0, 1), (1, 2)),
            (),
            "the ranks of all nodes must be 0..3, each once; missing or out of that range: 3",
        ),
        (
            ((0, 1), (2, 4)),
            (),
            "the ranks of all nodes must be 0..3, each once; missing or out of that range: 3, 4",
        ),
        (
            ((1, 0), (2, 3)),
            (),
            "ranks ascend inside a node and nodes by their lowest rank; "
            "got (1, 0), (2, 3), give (0, 1), (2, 3)",
        ),
        (
            ((2, 3), (0, 1)),
            ("b", "a"),
            "ranks ascend inside a node and nodes by their lowest rank; "
            "got (2, 3), (0, 1), give (0, 1), (2, 3)",
        ),
        (((0, 1), (2, 3)), ("a",), "1 names for 2 nodes; give one for each, or none"),
    ],
)
def test_an_object_that_exists_is_valid(
    nodes: tuple[tuple[int, ...], ...], names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(TopologyError, match=f"^{re.escape(said)}$"):
        Topology(nodes=nodes, names=names)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_has_no_node(rank: int) -> None:
    with pytest.raises(TopologyError, match=rf"^rank {rank} is not one of 0\.\.3$"):
        Topology.uniform(world_size=4, ranks_per_node=2).node_of(rank)


def test_a_message_about_thousands_of_ranks_fits_a_line() -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(nodes=tuple((rank,) for rank in reversed(range(16_384))))
    assert len(str(caught.value)) < 300


def test_detect_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(MicsError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        Topology.detect()
