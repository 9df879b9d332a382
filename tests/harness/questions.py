"""A question to the planner: Llama 3 8B on nodes of a preset."""

from __future__ import annotations

from dataclasses import replace

from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.question import Question


def question(name: str = "p4d", **changes: object) -> Question:
    """On four nodes of the cluster `name`, 128 sequences a step; `changes` are of Question."""
    its = Question(
        model=preset("llama3", "8B"),
        cluster=cluster(name),
        num_nodes=4,
        seq_len=4096,
        global_batch=128,
        policy=Policy(),
        overlap=PROFILES["fsdp2"],
    )
    return replace(its, **changes)  # type: ignore[arg-type]
