"""torchtitan's runs (S16, S17), and float8 (S19 too), as questions to the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.planner.foundry import float8_rows, mpt
from benchmarks.planner.published import (
    EAGER_2024,
    Case,
    Setting,
    cluster_of,
    fitted_share,
    rows_of,
    tokens_per_s,
    with_gain,
    with_share,
)
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.operators import COMPILED, FLOAT8_GAIN
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.shape import ModelShape

LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, attention_width=4096, key_value_width=1024, ffn=14336, vocab=128256
)


def titan(row: dict[str, Any]) -> Setting:
    """A row of torchtitan (S16): Llama 3.1 8B, sequences of 8,192, checkpointing by operator."""
    its = cluster_of(row["gpu"], row["nic_total_gbit_per_s"])
    return Setting(
        shape=LLAMA_8B,
        cluster=its,
        gpus=row["gpus"],
        partition_size=row["partition_group"],
        work=Work(
            shape=LLAMA_8B,
            seq_len=8192,
            micro_batch=2,
            checkpointing="op",
            operators=COMPILED if "compile" in row["id"] else EAGER_2024,
        ),
        micro_steps=1,
        overlap=PROFILES["fsdp2"].on(its),
        policy=Policy(chunked_loss=False),
    )


def titan_share(kind: str) -> float:
    """The share that fits a system on 8 GPUs."""
    (row,) = rows_of(lambda row: row["id"] == f"titan-8b-8-{kind}")
    return fitted_share(titan(row), row["tok_s_gpu"])


def titan_cases() -> list[Case]:
    """128 GPUs, each with the share that fits the same system on 8."""
    return [
        _titan_case(row, titan_share(row["id"].rpartition("-128-")[2]))
        for row in rows_of(lambda row: row["id"].startswith("titan-8b-128-"))
    ]


def compiled_cases() -> list[Case]:
    """Compiled blocks on 8 and 128 GPUs, with the share that fits eager ones on 8."""
    share = titan_share("eager")
    return [
        _titan_case(row, share)
        for row in rows_of(lambda row: row["id"].startswith("titan-8b-"))
        if row["id"].endswith("-compile")
    ]


def float8_gain() -> float:
    """The gain that fits float8 on 8 GPUs, with the share that fits compiled blocks on them."""
    (row,) = rows_of(lambda row: row["id"] == "titan-8b-8-compile+float8")
    setting, low, high = with_share(titan(row), titan_share("compile")), 1.0, 4.0
    for _ in range(50):
        gain = (low + high) / 2
        if tokens_per_s(with_gain(setting, gain)) < row["tok_s_gpu"]:
            low = gain
        else:
            high = gain
    return low


def _titan_case(row: dict[str, Any], share: float) -> Case:
    predicted = tokens_per_s(with_share(titan(row), share))
    return Case(name=row["id"], published=row["tok_s_gpu"], predicted=predicted)


def float8_cases() -> list[Case]:
    """float8 with the gain of torchtitan's run on 8 H100: on 128, on H200, and in llm-foundry."""
    share = titan_share("compile")
    settings = [
        (row, with_share(titan(row), share))
        for row in rows_of(lambda row: row["id"] == "titan-8b-128-compile+float8")
    ]
    settings += [(row, h200(row)) for row in rows_of(lambda row: "titan-8b-h200" in row["id"])]
    settings += [(row, mpt(row)) for row in float8_rows()]
    return [
        Case(
            name=row["id"],
            published=row["tok_s_gpu"],
            predicted=tokens_per_s(with_gain(setting, FLOAT8_GAIN)),
        )
        for row, setting in settings
    ]


def h200(row: dict[str, Any]) -> Setting:
    """S17: the file of the 8B, compiled; parameters are gathered in float8."""
    setting = titan(row | {"id": "compile"})
    return replace(setting, policy=replace(setting.policy, gather_itemsize=1))
