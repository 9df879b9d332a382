"""What a runtime adds to messages, and what messages take from products: cases by hand."""

from dataclasses import replace

import pytest

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster import Cluster, Link
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work, unit_compute_s
from mics_dtensor.plan.cost import stage_s
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.overlap import PROFILES, Host, Overlap, gathered_again, message_s
from mics_dtensor.plan.shape import ModelShape
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.step import step_time
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.plan.unit import Unit

UNIT = Unit(
    name="u",
    shapes=((100, 100), (100, 300), (100,)),
    shard=GroupShape(2, 2, 1),
    replicate=GroupShape(1, 1, 4),
    count=2,
    gathers=1,
    gather_itemsize=2,
)


def two_by_two(hop_s: float) -> Cluster:
    """1 GB/s out of a node, 1 TB/s inside and of memory."""
    link = Link(
        bandwidth_bytes_per_s=1e12,
        hop_latency_s=hop_s,
        shares=((1.0, 1.0),),
        curve_ranks=1,
        curve_nodes=1,
        origin="user",
        source="test",
    )
    return replace(
        cluster("p4d"),
        ranks_per_node=2,
        memory_bytes_per_s=1e12,
        inside=link,
        between=replace(link, bandwidth_bytes_per_s=1e9),
        base_latency_s=0.0,
        unit_s_per_byte=0.0,
    )


def gather() -> Stage:
    (stage,) = (
        each
        for each in step_traffic([UNIT], Options(hierarchical=False)).stages
        if each.name == "gather"
    )
    return stage


def test_t7_a_message_a_matrix_and_what_the_host_adds() -> None:
    """Two units of shards of 10,025 elements: 3 x 20,050 bytes of each leave a node, 0.1203 ms."""
    its = two_by_two(1e-5)  # a ring of 4 on 2 nodes: 3 hops of 0.01 ms
    unit_each = Overlap(gather=True, reduce=True)
    assert message_s(gather(), UNIT, its, unit_each) == pytest.approx(0.1203e-3 + 2 * 0.03e-3)
    assert message_s(gather(), UNIT, its, unit_each) == stage_s(gather(), its)
    matrix_each = replace(unit_each, by_matrix=True)  # two matrices; the bias has no message
    assert message_s(gather(), UNIT, its, matrix_each) == pytest.approx(0.1203e-3 + 4 * 0.03e-3)
    host = Host(message_s=1e-4, rank_s=1e-5, copies=1, reuse_numel=1e9)
    told = message_s(gather(), UNIT, its, replace(matrix_each, host=host))
    # 4 messages of 4 ranks, and 160,400 bytes read and written once.
    assert told == pytest.approx(0.2403e-3 + 4 * (1e-4 + 4e-5) + 2 * 160_400 / 1e12)


def test_t8_what_is_freed_before_its_backward() -> None:
    def gpt(hidden: int) -> list[int]:
        return [3 * hidden**2, hidden**2, 4 * hidden**2, 4 * hidden**2]

    # Of w2 lies itself between its second forward and its backward: 0.42e9 of 1e9 elements.
    assert gathered_again(gpt(10240), 1e9) == pytest.approx(8 / 12)
    assert gathered_again(gpt(4096), 1e9) == 0.0
    assert gathered_again([8192**2] * 4 + [4 * 8192**2] * 2, 1e9) == pytest.approx(4 / 12)
    assert gathered_again([], 1e9) == 0.0


SHAPE = ModelShape(
    num_layers=2, hidden=512, attention_width=512, key_value_width=512, ffn=512, vocab=10
)
WORK = Work(shape=SHAPE, seq_len=4096, micro_batch=1, checkpointing="none")


def test_t1_messages_beside_products_slow_them() -> None:
    """Half a second for each second that is hidden, wherever it is hidden."""
    shapes = ((512, 512),) * 4
    units = [replace(UNIT, name="layers.*", shapes=shapes, replicate=GroupShape(4, 1, 4))]
    its = replace(two_by_two(0.0), peak_flops_per_s=1e13)
    traffic = step_traffic(units, Options(hierarchical=False))
    none = Overlap(gather=False, reduce=False)
    for free in (
        Overlap(gather=True, reduce=True),
        Overlap(gather=True, reduce=True, boundary=True),
    ):
        shown, hidden = (step_time(units, traffic, WORK, its, o) for o in (none, free))
        slowed = step_time(units, traffic, WORK, its, replace(free, slowdown=0.5))
        gone = shown.step_s - hidden.step_s
        assert gone > 0
        assert slowed.compute_s - hidden.compute_s == pytest.approx(0.5 * gone)
        assert slowed.step_s - hidden.step_s == pytest.approx(0.5 * gone)


def test_t1_hsdp_hides_the_all_reduce_behind_the_last_backward() -> None:
    units = [
        replace(UNIT, name="layers.*", shapes=((512, 512),) * 4, replicate=GroupShape(4, 1, 4))
    ]
    traffic = step_traffic(units, Options(hierarchical=False, num_micro_steps=2))
    for peak in (1e12, 1e14):
        its = replace(two_by_two(0.0), peak_flops_per_s=peak)
        shown, hidden = (
            step_time(units, traffic, WORK, its, PROFILES[name]) for name in ("fsdp2", "hsdp")
        )
        backward_s = 2 * unit_compute_s(units[0], WORK, its)[1]  # of two blocks
        assert hidden.boundary_s == pytest.approx(max(0.0, shown.boundary_s - backward_s))
        assert (hidden.boundary_s > 0) == (peak == 1e14)
        assert replace(hidden, boundary_s=shown.boundary_s) == shown


def test_profiles_say_what_they_hide() -> None:
    assert {name for name, its in PROFILES.items() if its.host} == {"deepspeed-0.5"}
    p4d = cluster("p4d")
    assert PROFILES["fsdp2"].on(p4d).slowdown == p4d.overlap_slowdown == pytest.approx(24 / 108)
    old = PROFILES["deepspeed-0.5"]
    assert not old.gather
    assert not old.reduce
