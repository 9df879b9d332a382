"""`mics plan --write`: the chosen values into the TOML of a run, whose comments and order stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.question import Question, Variant
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import value_at

DEGREES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)


def chosen_values(question: Question, variant: Variant) -> dict[str, Any]:
    """The keys of a variant, by dotted name."""
    values: dict[str, Any] = {
        "mics.partition_size": variant.partition_size,
        "training.local_batch_size": variant.micro_batch,
        "training.global_batch_size": question.global_batch,
        "mics.optimizer_over_replicas": variant.optimizer_over_replicas,
    }
    if variant.checkpointing in ("op", "2"):
        values["activation_checkpoint.mode"] = "selective"
        values["activation_checkpoint.selective_ac_option"] = variant.checkpointing
    else:
        values["activation_checkpoint.mode"] = variant.checkpointing
    if variant.partition_size > question.cluster.ranks_per_node:
        values["mics.hierarchical"] = variant.hierarchical
        values["mics.node_local_backward"] = variant.node_local_backward
    return values


def write_choice(path: Path, config: RunConfig, values: Mapping[str, Any]) -> list[str]:
    """Writes what differs from `config`, the file's own; one line a change. Raises PlanError."""
    try:
        import tomlkit
    except ImportError:
        raise PlanError(
            "--write needs tomlkit: pip install tomlkit; or leave --write out"
        ) from None
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    told = []
    for name in DEGREES:
        table, _, key = name.partition(".")
        if key in document.get(table, {}) and document[table][key] != -1:
            raise PlanError(
                f"{path} sets {name} = {value_at(config, name)}, which mics.partition_size "
                "decides; delete the line, or write -1"
            )
    for name, value in values.items():
        before = value_at(config, name)
        if before == value:
            continue
        table, _, key = name.partition(".")
        if table not in document:
            document.add(tomlkit.nl())
            document.add(table, tomlkit.table())
        document[table][key] = value
        told.append(f"{path}: {name} = {value!r} (was {before!r})")
    if told:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(tomlkit.dumps(document), encoding="utf-8")
        fresh.replace(path)
    return told or [f"{path}: nothing to change"]
