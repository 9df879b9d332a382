"""Every partition size and variant of a run on a cluster, and the one to take. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout
from mics_dtensor.plan.cluster import UNCERTAINTY, Cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.held import memory_of, units_of, work_of
from mics_dtensor.plan.memory import Memory
from mics_dtensor.plan.misfit import why_nothing_fits
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.overlap import Overlap
from mics_dtensor.plan.question import Question, Variant, has_stages, variants_of
from mics_dtensor.plan.shape import ModelShape, shape_of
from mics_dtensor.plan.step import StepTime, step_time
from mics_dtensor.plan.traffic import Traffic, step_traffic
from mics_dtensor.plan.unit import Unit

RESOLUTION = 0.02
"""Steps that are this close are not told apart: published runs of one model scatter as much."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a variant holds, takes and sends. Bytes are those out of all nodes in a step."""

    variant: Variant
    num_micro_steps: int
    memory: Memory
    time: StepTime
    inter_node_bytes: int
    tokens_per_s: float
    mfu: float
    hfu: float
    fits: bool
    has_stages: bool
    """Whether `hierarchical` says something here."""

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.time.step_s


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row a partition size, plain FSDP last; the best, and those that may be as good.

    The row of plain FSDP is there to compare with: where a run may be plain FSDP, the row of all
    ranks is it too, and may be the best.
    """

    rows: tuple[Row, ...]
    best: Row
    interval_s: tuple[float, float]
    """The shortest and the longest step of the best, over what is not known of the cluster."""
    margin: float | None
    """How much longer the next partition size takes, as a share of the best step; None: no other
    fits."""
    ties: tuple[Row, ...]

    @property
    def plain(self) -> Row:
        """The row of plain FSDP."""
        return self.rows[-1]

    def is_plain_fsdp(self, row: Row) -> bool:
        """Whether `row` is plain FSDP, by that name or as a partition group of all ranks."""
        return are_one(row, self.plain)


def answer(question: Question) -> Answer:
    """The best variant of every partition size. Raises PlanError where none fits."""
    shape = shape_of(question.model)
    rows = [
        _best(question, shape, layout, list(variants_of(question, layout)))
        for layout in question.layouts()
    ]
    world = question.layout(question.num_data_ranks)
    rows.append(_best(question, shape, world, list(variants_of(question, world, plain=True))))
    fitting = sorted((row for row in rows if row.fits), key=lambda row: row.step_s)  # stable
    choices = [row for row in fitting if not row.variant.plain]
    if not choices:
        least = min(rows[:-1], key=lambda row: row.memory.total)
        why = why_nothing_fits(question, least.variant, least.memory, plain_fits=rows[-1].fits)
        raise PlanError(why)
    best = choices[0]
    others = [row for row in fitting if not are_one(row, best)]
    best_s = corner_steps_s(question, best.variant)
    return Answer(
        rows=tuple(rows),
        best=best,
        interval_s=(min(best_s), max(best_s)),
        margin=choices[1].step_s / best.step_s - 1 if choices[1:] else None,
        ties=tuple(row for row in others if _may_be_faster(question, row, best_s)),
    )


def are_one(row: Row, other: Row) -> bool:
    """Over all ranks and in one ring, a partition group is plain FSDP."""
    return replace(row.variant, plain=False) == replace(other.variant, plain=False)


def _best(
    question: Question, shape: ModelShape, layout: Layout, variants: Sequence[Variant]
) -> Row:
    """The fastest that fits; where none does, the one that holds least."""
    limit = question.cluster.memory_bytes * (1 if question.tracer is None else 1 + NEAR)
    held = list(_held(question, shape, layout, variants, limit))
    fitting = [each for each in held if each[1].total <= limit]
    rows = [_row(question, shape, layout, variant, memory) for variant, memory in fitting]
    rows.sort(key=lambda row: row.step_s)  # stable
    for row in rows:
        traced = _traced(question, layout, row)
        if traced.fits:
            return traced
    least, memory = min(held, key=lambda each: each[1].total)
    return _traced(question, layout, _row(question, shape, layout, least, memory))


def _held(
    question: Question, shape: ModelShape, layout: Layout, variants: Sequence[Variant], limit: float
) -> Iterator[tuple[Variant, Memory]]:
    """Without micro-batches above one that does not fit: they hold more, but for a single one.

    A single micro-step has no gradients of those before it.
    """
    over: set[Variant] = set()
    for variant in variants:
        otherwise = replace(variant, micro_batch=0)
        if otherwise in over and variant.micro_batch < question.sequences_of_a_rank:
            continue
        memory = memory_of(question, shape, layout, variant)
        if memory.total > limit:
            over.add(otherwise)
        yield variant, memory


NEAR = 0.05
"""What the closed form puts this far above the limit may fit by trace, and is traced too."""


def _traced(question: Question, layout: Layout, row: Row) -> Row:
    """The row with its memory by trace, where there is a tracer."""
    if question.tracer is None:
        return row
    memory = question.tracer(question, layout, row.variant)
    return replace(row, memory=memory, fits=memory.total <= question.cluster.memory_bytes)


@dataclass(frozen=True)
class _Step:
    """A variant as the cost model takes it; its cluster may vary."""

    units: tuple[Unit, ...]
    traffic: Traffic
    work: Work
    overlap: Overlap

    def on(self, cluster: Cluster) -> StepTime:
        return step_time(self.units, self.traffic, self.work, cluster, self.overlap)


def _step(question: Question, shape: ModelShape, layout: Layout, variant: Variant) -> _Step:
    units = units_of(question, layout, variant)
    options = Options(
        num_micro_steps=question.sequences_of_a_rank // variant.micro_batch,
        hierarchical=variant.hierarchical,
        two_hop=layout.num_replicas > 1,
        bucket_size_bytes=question.bucket_size_bytes,
        backend="gloo" if question.cluster.on_cpu else "nccl",
    )
    work = work_of(question, shape, variant)
    return _Step(units, step_traffic(units, options), work, question.overlap)


def _row(
    question: Question, shape: ModelShape, layout: Layout, variant: Variant, memory: Memory
) -> Row:
    cluster = question.cluster
    step = _step(question, shape, layout, variant)
    time = step.on(cluster)
    tokens_per_s = question.global_batch * question.seq_len / time.step_s
    flops_per_s = layout.topology.world_size * cluster.peak_flops_per_s / tokens_per_s
    return Row(
        variant=variant,
        num_micro_steps=step.traffic.num_micro_steps,
        memory=memory,
        time=time,
        inter_node_bytes=step.traffic.inter_node_bytes,
        tokens_per_s=tokens_per_s,
        mfu=shape.model_flops(question.seq_len) / flops_per_s,
        hfu=shape.hardware_flops(question.seq_len, variant.checkpointing) / flops_per_s,
        fits=memory.total <= cluster.memory_bytes,
        has_stages=has_stages(layout),
    )


def corners(cluster: Cluster) -> list[Cluster]:
    """The cluster with its parts as slow and as fast as their origins leave open (U1)."""
    parts = [
        UNCERTAINTY[o] for o in (cluster.origin, cluster.inside.origin, cluster.between.origin)
    ]
    return [
        cluster.scaled(compute=compute, inside=inside, between=between)
        for compute, inside, between in product(*((1 - part, 1 / (1 - part)) for part in parts))
    ]


def corner_steps_s(question: Question, variant: Variant) -> list[float]:
    """Seconds of a variant's step in every corner of its cluster, in the order of `corners`."""
    layout = question.layout(variant.partition_size)
    step = _step(question, shape_of(question.model), layout, variant)
    return [step.on(at).step_s for at in corners(question.cluster)]


def _may_be_faster(question: Question, row: Row, best_s: Sequence[float]) -> bool:
    """Whether some corner leaves `row` at most RESOLUTION behind the best: nothing decides (U2)."""
    theirs = corner_steps_s(question, row.variant)
    return any(its <= ours * (1 + RESOLUTION) for its, ours in zip(theirs, best_s, strict=True))
