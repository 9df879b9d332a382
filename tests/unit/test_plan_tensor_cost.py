"""What tensor parallel costs, worked by hand, by the names of docs/cost_model.md. No torch."""

from dataclasses import replace

import pytest
from harness.questions import question

from mics_dtensor.layout import Layout
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work, unit_compute_s
from mics_dtensor.plan.memory import CPU, Holding, Kernels, block_bytes_per_token, peak_memory
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.search import answer
from mics_dtensor.plan.shape import ModelShape, shape_of
from mics_dtensor.plan.step import tensor_parallel_s
from mics_dtensor.plan.tensor_parallel import Message, messages_s, part_of, unit_messages
from mics_dtensor.topology import Topology


def layout(degree: int, size: int) -> Layout:
    topology = Topology.uniform(world_size=2 * degree, ranks_per_node=degree)
    return Layout(topology=topology, partition_size=size, tensor_parallel_size=degree)


def test_t9_by_hand() -> None:
    """A block of 1,024 tokens, h 4096: 8 MiB a message, 7/8 of it over an edge of 8 ranks."""
    its = cluster("p5")
    fast = replace(
        its,
        inside=replace(its.inside, hop_latency_s=0.0, shares=((1.0, 1.0),), curve_ranks=8),
    )
    units = {u.name: u for u in traffic_units(preset("llama3", "8B"), layout(8, 1), Policy())}
    shape = shape_of(preset("llama3", "8B"))
    size = 2 * 1024 * 4096
    for how, gathers, reductions in (("none", 4, 4), ("op", 6, 4), ("full", 6, 6), ("2", 5, 5)):
        messages = unit_messages(
            units["layers.*"],
            shape,
            tokens=1024,
            checkpointing=how,  # type: ignore[arg-type]
        )
        assert messages == [
            Message("all_gather", size, gathers),
            Message("reduce_scatter", size, reductions),
            Message("all_reduce", 2 * 4096, 2),
        ]
        moved = 7 / 8 * size * (gathers + reductions) + 2 * 2 * 7 / 8 * 2 * 4096
        seconds = moved / fast.inside.bandwidth_bytes_per_s
        assert messages_s(messages, 8, fast) == pytest.approx(seconds)
    ends = [
        unit_messages(units[name], shape, tokens=1024, checkpointing="full", num_loss_chunks=8)
        for name in ("tok_embeddings", "norm, lm_head")
    ]
    assert [[m.count for m in messages] for messages in ends] == [[1, 1], [1, 1, 1, 24]]
    assert ends[1][-1].size_bytes == 4 * 1024 // 8
    tied = traffic_units(preset("llama3", "1B"), layout(8, 1), Policy())[0]
    both = unit_messages(tied, shape, tokens=1024, checkpointing="none", num_loss_chunks=8)
    assert [m.count for m in both] == [2, 2, 1, 24]


def test_t9_nothing_hides_it() -> None:
    """On endless links inside it costs nothing; on slow ones it adds to the step as it is."""
    asked = question(
        "p5",
        num_nodes=2,
        global_batch=64,
        micro_batches=(1,),
        checkpointings=("full",),
        tensor_parallel=8,
    )
    free = answer(replace(asked, cluster=asked.cluster.scaled(inside=1e9)))
    told = answer(asked)
    for row, without in zip(told.rows, free.rows, strict=True):
        assert row.variant == without.variant
        assert row.time.compute_s == pytest.approx(without.time.compute_s)
        assert row.time.tensor_parallel_s > without.time.tensor_parallel_s > 0  # its latency
        rest = row.step_s - row.time.tensor_parallel_s
        assert rest == pytest.approx(without.step_s - without.time.tensor_parallel_s, rel=0.01)
    units = traffic_units(asked.model, asked.layout(1), Policy())
    work = Work(
        shape=shape_of(asked.model),
        seq_len=4096,
        micro_batch=1,
        checkpointing="full",
        tensor_parallel=8,
    )
    each = sum(u.count * tensor_parallel_s(u, work, asked.cluster) for u in units)
    (row,) = [row for row in told.rows if row.variant.partition_size == 1]
    assert row.time.tensor_parallel_s == pytest.approx(row.num_micro_steps * each)


def test_f9_products_are_cut_and_narrower() -> None:
    its, shape = cluster("p5"), shape_of(preset("llama3", "8B"))
    (block,) = [
        u for u in traffic_units(preset("llama3", "8B"), layout(4, 1), Policy()) if u.count > 1
    ]
    free = replace(its, memory_bytes_per_s=1e30, attention=())
    works = [
        Work(shape=shape, seq_len=4096, micro_batch=1, checkpointing="none", tensor_parallel=t)
        for t in (1, 4)
    ]
    whole, part = (unit_compute_s(block, work, free)[0] for work in works)
    shares = [its.share_of_products(width) for width in (4096, 2 * 4096 / 5)]
    assert part == pytest.approx(whole / 4 * shares[0] / shares[1])
    # Outside of products: norms and sums on a quarter of the sequence, the rest a quarter as wide.
    assert part_of(shape, 4).block_bytes(sequence_parts=4) == pytest.approx(shape.block_bytes() / 4)
    quick = replace(its, peak_flops_per_s=1e30)
    (head,) = [
        u for u in traffic_units(preset("llama3", "8B"), layout(4, 1), Policy()) if "head" in u.name
    ]
    seconds = sum(unit_compute_s(head, works[1], quick))
    assert seconds == pytest.approx(4096 * 78 * 128256 / 4 / its.memory_bytes_per_s)  # F8


def test_m4_the_slices_of_a_loss_are_of_the_whole_sequence() -> None:
    """8,192 tokens of h 8192 without blocks to speak of: the loss is the peak."""
    model = preset("llama3", "70B").with_layers(1)
    units = traffic_units(model, layout(8, 1), Policy())
    work = Work(
        shape=shape_of(model),
        seq_len=8192,
        micro_batch=4,
        checkpointing="none",
        tensor_parallel=8,
    )
    one, two = (
        peak_memory(units, work, Holding(num_loss_chunks=chunks)).activations for chunks in (1, 2)
    )
    logits = 16 * 128256 // 8 * 4 * 8192
    assert one - two == logits - logits // 2 - 6 * 8192 * 4 * 8192


def test_m2_a_norm_is_cut_and_what_it_returns_is_whole() -> None:
    shape = ModelShape(
        num_layers=2, hidden=512, attention_width=512, key_value_width=512, ffn=2048, vocab=1000
    )

    def kept(degree: int, kernels: Kernels) -> float:
        work = Work(
            shape=shape,
            seq_len=128,
            micro_batch=1,
            checkpointing="none",
            tensor_parallel=degree,
        )
        return block_bytes_per_token(work, kernels)

    for kernels in (CPU, Kernels()):
        whole = kept(1, kernels)
        everywhere = 2 * 2 * 512 + 4 * 128  # what two norms return, and the rotation
        assert kept(4, kernels) == pytest.approx((whole - everywhere) / 4 + everywhere)
