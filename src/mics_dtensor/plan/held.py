"""What a variant of a question holds, in closed form. Pure."""

from __future__ import annotations

from dataclasses import replace

from mics_dtensor.layout import Layout
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.memory import Holding, Memory, peak_memory
from mics_dtensor.plan.presets.units import traffic_units
from mics_dtensor.plan.question import Question, Variant, variants_of
from mics_dtensor.plan.shape import ModelShape, shape_of
from mics_dtensor.plan.unit import Unit


def units_of(question: Question, layout: Layout, variant: Variant) -> tuple[Unit, ...]:
    """The FSDP units of a variant."""
    policy = replace(
        question.policy,
        node_local_backward=variant.node_local_backward,
        update_itemsize=question.shard_itemsize(variant)
        if variant.optimizer_over_replicas
        else None,
    )
    return traffic_units(question.model, layout, policy)


def work_of(question: Question, shape: ModelShape, variant: Variant) -> Work:
    """What a rank computes in a micro-step."""
    ranks = question.num_data_ranks
    return Work(
        shape=shape,
        seq_len=question.seq_len,
        micro_batch=variant.micro_batch,
        checkpointing=variant.checkpointing,
        num_states_shards=ranks if variant.optimizer_over_replicas else None,
        tensor_parallel=question.tensor_parallel,
        num_loss_chunks=question.num_loss_chunks,
        operators=question.operators,
    )


def memory_of(question: Question, shape: ModelShape, layout: Layout, variant: Variant) -> Memory:
    """What a rank holds at its peak, in closed form."""
    holding = Holding(
        param_itemsize=question.shard_itemsize(variant),
        has_masters=question.has_masters and variant.optimizer_over_replicas,
        num_loss_chunks=question.num_loss_chunks,
        num_micro_steps=question.sequences_of_a_rank // variant.micro_batch,
        hierarchical=variant.hierarchical,
        reserved_bytes=question.cluster.reserved_bytes,
    )
    work = work_of(question, shape, variant)
    return peak_memory(units_of(question, layout, variant), work, holding)


def least_bytes(question: Question) -> int:
    """What a rank holds at least, over every partition size and variant.

    More sequences in a micro-step hold more, but for a single micro-step, which sums nothing.
    """
    shape = shape_of(question.model)
    if not question.micro_batches:
        question = replace(question, micro_batches=(1, question.sequences_of_a_rank))
    return min(
        memory_of(question, shape, layout, variant).total
        for layout in question.layouts()
        for variant in variants_of(question, layout)
    )
