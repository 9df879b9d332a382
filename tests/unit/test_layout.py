"""How the world is cut, up to 16,384 ranks: round trips, groups, products, and what is refused."""

import re
from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Coordinate, GroupShape, Layout, divisors, partition_sizes
from mics_dtensor.topology import Topology


def layout_of(world: int, node: int, partition: int, tp: int = 1) -> Layout:
    return Layout(
        topology=Topology.uniform(world_size=world, ranks_per_node=node),
        partition_size=partition,
        tensor_parallel_size=tp,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of up to 8 nodes of up to 12 ranks."""
    node = draw(st.integers(1, 12))
    topology = Topology.uniform(world_size=node * draw(st.integers(1, 8)), ranks_per_node=node)
    tp = draw(st.sampled_from(divisors(node)))
    partition = draw(st.sampled_from(partition_sizes(topology, tensor_parallel_size=tp)))
    return Layout(topology=topology, partition_size=partition, tensor_parallel_size=tp)


def groups_of(layout: Layout, group: Callable[[int], tuple[int, ...]]) -> set[tuple[int, ...]]:
    """All groups of a kind; checks that they cut the world without overlap, and ascend."""
    world = range(layout.topology.world_size)
    groups = {group(rank) for rank in world}
    assert all(rank in group(rank) for rank in world)
    assert sorted(rank for ranks in groups for rank in ranks) == list(world)
    assert all(ranks == tuple(sorted(ranks)) for ranks in groups)
    return groups


@given(layouts())
def test_rank_and_coordinate_are_inverse(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.topology.world_size)]
    assert [layout.rank_of(at) for at in places] == list(range(layout.topology.world_size))
    assert places == sorted(places, key=lambda at: (at.replicate, at.node, at.local, at.tp))


@given(layouts())
def test_each_kind_of_group_cuts_the_world(layout: Layout) -> None:
    shard = groups_of(layout, layout.partition_group)
    assert {len(ranks) for ranks in shard} == {layout.partition_size}
    replicate = groups_of(layout, layout.replication_group)
    assert {len(ranks) for ranks in replicate} == {layout.num_replicas}
    across = groups_of(layout, layout.node_group)
    assert {len(ranks) for ranks in across} == {layout.nodes_per_partition_group}
    within = groups_of(layout, layout.local_group)
    assert {len(ranks) for ranks in within} == {layout.shards_per_node}
    assert len(shard) * layout.partition_size == layout.topology.world_size


@given(layouts())
def test_a_partition_group_is_its_nodes_times_its_places(layout: Layout) -> None:
    for rank in range(layout.topology.world_size):
        group = layout.partition_group(rank)
        by_stages = [r for peer in layout.node_group(rank) for r in layout.local_group(peer)]
        assert group == tuple(by_stages)
        shared = set(group) & set(layout.replication_group(rank))
        assert shared == {rank}


@given(layouts())
def test_stages_run_over_the_links_they_are_named_for(layout: Layout) -> None:
    node_of = layout.topology.node_of
    for rank in range(layout.topology.world_size):
        assert {node_of(r) for r in layout.local_group(rank)} == {node_of(rank)}
        peers = layout.node_group(rank)
        assert len({node_of(r) for r in peers}) == len(peers)


@given(layouts())
def test_the_shapes_are_those_of_the_groups(layout: Layout) -> None:
    for shape, group in (
        (layout.shard_shape, layout.partition_group),
        (layout.replicate_shape, layout.replication_group),
    ):
        groups = groups_of(layout, group)
        assert shape.num_groups == len(groups)
        for ranks in groups:
            nodes = [layout.topology.node_of(rank) for rank in ranks]
            assert len(set(nodes)) == shape.num_nodes
            assert {nodes.count(node) for node in nodes} == {shape.ranks_per_node}
            assert shape.size == len(ranks)


@given(layouts())
def test_the_mesh_is_the_world_in_order(layout: Layout) -> None:
    assert prod(layout.mesh_shape) == layout.topology.world_size
    assert len(layout.axis_names) == len(layout.mesh_shape)
    tp = layout.tensor_parallel_size
    for rank in range(layout.topology.world_size):
        at = layout.coordinate(rank)
        shard = at.node * layout.shards_per_node + at.local
        assert rank == (at.replicate * layout.partition_size + shard) * tp + at.tp


@pytest.mark.parametrize("node", [8, 64])
@pytest.mark.parametrize("tp", [1, 8])
def test_16384_ranks(node: int, tp: int) -> None:
    topology = Topology.uniform(world_size=16_384, ranks_per_node=node)
    sizes = partition_sizes(topology, tensor_parallel_size=tp)
    assert sizes == [2**i for i in range(15) if 2**i * tp <= 16_384]
    for size in sizes:
        layout = Layout(topology=topology, partition_size=size, tensor_parallel_size=tp)
        assert layout.num_replicas * size * tp == 16_384
        assert layout.nodes_per_partition_group * layout.shards_per_node == size
        assert layout.shard_shape.size * layout.shard_shape.num_groups == 16_384
        assert layout.replicate_shape.size * layout.replicate_shape.num_groups == 16_384
        for rank in (0, 1, 8191, 8192, 16_383):
            assert layout.rank_of(layout.coordinate(rank)) == rank
            assert rank in layout.partition_group(rank)
            assert len(layout.replication_group(rank)) == layout.num_replicas


def test_two_nodes_of_two_by_hand() -> None:
    inside = layout_of(4, 2, 2)
    assert inside.axis_names == ("replicate", "shard")
    assert inside.mesh_shape == (2, 2)
    assert inside.partition_group(3) == (2, 3)
    assert inside.replication_group(3) == (1, 3)
    assert inside.node_group(3) == (3,)
    assert inside.local_group(3) == (2, 3)
    assert inside.shard_shape == GroupShape(num_nodes=1, ranks_per_node=2, num_groups=2)
    assert inside.replicate_shape == GroupShape(num_nodes=2, ranks_per_node=1, num_groups=2)
    across = layout_of(4, 2, 4)
    assert across.coordinate(2) == Coordinate(replicate=0, node=1, local=0)
    assert across.node_group(2) == (0, 2)
    assert across.local_group(2) == (2, 3)
    assert across.replication_group(2) == (2,)


def test_tensor_parallel_lies_innermost_and_strides_the_shards() -> None:
    layout = layout_of(16, 8, 4, tp=4)  # a partition group of two nodes
    assert layout.axis_names == ("replicate", "shard", "tp")
    assert layout.mesh_shape == (1, 4, 4)
    assert layout.partition_group(5) == (1, 5, 9, 13)
    assert layout.node_group(5) == (5, 13)
    assert layout.local_group(5) == (1, 5)
    assert layout.coordinate(13) == Coordinate(replicate=0, node=1, local=1, tp=1)


@pytest.mark.parametrize(
    ("world", "node", "partition", "tp", "said"),
    [
        (
            24,
            8,
            12,
            1,
            "partition_size 12 crosses nodes of 8 ranks unevenly; "
            "choose partition_size from [1, 2, 4, 8, 24]",
        ),
        (
            48,
            8,
            12,
            1,
            "partition_size 12 crosses nodes of 8 ranks unevenly; "
            "choose partition_size from [1, 2, 4, 8, 16, 24, 48]",
        ),
        (
            16,
            8,
            3,
            1,
            "partition_size 3 does not divide the 16 ranks of the world; "
            "choose partition_size from [1, 2, 4, 8, 16]",
        ),
        (
            16,
            8,
            32,
            1,
            "partition_size 32 does not divide the 16 ranks of the world; "
            "choose partition_size from [1, 2, 4, 8, 16]",
        ),
        (
            16,
            8,
            0,
            1,
            "partition_size 0 does not divide the 16 ranks of the world; "
            "choose partition_size from [1, 2, 4, 8, 16]",
        ),
        (
            24,
            8,
            3,
            4,
            "partition_size 3 x tensor_parallel_size 4 = 12 ranks crosses nodes of 8 ranks "
            "unevenly; choose partition_size from [1, 2, 6]",
        ),
        (
            16,
            8,
            8,
            4,
            "partition_size 8 x tensor_parallel_size 4 = 32 ranks does not divide the 16 ranks "
            "of the world; choose partition_size from [1, 2, 4]",
        ),
        (
            16,
            8,
            1,
            16,
            "tensor_parallel_size 16 does not divide the 8 ranks of a node; "
            "choose from [1, 2, 4, 8]",
        ),
        (
            16,
            8,
            1,
            0,
            "tensor_parallel_size 0 does not divide the 8 ranks of a node; "
            "choose from [1, 2, 4, 8]",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    world: int, node: int, partition: int, tp: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        layout_of(world, node, partition, tp)


def test_a_size_that_is_no_number_is_told_the_number() -> None:
    topology = Topology.uniform(world_size=16, ranks_per_node=8)
    said = r"partition_size 'node' is not a number of ranks; give 4 for one partition group a node"
    with pytest.raises(ConfigError, match=said):
        Layout(topology=topology, partition_size="node", tensor_parallel_size=2)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"^partition_size 8\.0 is not a number of ranks; give 8 "
    ):
        Layout(topology=topology, partition_size=8.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^partition_size True is not a number of ranks"):
        Layout(topology=Topology.uniform(world_size=8, ranks_per_node=4), partition_size=True)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size '2' is not a number of ranks"):
        Layout(topology=topology, partition_size=8, tensor_parallel_size="2")  # type: ignore[arg-type]


def test_interleaved_nodes_are_refused_by_name() -> None:
    topology = Topology.from_hosts(["left", "right"] * 4)
    said = (
        "the ranks of a node must be consecutive; left holds [0, 2, 4, 6]: start the ranks "
        "node by node (torchrun's --node-rank in the order of the hosts)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        Layout(topology=topology, partition_size=4)


@given(st.integers(1, 16), st.integers(1, 12), st.integers(-1, 200), st.integers(-1, 17))
def test_a_layout_exists_exactly_where_its_sizes_are_offered(
    node: int, num_nodes: int, partition: int, tp: int
) -> None:
    topology = Topology.uniform(world_size=node * num_nodes, ranks_per_node=node)
    offered = partition in partition_sizes(topology, tensor_parallel_size=tp)
    try:
        Layout(topology=topology, partition_size=partition, tensor_parallel_size=tp)
    except ConfigError:
        assert not offered
    else:
        assert offered


def test_divisors_are_those_that_leave_no_rest() -> None:
    for number in range(300):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert divisors(10**12)[-2:] == [5 * 10**11, 10**12]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_has_no_place(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"^rank {rank} is not one of 0\.\.3$"):
        layout_of(4, 2, 2).coordinate(rank)
