"""`mics plan --write`: the chosen values into the TOML of a run, whose comments and order stay."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mics_dtensor.cli.target import why_not_writable
from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.plan.question import Question, Variant, has_stages
from mics_dtensor.train.config import RunConfig, config_keys
from mics_dtensor.train.key import value_at
from mics_dtensor.train.load import load
from mics_dtensor.train.values import shown

DEGREES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)

BOM = "\ufeff"
"""What some editors put before UTF-8."""


def chosen_values(question: Question, variant: Variant) -> dict[str, Any]:
    """The keys of a variant, by dotted name."""
    values: dict[str, Any] = {
        "mics.partition_size": variant.partition_size,
        "training.local_batch_size": variant.micro_batch,
        "training.global_batch_size": question.global_batch,
    }
    if variant.partition_size < question.num_data_ranks:  # else there is nothing to cut
        values["mics.optimizer_over_replicas"] = variant.optimizer_over_replicas
        if not variant.optimizer_over_replicas:  # what goes with slices alone
            values |= {"mics.master_weights": "fp32", "mics.overlap_update": False}
    if variant.checkpointing in ("op", "2"):
        values["activation_checkpoint.mode"] = "selective"
        values["activation_checkpoint.selective_ac_option"] = variant.checkpointing
    else:
        values["activation_checkpoint.mode"] = variant.checkpointing
    layout = question.layout(variant.partition_size)
    if has_stages(layout):
        values["mics.hierarchical"] = variant.hierarchical
    if layout.shard_shape.has_two_levels:
        values["mics.node_local_backward"] = variant.node_local_backward
    return values


def write_choice(path: Path, asked: RunConfig, values: Mapping[str, Any]) -> list[str]:
    """Writes what differs from the file; one line a change. Raises PlanError, the file as it was.

    `asked`: what was planned, the file with the command line. Where they differ in more than what
    is written, the file would not be what was planned.
    """
    config = load(["--config-file", str(path)]).config
    for name in config_keys():
        said, own = value_at(asked, name), value_at(config, name)
        if said != own and name not in (*values, "mics.cluster"):
            raise PlanError(
                f"--write: {name} = {shown(said)} on the command line, but {path} has "
                f"{shown(own)}, for which this is no answer; change the file first, or leave "
                "--write out"
            )
    try:
        import tomlkit
    except ImportError:
        raise PlanError(
            "--write needs tomlkit: pip install tomlkit; or leave --write out"
        ) from None
    written = path.read_bytes().decode("utf-8")  # with the ends of its lines
    mark = BOM * written.startswith(BOM)
    document = tomlkit.parse(written.removeprefix(mark))
    told = []
    its = document.get("parallelism", {})
    if fixed := [
        f"{name} = {value_at(config, name)}"
        for name in DEGREES
        if its.get(name.partition(".")[2], -1) != -1
    ]:
        raise PlanError(
            f"{path} sets {' and '.join(fixed)}, which mics.partition_size decides; delete "
            f"{'the line' if len(fixed) == 1 else 'the lines'}, or write -1"
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
        told.append(f"{path}: {name} = {shown(value)} (was {shown(before)})")
    if told:
        _replace(path, mark + _with_ends_of(written, tomlkit.dumps(document)))
    return told or [f"{path}: nothing to change"]


def _with_ends_of(before: str, text: str) -> str:
    """The text with CRLF at the end of every line, where that was so before."""
    if "\n" in before and before.count("\r\n") == before.count("\n"):
        return text.replace("\r\n", "\n").replace("\n", "\r\n")
    return text


def _replace(path: Path, text: str) -> None:
    """With what `mics` itself can read, and whole; where `path` is a link, what it leads to."""
    if (why := why_not_writable(path)) is not None:
        raise PlanError(f"--write: {why}")
    target = path.resolve()
    fresh = target.with_name(target.name + ".new")
    try:
        fresh.write_text(text, encoding="utf-8", newline="")
        shutil.copymode(target, fresh)
        load(["--config-file", str(fresh)])
        fresh.replace(target)
    except (OSError, ConfigError) as error:
        fresh.unlink(missing_ok=True)
        raise PlanError(f"--write: {path} is as it was: {error}") from None
