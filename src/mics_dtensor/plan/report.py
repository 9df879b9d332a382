"""An answer of the planner as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mics_dtensor.plan.question import Question, Variant
from mics_dtensor.plan.search import Answer, Row, are_one

Cells = tuple[str, ...]

_HEADERS: Cells = (
    "partition",
    "variant",
    "params",
    "grads",
    "states",
    "gathered",
    "activ.",
    "other",
    "GB/GPU",
    "compute",
    "gather",
    "reduce",
    "boundary",
    "update",
    "optim.",
    "step s",
    "tokens/s",
    "MFU",
    "HFU",
    "between nodes",
    "",
)


SOURCES = "docs/cost_model.md#sources"


def answer_title(question: Question) -> str:
    """For a picture."""
    cluster = question.cluster
    return (
        f"{question.model.model} {question.model.flavor} on {question.nodes_in_words} of "
        f"{cluster.ranks_per_node} {cluster.gpu} ({cluster.name}){_cut_in_words(question)}: "
        f"{question.global_batch} sequences of {question.seq_len} tokens a step"
    )


def render(question: Question, answer: Answer) -> str:
    """The table, the recommendation, and where every constant came from."""
    cells = [_cells(question, row, _verdict(question, row, answer)) for row in answer.rows]
    rows = [_headers(terms_of(answer.rows)), *cells]
    cluster = question.cluster
    lines = [
        f"{question.model.model} {question.model.flavor}, {question.model.num_parameters:,} "
        f"parameters, on {question.nodes_in_words} of {cluster.ranks_per_node} {cluster.gpu} "
        f"({cluster.name}), {question.topology.world_size} ranks{_cut_in_words(question)}: "
        f"{question.global_batch} sequences of {question.seq_len} tokens a step, "
        f"{question.sequences_of_a_rank} a {question.reader}",
        f"Memory in GB of a GPU at the peak, {_memory_from(question)}; times in seconds of a step, "
        "messages where nothing hides them; b1 x 4: micro-batch 1, 4 micro-steps.",
        *notes_in_words(question),
        "",
        *_aligned(rows),
        "",
        *recommendation(answer),
        "",
        f"constants: (key to the sources: {SOURCES})",
    ]
    constants = [
        (f"  {n}", value, origin, source) for n, value, origin, source in _origins(cluster)
    ]
    return "\n".join([*lines, *_aligned(constants, left=4)])


def notes_in_words(question: Question) -> list[str]:
    """One line each."""
    return [f"note: {note}" for note in question.notes]


def _cut_in_words(question: Question) -> str:
    degree = question.tensor_parallel
    return f", tensor parallel over {degree} ranks of a node" if degree > 1 else ""


def _headers(terms: Sequence[str]) -> Cells:
    place = _HEADERS.index("gather")
    return (*_HEADERS[:place], *("tensor",) * ("tensor_parallel" in terms), *_HEADERS[place:])


def _memory_from(question: Question) -> str:
    if question.tracer is None:
        return "in closed form"
    return "from traces of two depths of the model"


def _origins(cluster: Any) -> list[Cells]:
    return [tuple(each) for each in cluster.constants()]


def recommendation(answer: Answer) -> list[str]:
    """What to take, by how much, and whether that is decided."""
    best, plain = answer.best, answer.plain
    low, high = answer.interval_s
    steps = f"{best.num_micro_steps} micro-step{'s'[: best.num_micro_steps != 1]}"
    said = [steps, describe(best.variant)]
    if answer.is_plain_fsdp(best):
        said.insert(0, _name_in_full(plain))
    elif best.has_stages and not best.variant.hierarchical:
        said.append("hierarchical = false")
    lines = [
        f"take partition_size = {best.variant.partition_size} ({', '.join(said)}): "
        f"{best.step_s:.3g} s a step ({low:.3g} to {high:.3g}), {best.tokens_per_s:,.0f} tokens/s; "
        f"{_next_in_words(answer.margin)}"
    ]
    if plain.fits and plain.step_s < best.step_s:
        lines.append(
            f"{_name_in_full(plain)} would be another run, and take {plain.step_s:.3g} s, "
            f"{1 - plain.step_s / best.step_s:.1%} less"
        )
    if answer.ties:
        named = [row for row in answer.ties if row.variant.plain or not answer.is_plain_fsdp(row)]
        names = ", ".join(_name_in_full(row) for row in named)
        lines.append(
            f"tie: within what is not known of the links, {names} may be as fast; measure a step "
            "of each"
        )
    return lines


def _next_in_words(margin: float | None) -> str:
    if margin is None:
        return "no other partition size fits"
    return f"the next takes {margin:.1%} longer"


def describe(variant: Variant) -> str:
    """A variant in words."""
    said = [f"micro-batch {variant.micro_batch}", f"checkpointing {variant.checkpointing}"]
    said += ["hierarchical"] * variant.hierarchical
    said += ["node-local backward"] * variant.node_local_backward
    said += ["optimizer over replicas"] * variant.optimizer_over_replicas
    return ", ".join(said)


def _name(variant: Variant) -> str:
    return "plain FSDP" if variant.plain else str(variant.partition_size)


def _name_in_full(row: Row) -> str:
    """With the key that makes plain FSDP of a partition group of all ranks."""
    return _name(row.variant) + " (hierarchical = false)" * (row.variant.plain and row.has_stages)


def _short(row: Row) -> str:
    variant = row.variant
    marks = [f"b{variant.micro_batch} x {row.num_micro_steps}", variant.checkpointing]
    marks += ["hier"] * variant.hierarchical + ["local-bwd"] * variant.node_local_backward
    marks += ["opt/R"] * variant.optimizer_over_replicas
    return " ".join(marks)


TERMS = ("compute", "exposed_gather", "exposed_reduce", "boundary", "update", "optimizer")
CUT_TERMS = ("compute", "tensor_parallel", *TERMS[1:])


def terms_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The terms of a step, in the order of the table; tensor parallel's where there is any."""
    return CUT_TERMS if any(row.time.tensor_parallel_s for row in rows) else TERMS


