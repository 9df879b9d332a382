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


def fitted(rows: Sequence[dict[str, Any]]) -> Rates:
    """Least squares of relative errors over `rows`, those beyond NEAR in proportion (Huber)."""
    from scipy.optimize import least_squares  # of the extra `test`

    pairs = [(mpt(row), float(row["tok_s_gpu"])) for row in rows]

    def errors(logs: Sequence[float]) -> list[float]:
        rates = _rates(logs)
        return [tokens_per_s(rates.on(setting)) / published - 1 for setting, published in pairs]

    begin = [log(getattr(held(), name)) for name in NAMES]
    return _rates(least_squares(errors, begin, loss="huber", f_scale=NEAR, diff_step=1e-4).x)


def _rates(logs: Sequence[float]) -> Rates:
    return Rates(**{name: exp(value) for name, value in zip(NAMES, logs, strict=True)})


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
    }


@cache
def long_cases() -> tuple[Case, ...]:
    """Sequences of 16,384 tokens and more, with rates that are fitted on shorter ones alone."""
    return tuple(left_out(lambda row: row["seq"] >= LONG))
