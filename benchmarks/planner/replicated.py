"""Published runs whose gradients are reduced over replicas beside the backward: InternLM, IBM."""

from __future__ import annotations

from typing import Any

from benchmarks.planner.published import (
    BF16,
    DATA,
    EAGER_2024,
    INTERNLM,
    Case,
    Setting,
    cluster_of,
    dense,
    fsdp1,
    rows_of,
    tokens_per_s,
)
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.shape import ModelShape


def _shape(row: dict[str, Any]) -> ModelShape:
    (read,) = (each for each in DATA["model"] if each["name"] == row["model"])
    return dense(read)


def internlm(row: dict[str, Any], place: int) -> Setting:
    """InternLM 7B (S41): whole replicas, states over a node, gradients sent in the backward."""
    shape, its = _shape(row), cluster_of(row["gpu"], row["nic_total_gbit_per_s"])
    return Setting(
        shape=shape,
        cluster=its,
        gpus=row["gpus"][place],
        partition_size=1,
        work=Work(
            shape=shape,
            seq_len=row["seq"],
            micro_batch=row["micro_batch"][place],
            checkpointing=row["activation_checkpoint"],
            num_states_shards=row["states_shards"],
            operators=INTERNLM,
        ),
        micro_steps=row["micro_steps"][place],
        overlap=PROFILES["hsdp"].on(its),
        policy=BF16,
    )


def internlm_cases() -> list[Case]:
    """8 to 1,024 GPUs, with the presets' constants as they are."""
    cases = []
    for row in DATA["internlm"]:
        if "unchecked" in row:
            continue
        for place, published in enumerate(row["tok_s_gpu"]):
            setting = internlm(row, place)
            batch = f"{setting.micro_steps} x {setting.work.micro_batch}"
            name = f"{row['id']}-{setting.gpus}, {batch} sequences"
            cases.append(Case(name=name, published=published, predicted=tokens_per_s(setting)))
    return cases


def ibm(row: dict[str, Any]) -> Setting:
    """Llama 2 by IBM (S42): FSDP or HSDP of torch."""
    on_efa = "node" in row
    its = cluster("p4de") if on_efa else cluster_of(row["gpu"], row["nic_total_gbit_per_s"])
    return fsdp1(row, _shape(row), its, profile="hsdp", micro_steps=1, operators=EAGER_2024)


def ibm_cases() -> list[Case]:
    """128 A100 and 96 H100, with the presets' constants as they are."""
    return [
        Case(name=row["id"], published=row["tok_s_gpu"], predicted=tokens_per_s(ibm(row)))
        for row in rows_of(lambda row: row["id"].startswith("ibm-") and "unchecked" not in row)
    ]