def why(question: Question, row: Row, best: Row) -> str:
    """Why a row is not the one to take: what does not fit, or the term that costs most."""
    if row is best:
        return "take this"
    if are_one(row, best):
        return "the same"
    if not row.fits:
        over = row.memory.total - question.cluster.memory_bytes
        return f"does not fit: {over / 1e9:.1f} GB too much"
    more = {
        term: getattr(row.time, f"{term}_s") - getattr(best.time, f"{term}_s")
        for term in terms_of((row, best))
    }
    worst = max(more, key=lambda term: more[term])
    slower = row.step_s / best.step_s - 1
    if slower < 0:  # plain FSDP alone can be: see Answer
        return f"another run, {-slower:.1%} less"
    if more[worst] <= 0:
        return f"+{slower:.1%}"
    return f"+{slower:.1%}, most of it {worst.replace('_', ' ')} (+{more[worst]:.3g} s)"


def _verdict(question: Question, row: Row, answer: Answer) -> str:
    said = why(question, row, answer.best)
    return f"tie: {said}" if any(row is tied for tied in answer.ties) else said


def _is_written(question: Question, row: Row) -> bool:
    its = row.variant
    return not its.plain and its.partition_size == question.written_partition_size


def _cells(question: Question, row: Row, verdict: str) -> Cells:
    memory, time, variant = row.memory, row.time, row.variant
    kinds = (
        memory.parameters,
        memory.gradients,
        memory.states,
        memory.gathered,
        memory.activations,
        memory.buffers + memory.reserved,
        memory.total,
    )
    terms = [getattr(time, f"{term}_s") for term in terms_of((row,))]
    return (
        _name(variant) + ", as written" * _is_written(question, row),
        _short(row),
        *(f"{kind / 1e9:.1f}" for kind in kinds),
        *(f"{term:.3g}" for term in (*terms, time.step_s)),
        f"{row.tokens_per_s:,.0f}",
        f"{row.mfu:.1%}",
        f"{row.hfu:.1%}",
        f"{row.inter_node_bytes / 1e9:,.1f} GB",
        verdict,
    )


def _aligned(rows: Sequence[Cells], *, left: int = 2) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column < left or column == last else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(question: Question, answer: Answer) -> dict[str, Any]:
    """Schema 1 of docs/formats.md."""
    cluster = question.cluster
    return {
        "schema": 1,
        "model": f"{question.model.model} {question.model.flavor}",
        "num_parameters": question.model.num_parameters,
        "cluster": cluster.name,
        "num_nodes": question.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "global_batch_size": question.global_batch,
        "seq_len": question.seq_len,
        "notes": list(question.notes),
        "memory_from": "closed form" if question.tracer is None else "trace",
        "memory_bytes_of_a_rank": cluster.memory_bytes,
        **(
            {"tensor_parallel_size": question.tensor_parallel}
            if question.tensor_parallel > 1
            else {}
        ),
        "rows": [_row_json(question, row, answer) for row in answer.rows],
        "recommendation": {
            "variant": asdict(answer.best.variant),
            "step_s": answer.best.step_s,
            "step_s_interval": list(answer.interval_s),
            "margin": answer.margin,
            "ties": [_name(row.variant) for row in answer.ties],
        },
        "constants": [
            dict(zip(("name", "value", "origin", "source"), each, strict=True))
            for each in _origins(cluster)
        ],
    }


def _row_json(question: Question, row: Row, answer: Answer) -> dict[str, Any]:
    return {
        "variant": asdict(row.variant),
        "as_written": _is_written(question, row),
        "num_micro_steps": row.num_micro_steps,
        "memory_bytes": asdict(row.memory) | {"total": row.memory.total},
        "time": {f"{term}_s": getattr(row.time, f"{term}_s") for term in terms_of((row,))}
        | {"step_s": row.step_s},
        "inter_node_bytes": row.inter_node_bytes,
        "tokens_per_s": row.tokens_per_s,
        "mfu": row.mfu,
        "hfu": row.hfu,
        "fits": row.fits,
        "why": _verdict(question, row, answer),
    }
