"""Bytes and collectives of a step, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from mics_dtensor.layout import GroupShape, Layout, partition_sizes
from mics_dtensor.plan.comparison import Comparison, over_all_ranks
from mics_dtensor.plan.options import WHOLE_BLOCK_BYTES, Options
from mics_dtensor.plan.second_hop import buckets
from mics_dtensor.plan.traffic import Traffic, step_traffic
from mics_dtensor.plan.unit import Unit
from mics_dtensor.topology import Topology


def layout_of(world_size: int, ranks_per_node: int, partition_size: int, tp: int = 1) -> Layout:
    topology = Topology.uniform(world_size=world_size, ranks_per_node=ranks_per_node)
    return Layout(topology=topology, partition_size=partition_size, tensor_parallel_size=tp)


def unit_of(layout: Layout, *shapes: tuple[int, ...], name: str = "layer", **fields: int) -> Unit:
    return Unit(
        name=name,
        shapes=shapes,
        shard=layout.shard_shape,
        replicate=layout.replicate_shape,
        **fields,
    )


def by_stage(traffic: Traffic) -> dict[str, tuple[int, int, int]]:
    """Calls, bytes between nodes and bytes inside them, of the stages of each name."""
    found: dict[str, tuple[int, int, int]] = {}
    for s in traffic.stages:
        had = found.get(s.name, (0, 0, 0))
        now = s.calls, s.inter_node_bytes, s.intra_node_bytes
        found[s.name] = (had[0] + now[0], had[1] + now[1], had[2] + now[2])
    return found


def test_inside_a_node() -> None:
    """4 ranks on 2 nodes, 2 shards each: 100 fp32 numbers are 400 bytes, a shard is 200.

    A ring of two sends one shard each way: 400 bytes in each of two groups, twice for the two
    gathers. The boundary: each of 2 shards of 200 bytes is all-reduced by two ranks, one a node:
    2 x 200 bytes each, and its agreement takes 4 int32 inside the group and again across.
    """
    unit = unit_of(layout_of(4, 2, 2), (10, 10))
    traffic = step_traffic([unit], Options(num_micro_steps=3))
    assert by_stage(traffic) == {
        "gather": (6, 0, 6 * 800),
        "reduce": (3, 0, 3 * 800),
        "boundary": (1, 2 * 2 * 200, 0),
        "agreement": (2, 2 * 2 * 16, 2 * 2 * 16),
    }
    assert traffic.collectives == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 3}
    assert traffic.inter_node_bytes == 800 + 64
    assert traffic.intra_node_bytes == 9 * 800 + 64
    assert traffic.inter_node_bytes_per_micro_step == 0


@pytest.mark.parametrize(
    ("backend", "last", "calls"), [("gloo", "all_to_all", 2), ("nccl", "reduce_scatter", 4)]
)
def test_two_stages(backend: str, last: str, calls: int) -> None:
    """4 ranks on 2 nodes, one group: across, each place exchanges one shard with its one peer.

    Shard 100 bytes. Between nodes: 2 pairs x 2 edges x 1 shard = 400 bytes a gather, where one
    ring over all four sends 3 shards over its 2 edges between nodes: 600. Inside: 2 nodes x 2
    blocks x 2 edges x 1 shard = 800; on gloo both blocks go in one call.
    """
    unit = unit_of(layout_of(4, 2, 4), (20, 5), gathers=1)
    options = Options(num_micro_steps=2, backend=backend)  # type: ignore[arg-type]
    traffic = step_traffic([unit], options)
    assert by_stage(traffic) == {
        "gather between nodes": (2, 2 * 400, 0),
        "gather within the node": (calls, 0, 2 * 800),
        "reduce within the node": (calls, 0, 2 * 800),
        "reduce between nodes": (2, 2 * 400, 0),
        "agreement": (1, 48, 48),  # 16 bytes: 2 x 3/4 of it over each of 2 + 2 edges
    }
    assert [stage.collective for stage in traffic.stages][-2] == last
    flat = step_traffic([unit], replace(options, hierarchical=False, two_hop=False))
    assert by_stage(flat) == {"gather": (2, 1200, 1200), "reduce": (2, 1200, 1200)}
    assert traffic.inter_node_bytes_per_micro_step == 800


def test_on_gloo_large_blocks_go_one_by_one() -> None:
    """3 nodes of 2 ranks: a call a block inside, a message to each peer between. Same bytes."""
    shard_rows = WHOLE_BLOCK_BYTES // (2 * 4)  # a block of two such shards is the largest at once
    layout = layout_of(6, 2, 6)
    for rows, kind, inside, between in ((0, "all_to_all", 1, 1), (1, "send", 3, 2)):
        unit = unit_of(layout, (6 * (shard_rows + rows), 1), gathers=1)
        stages = {
            stage.name: stage for stage in step_traffic([unit], Options(backend="gloo")).stages
        }
        assert stages["gather within the node"].calls == inside
        assert stages["reduce within the node"].calls == inside
        assert stages["reduce between nodes"].calls == between
        assert stages["reduce between nodes"].collective == kind
        assert {stage.blocks for stage in stages.values()} == {1}  # gloo launches nothing together
        on_nccl = step_traffic([unit], Options(backend="nccl"))
        assert {s.name: (s.inter_node_bytes, s.intra_node_bytes) for s in on_nccl.stages} == {
            name: (s.inter_node_bytes, s.intra_node_bytes) for name, s in stages.items()
        }


def test_messages_of_a_unit_that_is_reduced_in_parts() -> None:
    """Each goes as its own size says; parts of a whole are the whole, and what goes twice counts
    twice. The gathers are one message as before.
    """
    layout = layout_of(16, 2, 8)
    large, small = (8, 2 * WHOLE_BLOCK_BYTES // 8), (8, 2)
    whole = unit_of(layout, small, large)
    parts = replace(whole, reduced=((large,), (small,)))
    twice = replace(whole, reduced=((large,), (small, large)))
    for backend in ("nccl", "gloo"):
        options = Options(backend=backend)
        sent = [by_stage(step_traffic([unit], options)) for unit in (whole, parts, twice)]
        for name in ("reduce within the node", "reduce between nodes"):
            (_, *one), (calls, *two), (_, *three) = (each.pop(name) for each in sent)
            assert two == one
            of_large = by_stage(step_traffic([unit_of(layout, large)], options))[name]
            assert three == [a + b for a, b in zip(one, of_large[1:], strict=True)]
            of_small = by_stage(step_traffic([unit_of(layout, small)], options))[name]
            assert calls == of_large[0] + of_small[0]
        assert sent[0] == sent[1] == sent[2]
    within = [
        s for s in step_traffic([parts], options).stages if s.name == "reduce within the node"
    ]
    assert [s.calls for s in within] == [4, 1]  # on gloo the large one block by block


def test_itemsizes_padding_and_frozen_parameters() -> None:
    """5 rows over 4 shards are padded to 8; a frozen parameter is gathered and not reduced."""
    unit = unit_of(layout_of(4, 4, 4), (5, 3), gathers=1, gather_itemsize=2, reduce_itemsize=4)
    options = Options(two_hop=False)  # no agreement
    traffic = step_traffic([replace(unit, frozen=((4, 1),))], options)
    ring = 4 * 3  # edges x shards over each
    assert by_stage(traffic) == {
        "gather": (1, 0, ring * 2 * (2 * 3 + 1)),
        "reduce": (1, 0, ring * 4 * (2 * 3)),
    }
    only_frozen = step_traffic([replace(unit, shapes=(), frozen=((4, 1),))], Options())
    assert only_frozen.collectives == {"all_gather": 1}


def test_a_smaller_group_gathers_again() -> None:
    unit = unit_of(layout_of(8, 4, 8), (8, 1), regather=GroupShape(1, 2, 4))
    traffic = step_traffic([unit], Options(hierarchical=False))
    # A shard of 4 bytes, 8 ranks; then shards of 16 bytes in four pairs of ranks.
    assert by_stage(traffic)["gather"] == (1, 2 * 7 * 4, 6 * 7 * 4)
    assert by_stage(traffic)["gather again"] == (1, 0, 4 * 2 * 16)


def test_one_shard_and_one_replica_send_nothing() -> None:
    unit = unit_of(layout_of(4, 2, 1), (10, 10))
    assert step_traffic([unit], Options(hierarchical=False)).collectives == {"all_reduce": 2}
    alone = Layout(topology=Topology.uniform(world_size=1, ranks_per_node=1), partition_size=1)
    assert step_traffic([unit_of(alone, (3, 3))], Options()).collectives == {}


def test_a_node_of_several_replicas_crosses_with_its_sum() -> None:
    """4 replicas on 2 nodes, 400 bytes: a flat ring sends 2 x 3/4 of them over its two edges
    between nodes; two rings of a half each send 2 x 1/2 of a half over two edges each.
    """
    unit = unit_of(layout_of(4, 2, 1), (10, 10))
    flat = by_stage(step_traffic([unit], Options(hierarchical=False)))
    assert flat["boundary"] == (1, 2 * 600, 2 * 600)
    ours = by_stage(step_traffic([unit], Options()))
    assert ours["boundary between nodes"] == (1, 2 * 2 * 200, 0)
    within = (1, 0, 2 * 2 * 200)  # nodes x edges x half the message
    assert ours["boundary: sum within the node"] == within
    assert ours["boundary: gather within the node"] == within


def test_hsdp_reduces_over_the_replicas_in_every_micro_step() -> None:
    unit = unit_of(layout_of(4, 2, 2), (10, 10))
    hsdp = step_traffic([unit], Options(num_micro_steps=4, two_hop=False))
    ours = step_traffic([unit], Options(num_micro_steps=4))
    assert hsdp.collectives["all_reduce"] == 4
    boundary = by_stage(ours)["boundary"][1]
    assert hsdp.inter_node_bytes == 4 * boundary
    assert hsdp.inter_node_bytes_per_micro_step == boundary


def test_plain_fsdp_is_one_group_of_all_ranks() -> None:
    units = [unit_of(layout_of(16, 4, 4), (16, 1)), unit_of(layout_of(16, 4, 4, 2), (16, 1))]
    assert partition_sizes(layout_of(16, 4, 4).topology) == [1, 2, 4, 8, 16]
    plain, beside_tp = over_all_ranks(units, num_nodes=4, ranks_per_node=4)
    assert (plain.shard, plain.replicate.size) == (GroupShape(4, 4, 1), 1)
    assert (beside_tp.shard, beside_tp.replicate.size) == (GroupShape(4, 2, 2), 1)


def test_buckets() -> None:
    assert buckets([], 10) == []
    assert buckets([3, 3, 3, 3, 3], 10) == [[0, 1, 2, 3], [4]]  # closed once it holds 10
    assert buckets([3, 12, 3, 3], 10) == [[0], [1], [2, 3]]  # a large one travels alone
    assert buckets([5, 5], 1) == [[0], [1]]
    for limit in (1, 7, 100):
        found = buckets([4, 1, 9, 2, 2, 30, 1], limit)
        assert [position for bucket in found for position in bucket] == list(range(7))


def test_like_units_may_be_counted_instead_of_listed() -> None:
    layout = layout_of(16, 4, 8)
    listed = [unit_of(layout, (8, 5), name=f"layers.{i}") for i in range(6)]
    counted = [unit_of(layout, (8, 5), count=6)]
    for limit in (1, 100, 2**20):
        options = Options(num_micro_steps=3, bucket_size_bytes=limit)
        one, six = step_traffic(counted, options), step_traffic(listed, options)
        assert one.collectives == six.collectives
        assert one.inter_node_bytes == six.inter_node_bytes
        assert one.intra_node_bytes == six.intra_node_bytes


def test_16384_ranks_in_milliseconds() -> None:
    """Every layout of a large cluster: the stages never send more between nodes than the ring."""
    topology = Topology.uniform(world_size=16384, ranks_per_node=8)
    for partition_size in partition_sizes(topology):
        layout = Layout(topology=topology, partition_size=partition_size)
        units = [unit_of(layout, (16384, 64), count=126)]
        staged = step_traffic(units, Options(num_micro_steps=4))
        flat = step_traffic(units, Options(num_micro_steps=4, hierarchical=False))
        assert staged.inter_node_bytes <= flat.inter_node_bytes
        if 8 < partition_size < 16384:
            n, p = partition_size // 8, partition_size
            micro = staged.inter_node_bytes_per_micro_step, flat.inter_node_bytes_per_micro_step
            assert micro[0] * n * (p - 1) == micro[1] * (n - 1) * p  # (n - 1)/n of (p - 1)/p
        plain = Comparison(tuple(units), Options(), num_nodes=2048, ranks_per_node=8).plain_fsdp
        assert plain.collectives == {"all_gather": 252, "reduce_scatter": 126}


TABLE = """\
partition groups:   2 groups of 8 ranks, 4 in each of 2 nodes
replication groups: 8 groups of 2 ranks, 1 in each of 2 nodes

                                        calls  between nodes            inside nodes
