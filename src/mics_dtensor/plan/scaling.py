"""Weak scaling: the same work of a rank on more and more nodes, for every partition size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.report import notes_in_words
from mics_dtensor.plan.search import Answer, Row, answer


@dataclass(frozen=True, kw_only=True)
class Point:
    """A partition size (or plain FSDP) on a number of nodes; None where there is no such group."""

    num_nodes: int
    row: Row | None

    def tokens_per_s(self, ranks_per_node: int) -> float | None:
        """Of one GPU; None where no such group exists or it does not fit."""
        if self.row is None or not self.row.fits:
            return None
        return self.row.tokens_per_s / (self.num_nodes * ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Curves by name, each with one point a number of nodes."""

    question: Question
    """On any number of nodes: a rank has the same number of sequences on all of them."""
    nodes: tuple[int, ...]
    curves: dict[str, tuple[Point, ...]]

    @property
    def ranks_per_node(self) -> int:
        """Of the cluster."""
        return self.question.cluster.ranks_per_node


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes from "1,2,4,...,2048"; "..." goes on in the ratio of the two before.

    Raises PlanError.
    """
    found: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if word == "...":
            end = words[place + 1] if place + 1 < len(words) else ""
            if len(found) < 2 or not end.isdecimal() or found[-1] % found[-2]:
                raise PlanError(f'--scale {text}: "..." stands between numbers, as 1,2,4,...,64')
            ratio = found[-1] // found[-2]
            while found[-1] * ratio < int(end):
                found.append(found[-1] * ratio)
        elif word.isdecimal() and int(word) > (found[-1] if found else 0):
            found.append(int(word))
        else:
            raise PlanError(f"--scale {text}: numbers of nodes ascend, as 1,2,4,...,64")
    return tuple(found)


def scaling(question: Question, nodes: Sequence[int]) -> Scaling:
    """The question on each number of nodes, with as many sequences a rank."""
    each = question.sequences_of_a_rank
    node = question.cluster.ranks_per_node // question.tensor_parallel
    answers: dict[int, Answer | None] = {}
    questions = [replace(question, num_nodes=n, global_batch=each * n * node) for n in nodes]
    for num_nodes, asked in zip(nodes, questions, strict=True):
        try:
            answers[num_nodes] = answer(asked)
        except PlanError:  # too few nodes to hold the model: a gap in every curve
            answers[num_nodes] = None
    rows = [(n, row) for n, found in answers.items() if found for row in found.rows]
    if not rows:
        answer(questions[-1])
    names = [str(s) for s in sorted({r.variant.partition_size for _, r in rows if r.fits})]
    placed = {(n, _name(row)): row for n, row in rows}
    placed |= {(n, "best"): found.best for n, found in answers.items() if found}
    curves = {
        name: tuple(Point(num_nodes=n, row=placed.get((n, name))) for n in nodes)
        for name in ("best", "plain FSDP", *names)
    }
    return Scaling(question=question, nodes=tuple(nodes), curves=curves)


def _name(row: Row) -> str:
    return "plain FSDP" if row.variant.plain else str(row.variant.partition_size)


def scaling_title(found: Scaling) -> str:
    """For a picture."""
    asked, each = found.question, found.question.sequences_of_a_rank
    return (
        f"{asked.model.model} {asked.model.flavor} on nodes of {found.ranks_per_node} "
        f"{asked.cluster.gpu} ({asked.cluster.name}): {each} sequence{'s'[: each != 1]} of "
        f"{asked.seq_len} tokens a {asked.reader} and step"
    )


def render_scaling(found: Scaling) -> str:
    """tokens/s of a GPU, and as a share of the curve's first."""
    asked = found.question
    each = asked.sequences_of_a_rank
    lines = [
        f"{asked.model.model} {asked.model.flavor}, {asked.model.num_parameters:,} parameters, on "
        f"nodes of {found.ranks_per_node} {asked.cluster.gpu} ({asked.cluster.name}): {each} "
        f"sequence{'s'[: each != 1]} of {asked.seq_len} tokens a {asked.reader} and step, as "
        f"{asked.global_batch} are on {asked.nodes_in_words}",
        *notes_in_words(asked),
        "tokens/s of a GPU (share of the row's first), by number of nodes",
        "",
    ]
    table = [["partition", *(str(n) for n in found.nodes)]]
    for name, points in found.curves.items():
        speeds = [point.tokens_per_s(found.ranks_per_node) for point in points]
        first = next((speed for speed in speeds if speed is not None), None)
        cells = ["-" if s is None or not first else f"{s:,.0f} ({s / first:.1%})" for s in speeds]
        table.append([name, *cells])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines += [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return "\n".join([*lines, "", "-: no such group, or it does not fit"])


def scaling_json(found: Scaling) -> dict[str, Any]:
    """Schema 1 of docs/formats.md."""
    return {
        "schema": 1,
        "model": f"{found.question.model.model} {found.question.model.flavor}",
        "cluster": found.question.cluster.name,
        "sequences_of_a_rank": found.question.sequences_of_a_rank,
        "notes": list(found.question.notes),
        "num_nodes": found.nodes,
        "ranks_per_node": found.ranks_per_node,
        "tokens_per_s_of_a_gpu": {
            name: [point.tokens_per_s(found.ranks_per_node) for point in points]
            for name, points in found.curves.items()
        },
    }
