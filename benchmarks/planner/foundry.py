"""llm-foundry's tables (S19) as questions to the cost model: MPT on FSDP over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.planner.published import (
    BF16,
    DATA,
    Case,
    Setting,
    cluster_of,
    dense,
    fsdp1,
    rows_of,
    tokens_per_s,
)
from mics_dtensor.plan.operators import Operators

MPT_125M = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50368}
"""Not among the shapes of runs.toml; 12 L d^2 + (vocab + seq) d is the published count."""

MPT = Operators(rotation_bytes=0, attention="flash-1")
"""Learned positions, fused layer norms, and Triton's attention (submit_benchmarks.py)."""

KEYS = ("model", "seq", "micro_batch", "grad_accum", "activation_checkpoint", "tok_s_gpu")


def mpt(row: dict[str, Any]) -> Setting:
    """A row of llm-foundry.

    "pure_bf16" reduces in bf16, and is the earlier table, on torch 1.13, whose checkpoint does not
    stop early; "amp_bf16" reduces in fp32 (Composer's DEFAULT), and is taken to stop early.
    """
    known = {model["name"]: model for model in DATA["model"]}
    shape = dense(known.get(row["model"].removeprefix("MPT-"), MPT_125M))
    # H100 rows do not say their network: 3,200 Gbit/s, as all H100 presets.
    its = cluster_of(row["gpu"], row.get("nic_total_gbit_per_s", 3200))
    setting = fsdp1(row, shape, its, profile="fsdp2", micro_steps=row["grad_accum"], operators=MPT)
    if row["precision"].startswith("amp"):
        return replace(setting, policy=replace(BF16, reduce_itemsize=4, hop_itemsize=4))
    if row["activation_checkpoint"] == "full":
        return replace(setting, work=replace(setting.work, checkpointing="full"))
    return setting


def rows_on_8_gpus() -> Iterator[dict[str, Any]]:
    """Every bf16 row of one node, of all lengths of a sequence."""
    yield from rows_of(lambda row: row["id"].startswith("mpt-") and row["gpus"] == 8)
    yield from _tables("bf16")


def float8_rows() -> Iterator[dict[str, Any]]:
    """Those in float8 (Transformer Engine)."""
    yield from _tables("fp8")


def _tables(dtype: str) -> Iterator[dict[str, Any]]:
    for table in DATA["foundry"]:
        if not table["precision"].endswith(dtype):
            continue
        for values in zip(*(table[key] for key in KEYS), strict=True):
            row = table | dict(zip(KEYS, values, strict=True))
            name = f"{row['model']} of {row['seq']}" + " in float8" * (dtype == "fp8")
            yield row | {"id": name, "partition_group": 8}


def mpt_cases() -> list[Case]:
    """llm-foundry from 16 GPUs on, with the presets' constants as they are."""
    return [
        Case(name=row["id"], published=row["tok_s_gpu"], predicted=tokens_per_s(mpt(row)))
        for row in rows_of(lambda row: row["id"].startswith("mpt-") and row["gpus"] > 8)
    ]