unit           stage                    /step    /micro-step     /step   /micro-step     /step
embedding      gather between nodes         8       262.1 MB  1.049 GB             0         0
               gather within the node      16              0         0      1.573 GB  6.291 GB
               reduce within the node       8              0         0      786.4 MB  3.146 GB
               reduce between nodes         4       131.1 MB  524.3 MB             0         0
               boundary                shared              -  131.1 MB             -         0
               (plain FSDP)                12       737.3 MB  2.949 GB      2.212 GB  8.847 GB
layers.* x 12  gather between nodes        96       251.7 MB  1.007 GB             0         0
               gather within the node     192              0         0       1.51 GB   6.04 GB
               reduce within the node      96              0         0        755 MB   3.02 GB
               reduce between nodes        48       125.8 MB  503.3 MB             0         0
               boundary                     1              -  125.8 MB             -         0
               (plain FSDP)               144       707.8 MB  2.831 GB      2.123 GB  8.493 GB
(all)          agreement                    2              -  2.576 kB             -  2.352 kB

in all, per optimizer step of 4 micro-steps    calls  between nodes         inside nodes
  this run                                       471        3.34 GB              18.5 GB
  plain HSDP, these groups                       208       6.423 GB  1.9 x      16.18 GB
  plain FSDP over all ranks                      156        5.78 GB  1.7 x      17.34 GB
"""


def test_the_table_reads_like_this() -> None:
    layout = layout_of(16, 4, 8)
    units = [
        unit_of(layout, (32000, 512), name="embedding"),
        *(unit_of(layout, (512, 512), (512, 2048), name=f"layers.{i}") for i in range(12)),
    ]
    options = Options(num_micro_steps=4, bucket_size_bytes=25 * 2**20)
    assert str(Comparison(tuple(units), options, 4, 4)) == TABLE.rstrip("\n")
