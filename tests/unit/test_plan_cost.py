"""Laws of the cost model, and cases worked by hand, by the names of docs/cost_model.md."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape, Layout
from mics_dtensor.plan.cluster import UNCERTAINTY, Cluster, Link, presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work, unit_compute_s
from mics_dtensor.plan.cost import between_s, extra_latency_s, inside_s, ring_latency_s, stage_s
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.overlap import Overlap
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import ModelShape, preset_of, shape_of
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.step import (
    Piece,
    StepTime,
    exposed_s,
    optimizer_s,
    step_time,
    update_stages,
)
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.plan.unit import Unit
from mics_dtensor.topology import Topology

SHAPE = ModelShape(
    num_layers=4, hidden=512, attention_width=512, key_value_width=512, ffn=2048, vocab=1000
)


def link(bandwidth: float, *, hop: float = 0.0, ranks: int = 1, nodes: int = 1) -> Link:
    return Link(
        bandwidth_bytes_per_s=bandwidth,
        hop_latency_s=hop,
        shares=((1.0, 1.0),),
        curve_ranks=ranks,
        curve_nodes=nodes,
        origin="user",
        source="test",
    )


def plain(*, inside: float = 1e12, between: float = 1e9, hop: float = 0.0) -> Cluster:
    """Two ranks a node, links without latency unless said: seconds are bytes over bandwidth."""
    return Cluster(
        name="test",
        gpu="test",
        ranks_per_node=2,
        peak_flops_per_s=1e12,
        product_share=1.0,
        product_half_width=0.0,
        memory_bytes=10**10,
        memory_bytes_per_s=1e12,
        inside=link(inside, hop=hop),
        between=link(between, hop=hop),
        base_latency_s=0.0,
        origin="user",
        source="test",
    )


def units_on(world: int, size: int, shape: ModelShape = SHAPE, node: int = 2) -> tuple[Unit, ...]:
    layout = Layout(
        topology=Topology.uniform(world_size=world, ranks_per_node=node), partition_size=size
    )
    return traffic_units(preset_of(shape, name="test"), layout, Policy(chunked_loss=False))


def work(**changes: object) -> Work:
    its = Work(shape=SHAPE, seq_len=1024, micro_batch=1, checkpointing="none")
    return replace(its, **changes)  # type: ignore[arg-type]


FREE = Overlap(gather=True, reduce=True)
NONE = Overlap(gather=False, reduce=False)


def step(
    size: int,
    *,
    world: int = 8,
    on: Cluster | None = None,
    overlap: Overlap = NONE,
    options: Options | None = None,
    its: Work | None = None,
) -> StepTime:
    units = units_on(world, size)
    traffic = step_traffic(units, options or Options())
    return step_time(units, traffic, its or work(), on or plain(), overlap)


def test_c2_the_nic_of_a_node_carries_the_bytes_that_traffic_counts() -> None:
    """Every stage of every layout: bytes out of a node over the bandwidth of its NIC."""
    for size in (1, 2, 4, 8):
        traffic = step_traffic(units_on(8, size), Options(num_micro_steps=3))
        its = plain(between=1e9)
        seconds = sum(between_s(stage, its) for stage in traffic.stages)
        assert seconds == pytest.approx(traffic.inter_node_bytes / 4 / 1e9)  # 4 nodes


def test_c2_by_hand() -> None:
    """A gather of 4 shards of 1 MB on 2 nodes of 2: 3 shards leave each node. 3 MB at 1 GB/s."""
    stage = Stage(
        unit="u",
        name="gather",
        collective="all_gather",
        group=GroupShape(2, 2, 1),
        calls=1,
        inter_node_bytes=6_000_000,
        intra_node_bytes=6_000_000,
        every_micro_step=True,
    )
    assert between_s(stage, plain(between=1e9)) == pytest.approx(3e-3)
    assert inside_s(stage, plain(inside=2e9)) == pytest.approx(1.5e-3)  # over each of 2 edges
    assert stage_s(stage, plain(between=1e9, inside=2e9)) == pytest.approx(3e-3)  # side by side


def test_c3_an_edge_inside_carries_all_shards_but_one() -> None:
    units = units_on(2, 2)
    traffic = step_traffic(units, Options())
    seconds = sum(inside_s(stage, plain(inside=1e9)) for stage in traffic.stages)
    assert seconds == pytest.approx(traffic.intra_node_bytes / 2 / 1e9)


def test_c4_latency_by_hand() -> None:
    """16 ranks on 2 nodes: 14 hops inside and one between; an all-reduce takes them twice."""
    its = replace(plain(), base_latency_s=1.0, inside=link(1, hop=0.1), between=link(1, hop=10))
    assert ring_latency_s(ranks=16, nodes=2, ways=1, cluster=its) == pytest.approx(1 + 1.4 + 10)
    assert ring_latency_s(ranks=16, nodes=2, ways=2, cluster=its) == pytest.approx(1 + 22.8)


def test_c5_only_what_the_curve_does_not_hold_is_added() -> None:
    p4d = cluster("p4d")

    def extra(nodes: int) -> float:
        units = units_on(8 * nodes, 8 * nodes, node=8)
        options = Options(hierarchical=False)
        return extra_latency_s(step_traffic(units, options).stages[0], p4d)

    assert extra(1) == 0.0  # the curve inside a node was taken on 8 ranks
    assert extra(2) == 0.0  # and that between nodes on 2 nodes
    # Each node more: 7 hops inside and one between.
    hops = 7 * p4d.inside.hop_latency_s + p4d.between.hop_latency_s
    assert extra(5) == pytest.approx(3 * hops)
    gather = step_traffic(units_on(40, 40, node=8), Options(hierarchical=False)).stages[0]
    twice = extra_latency_s(replace(gather, collective="all_reduce"), p4d)
    assert twice == pytest.approx(2 * extra(5))


def test_t1_without_overlap_a_step_is_the_sum_of_all() -> None:
    """Nothing is lost: products, every stage of the traffic, and the optimizer."""
    for size in (1, 2, 4, 8):
        units, its = units_on(8, size), plain(inside=1e10, between=1e9, hop=1e-6)
        traffic = step_traffic(units, Options(num_micro_steps=3))
        time = step_time(units, traffic, work(), its, NONE)
        sent = sum(stage_s(stage, its) for stage in traffic.stages)
        rest = time.compute_s + time.optimizer_s
        assert time.step_s == pytest.approx(rest + sent)


def test_t1_overlap_hides_and_never_adds() -> None:
    for size in (1, 2, 4, 8):
        for between in (1e7, 1e9, 1e11):
            its = plain(inside=10 * between, between=between)
            hidden, shown = (step(size, on=its, overlap=o) for o in (FREE, NONE))
            assert hidden.step_s <= shown.step_s * (1 + 1e-12)
            assert hidden.compute_s == shown.compute_s


def test_t1_limits() -> None:
    """Endless links: products and optimizer alone. Endless GPUs: messages alone."""
    fast = step(8, on=plain(inside=1e30, between=1e30), overlap=FREE)
    assert fast.step_s == pytest.approx(fast.compute_s + fast.optimizer_s)
    its = replace(plain(), peak_flops_per_s=1e30, memory_bytes_per_s=1e30)
    free, none = (step(8, on=its, overlap=o).step_s for o in (FREE, NONE))
    assert free == pytest.approx(none)  # nothing to hide behind


@pytest.mark.parametrize("part", ["inside", "between", "compute"])
def test_a_faster_part_never_makes_a_longer_step(part: str) -> None:
    for size in (1, 2, 4, 8):
        for overlap in (FREE, NONE):
            its = [plain().scaled(**{part: factor}) for factor in (0.5, 1, 2, 4)]
            steps = [step(size, on=at, overlap=overlap).step_s for at in its]
            assert steps == sorted(steps, reverse=True)


def test_more_micro_steps_share_one_boundary() -> None:
    one, four = (step(2, options=Options(num_micro_steps=n)) for n in (1, 4))
    assert four.boundary_s == pytest.approx(one.boundary_s)
    assert four.compute_s == pytest.approx(4 * one.compute_s)
    assert four.exposed_gather_s == pytest.approx(4 * one.exposed_gather_s)
    every = step(2, options=Options(num_micro_steps=4, two_hop=False))
    agreement = sum(
        stage_s(s, plain())
        for s in step_traffic(units_on(8, 2), Options()).stages
        if s.name == "agreement"
    )
    assert every.boundary_s == pytest.approx(4 * (one.boundary_s - agreement))


def test_t2_by_hand() -> None:
    """1,024 tokens of a block: 2 FLOPs a weight and 4 s w of attention, at 1 TFLOP/s."""
    block = units_on(8, 8)[1]
    its = replace(plain(), memory_bytes_per_s=1e30)
    weights = 512 * 1536 + 512 * 512 + 3 * 512 * 2048
    forward = 1024 * (2 * weights + 4 * 1024 * 512) / 1e12
    assert unit_compute_s(block, work(), its) == pytest.approx((forward, 2 * forward))
    again = unit_compute_s(block, work(checkpointing="full"), its)
    assert again == pytest.approx((forward, 3 * forward))
    early = unit_compute_s(block, work(checkpointing="early"), its)
    assert early[1] == pytest.approx(3 * forward - 1024 * 2 * 2048 * 512 / 1e12)


def test_t3_by_hand() -> None:
    """Three units of 10 s of products: 4 s gathers hide but for the first, 14 s ones leave 4 s."""
    piece = Piece(count=3, forward_s=10, backward_s=20, gather_s=4, gather_again_s=4, reduce_s=6)
    ahead, back = exposed_s([piece], FREE)
    assert (ahead.gather_s, back.gather_s, back.reduce_s) == pytest.approx((4, 4, 6))
    ahead, _ = exposed_s([replace(piece, gather_s=14)], FREE)
    assert ahead.gather_s == pytest.approx(14 + 2 * 4)
    # 15 s of gather and 15 s of reduction beside 20 s of products: 10 s are left, half of each.
    slow = replace(piece, gather_again_s=15, reduce_s=15)
    _, back = exposed_s([slow], FREE)
    assert (back.gather_s, back.reduce_s) == pytest.approx((15 + 5, 15 + 5))
    _, back = exposed_s([slow], Overlap(gather=True, reduce=False))
    assert (back.gather_s, back.reduce_s) == pytest.approx((15, 3 * 15))
    many, listed = (
        exposed_s([replace(slow, count=7)], FREE),
        exposed_s([replace(slow, count=1)] * 7, FREE),
    )
    assert many[1].gather_s == pytest.approx(listed[1].gather_s)
    assert many[0].gather_s == pytest.approx(listed[0].gather_s)


def test_t4_and_t5_states_over_the_replicas() -> None:
    """The optimizer's time falls by the number of replicas; the bytes are an all-reduce's."""
    units = units_on(8, 2)
    whole, cut = work(), work(num_states_shards=8)
    assert optimizer_s(units, whole, plain()) == pytest.approx(4 * optimizer_s(units, cut, plain()))
    same = [replace(unit, gather_itemsize=4) for unit in units]
    traffic = step_traffic(same, Options(bucket_size_bytes=1))
    hop = sum(s.inter_node_bytes for s in traffic.stages if s.name == "boundary")
    update = sum(s.inter_node_bytes for s in update_stages(same, 8))
    assert 2 * update == pytest.approx(hop, rel=1e-6)
    all_reduced, scattered = (step(2, its=its).boundary_s for its in (whole, cut))
    assert scattered == pytest.approx(all_reduced / 2)
    with pytest.raises(PlanError, match="multiple"):
        update_stages(units, 3)


def test_t6_wide_models_reach_more_of_the_peak() -> None:
    p4d = cluster("p4d")
    shares = [p4d.share_of_products(hidden) for hidden in (378, 1024, 4096, 10**9)]
    assert shares[0] == pytest.approx(p4d.product_share / 2)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(p4d.product_share)


def test_f_flops_by_hand() -> None:
    """6 N without the embedding, and attention: Llama 3 8B at 8,192 tokens."""
    llama = shape_of(preset("llama3", "8B"))
    products = 8030261248 - 128256 * 4096 - 65 * 4096  # without the embedding and the norms
    assert llama.model_flops(8192) == 6 * products + 12 * 32 * 4096 * 8192
    more = [llama.hardware_flops(8192, how) for how in ("none", "op", "2", "full")]
    assert more == sorted(more)
    assert more[0] == llama.model_flops(8192)
    assert more[-1] == pytest.approx(4 / 3 * more[0], rel=0.03)  # the head is not computed again


def test_shares_between_the_sizes_of_a_table() -> None:
    its = replace(link(1.0), shares=((1.0, 0.1), (100.0, 0.4)))
    assert its.share(0.5) == pytest.approx(0.05)  # the time of the smallest message
    assert its.share(10.0) == pytest.approx(0.2)  # half way in logarithms
    assert its.share(1e9) == 0.4


@pytest.mark.parametrize("name", presets()["cluster"])
def test_every_preset_is_whole(name: str) -> None:
    its = cluster(name)
    for each in (its.inside, its.between):
        sizes, shares = zip(*each.shares, strict=True)
        assert list(sizes) == sorted(sizes)
        assert list(shares) == sorted(shares)
        assert shares[-1] == 1.0
        times = [size / each.share(size) for size in (1, 1e5, 1e6, 3e7, 1e9, 1e11)]
        # A larger message never arrives earlier.
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times))
    assert {origin for _, _, origin, _ in its.constants()} <= set(UNCERTAINTY)


def test_an_unknown_cluster_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match="p4d, p4de"):
        cluster("p44d")
    with pytest.raises(PlanError, match="there is no file"):
        cluster("nowhere.toml")
