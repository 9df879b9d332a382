"""Rates of products and of attention, and copies of messages, from llm-foundry's 8-GPU rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import exp, log
from typing import Any

from benchmarks.planner.foundry import mpt, rows_on_8_gpus
from benchmarks.planner.published import Case, Setting, tokens_per_s
from mics_dtensor.plan.cluster import presets
from mics_dtensor.plan.operators import AttentionRate

NEAR = 0.05
"""Errors beyond this count linearly: some rows are at the edge of their memory, or odd."""

LONG = 16_384
"""Tokens of a sequence that the check of long ones begins with."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is fitted together: T6, T10 of the kernel of 2023, and C10."""

    a100_40gb_products: float
    a100_80gb_products: float
    h100_products: float
    half_width: float
    a100_attention: float
    h100_attention: float
    attention_backward: float
    passes: float

    def on(self, setting: Setting) -> Setting:
        """The setting on GPUs with these rates."""
        its = setting.cluster
        is_a100 = its.gpu.startswith("A100")
        attention = AttentionRate(
            kernel="flash-1",
            share=self.a100_attention if is_a100 else self.h100_attention,
            backward=self.attention_backward,
        )
        products = {
            "A100-40GB": self.a100_40gb_products,
            "A100-80GB": self.a100_80gb_products,
            "H100-80GB": self.h100_products,
        }
        changed = replace(
            its,
            product_share=products[its.gpu],
            product_half_width=self.half_width,
            attention=(attention,),
            unit_s_per_byte=self.passes / its.memory_bytes_per_s,
        )
        return replace(setting, cluster=changed)


NAMES = tuple(each.name for each in fields(Rates))


def held() -> Rates:
    """Those of the presets."""
    read = presets()
    gpus = read["gpu"]
    return Rates(
        a100_40gb_products=gpus["A100-40GB"]["product_share"],
        a100_80gb_products=gpus["A100-80GB"]["product_share"],
        h100_products=gpus["H100-80GB"]["product_share"],
        half_width=gpus["A100-80GB"]["product_half_width"],
        a100_attention=read["attention"]["a100"]["flash-1"]["share"],
        h100_attention=read["attention"]["h100"]["flash-1"]["share"],
        attention_backward=read["attention"]["a100"]["flash-1"]["backward"],
        passes=read["copies"]["passes"],
    )


Pairs = Sequence[tuple[Setting, float]]


def fitted(rows: Sequence[dict[str, Any]]) -> Rates:
    """Least squares of relative errors over `rows`, those beyond NEAR in proportion (Huber)."""
    pairs = [(mpt(row), float(row["tok_s_gpu"])) for row in rows]
    logs = [log(getattr(held(), name)) for name in NAMES]
    errors, damping = _errors(pairs, logs), 1e-3
    while damping < 1.0:
        slopes = [_slope(pairs, logs, errors, place) for place in range(len(NAMES))]
        weights = [min(1.0, NEAR / max(abs(error), 1e-9)) for error in errors]
        matrix = [
            [sum(w * a * b for w, a, b in zip(weights, i, j, strict=True)) for j in slopes]
            for i in slopes
        ]
        wanted = [
            -sum(w * a * e for w, a, e in zip(weights, i, errors, strict=True)) for i in slopes
        ]
        for place, line in enumerate(matrix):
            line[place] *= 1 + damping
        moved = [at + by for at, by in zip(logs, _solved(matrix, wanted), strict=True)]
        found = _errors(pairs, moved)
        better = _cost(errors) - _cost(found)
        if better > 0:
            logs, errors, damping = moved, found, damping / 5
        if better < 1e-7:
            damping = damping * 25 if better <= 0 else 1.0
    return _rates(logs)


def _rates(logs: Sequence[float]) -> Rates:
    return Rates(**{name: exp(value) for name, value in zip(NAMES, logs, strict=True)})


def _errors(pairs: Pairs, logs: Sequence[float]) -> list[float]:
    rates = _rates(logs)
    return [tokens_per_s(rates.on(setting)) / published - 1 for setting, published in pairs]


def _slope(pairs: Pairs, logs: Sequence[float], errors: Sequence[float], place: int) -> list[float]:
    step = 1e-3
    moved = [at + step * (i == place) for i, at in enumerate(logs)]
    return [(b - a) / step for a, b in zip(errors, _errors(pairs, moved), strict=True)]


def _cost(errors: Sequence[float]) -> float:
    sizes = [abs(error) for error in errors]
    return sum(size**2 if size < NEAR else NEAR * (2 * size - NEAR) for size in sizes)


def _solved(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Gauss, for a matrix that is symmetric and positive."""
    lines = [[*line, value] for line, value in zip(matrix, wanted, strict=True)]
    for place, line in enumerate(lines):
        for other in lines[place + 1 :]:
            share = other[place] / line[place]
            other[:] = [a - share * b for a, b in zip(other, line, strict=True)]
    found: list[float] = []
    for place in reversed(range(len(lines))):
        *line, value = lines[place]
        known = sum(a * b for a, b in zip(line[place + 1 :], found, strict=True))
        found.insert(0, (value - known) / line[place])
    return found


@cache
def fitted_on_all() -> Rates:
    """What the presets hold, from every 8-GPU row."""
    return fitted(list(rows_on_8_gpus()))


def left_out(belongs: Callable[[dict[str, Any]], bool]) -> list[Case]:
    """The 8-GPU rows that belong, with rates that are fitted on all others."""
    every = list(rows_on_8_gpus())
    rates = fitted([row for row in every if not belongs(row)])
    return [
        Case(
            name=f"{row['id']} on {row['gpu'].replace('-SXM', '')}",
            published=row["tok_s_gpu"],
            predicted=tokens_per_s(rates.on(mpt(row))),
        )
        for row in every
        if belongs(row)
    ]


def groups() -> dict[str, list[Case]]:
    """Groups of rows, each foretold from all others."""
    return {
        f"{LONG:,} tokens and more": list(long_cases()),
        "1,024 tokens and less": left_out(lambda row: row["seq"] <= 1024),
        "checkpointing": left_out(lambda row: row["activation_checkpoint"] == "full"),
    }


@cache
def long_cases() -> tuple[Case, ...]:
    """Sequences of 16,384 tokens and more, with rates that are fitted on shorter ones alone."""
    return tuple(left_out(lambda row: row["seq"] >= LONG))
