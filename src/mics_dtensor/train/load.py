"""A run from its TOML and the command line: command line > file > default.

Nothing is dropped or repaired: a key that nobody knows, a value of another type and a wish that
torchtitan 0.3.0 cannot honour are refused. Needs neither torch nor torchtitan.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.plan.cluster import presets
from mics_dtensor.train.arguments import read_arguments
from mics_dtensor.train.bounds import refuse_numbers
from mics_dtensor.train.config import RunConfig, config_keys
from mics_dtensor.train.data import PYTHON_DOCS, PYTHON_DOCS_VALIDATION
from mics_dtensor.train.key import replace_at, value_at
from mics_dtensor.train.loss_chunks import refuse_chunks
from mics_dtensor.train.names import check_known
from mics_dtensor.train.param_groups import refuse_groups
from mics_dtensor.train.rows import lost_models, renamed_flavors, rows
from mics_dtensor.train.schedule import refuse_short_schedule
from mics_dtensor.train.sliced import refuse_unsliced
from mics_dtensor.train.values import converted, shown

CONVERTERS = (
    "quantize.linear.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.float8",
    "quantize.grouped_mm.mx",
)
"""What [model] converters may hold; files also write "float8" and "mx" for the first two."""


IN_HF = ("initial_load_in_hf", "last_save_in_hf")
"""Keys of [checkpoint] that ask for Hugging Face's names."""


EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state")
"""Parts of a checkpoint that a run can begin anew; all that it holds but the model."""


@dataclass(frozen=True)
class Run:
    """A configuration and where each value came from."""

    config: RunConfig
    origin: Mapping[str, str]
    """By dotted key: "default", "file X", "command line", or the key that filled it."""
    inert: tuple[str, ...]
    """Keys that the file or the command line sets and that do nothing, each with the reason."""
    path: Path
    planned: tuple[str, ...] = ()
    """What the planner said, where [mics] partition_size = "auto" asked it."""


def load(argv: Sequence[str]) -> Run:
    """The run of `--config-file X.toml [--section.key value | --section.key=value ...]`.

    Raises ConfigError, in one sentence that names what was given and what would work.
    """
    path, overrides = read_arguments(argv)
    file = _read(path)
    check_known(file, f"file {path}")
    config, origin = RunConfig(), dict.fromkeys(config_keys(), "default")
    for source, given in ((f"file {path}", file), ("command line", overrides)):
        for name, value in given.items():
            value = converted(config_keys()[name], value, source)
            config = replace_at(config, name, value)
            origin[name] = source
    short = {"float8": CONVERTERS[0], "mx": CONVERTERS[1]}
    converters = tuple(short.get(name, name) for name in config.model.converters)
    config = replace_at(config, "model.converters", converters)
    if config.training.dataset == PYTHON_DOCS and origin["validation.dataset"] == "default":
        # torchtitan's default lies on the network, which such a run does not need.
        config = replace_at(config, "validation.dataset", PYTHON_DOCS_VALIDATION)
        origin["validation.dataset"] = "training.dataset"
    _refuse_what_cannot_be(config, origin)
    return Run(config=config, origin=origin, inert=_inert(config, origin), path=path)


def config_from(tables: Mapping[str, Any], source: str) -> RunConfig:
    """The configuration whose tables are given, as the manifest of a checkpoint holds them."""
    given, config = flattened(tables), RunConfig()
    check_known(given, source)
    for name, value in given.items():
        config = replace_at(config, name, converted(config_keys()[name], value, source))
    return config


def _read(path: Path) -> dict[str, Any]:
    """The file's keys by dotted name."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; --config-file wants a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return flattened(read)


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; an empty table stays, so that an unknown one is seen."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return {name: value for name, value in flat.items() if value != {} or not _is_table(name)}


def _is_table(name: str) -> bool:
    return any(known.startswith(f"{name}.") for known in config_keys())


def _refuse_what_cannot_be(config: RunConfig, origin: Mapping[str, str]) -> None:
    if text := lost_models().get(config.model.name):
        raise ConfigError(f'[model] name = "{config.model.name}": {text}')
    if new := renamed_flavors().get(f"{config.model.name}.{config.model.flavor}"):
        write = " and ".join(f'{key} = "{value}"' for key, value in new.items())
        raise ConfigError(
            f'[model] flavor = "{config.model.flavor}" has another name in torchtitan 0.3: '
            f"write {write} in [model]"
        )
    if unknown := [name for name in config.model.converters if name not in CONVERTERS]:
        raise ConfigError(
            f"[model] converters holds {', '.join(map(repr, unknown))}; choose from "
            f"{list(CONVERTERS)}"
        )
    refused = [row for row in rows().values() if row.is_refused(config)]
    # What was written is told before what would have followed from a default.
    refused = [row for row in refused if origin[row.key] != "default"] or refused
    by_reason: dict[str, list[str]] = {}
    for row in refused:
        given = f"{row.key} = {shown(value_at(config, row.key))}"
        by_reason.setdefault(row.refuse or "", []).append(given)
    if by_reason:
        raise ConfigError("; ".join(f"{', '.join(g)}: {why}" for why, g in by_reason.items()))
    _refuse_pairs(config)


def _refuse_pairs(config: RunConfig) -> None:
    mics, training, validation = config.mics, config.training, config.validation
    if mics.partition_size == "auto" and mics.cluster is None:
        raise ConfigError(
            'mics.partition_size = "auto" asks the planner, which needs mics.cluster: a preset '
            f"({', '.join(presets()['cluster'])}) or a file that ends in .toml"
        )
    if isinstance(mics.partition_size, str) and mics.partition_size not in ("node", "auto"):
        raise ConfigError(
            f'mics.partition_size = "{mics.partition_size}"; write "node", "auto" or a number of '
            "ranks"
        )
    refuse_numbers(config)
    refuse_groups(config)
    _refuse_excluded(config)
    refuse_short_schedule(config)
    if mics.node_local_backward and not mics.hierarchical:
        raise ConfigError(
            "mics.node_local_backward = true is a part of the hierarchy, which mics.hierarchical = "
            "false switches off; delete one of the lines"
        )
    if mics.master_weights == "sharded":
        _refuse_masters(config)
    refuse_unsliced(config)
    if mics.overlap_update and not mics.optimizer_over_replicas:
        raise ConfigError(
            "mics.overlap_update = true is about the slices of the optimizer, and there are none: "
            "write mics.optimizer_over_replicas = true too, or delete the line"
        )
    if validation.enable and validation.seq_len > training.seq_len:
        raise ConfigError(
            f"validation.seq_len {validation.seq_len} is longer than training.seq_len "
            f"{training.seq_len}, for which torchtitan 0.3 lays out positions; write at most that"
        )
    refuse_chunks(config)


def _refuse_excluded(config: RunConfig) -> None:
    """Only a start that finds a checkpoint would meet them."""
    for name in config.checkpoint.exclude_from_loading:
        if name not in EXCLUDABLE:
            near = difflib.get_close_matches(name, EXCLUDABLE, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"checkpoint.exclude_from_loading holds {shown(name)}; {hint}choose from "
                f"{list(EXCLUDABLE)}"
            )


def _refuse_masters(config: RunConfig) -> None:
    """What fp32 weights that are in the slices alone cannot be together with."""
    said, training = 'mics.master_weights = "sharded"', config.training
    if not config.mics.optimizer_over_replicas:
        raise ConfigError(
            f"{said} keeps the fp32 weights in the slices of the optimizer: write "
            "mics.optimizer_over_replicas = true too, or delete the line"
        )
    if training.dtype != "float32" or training.mixed_precision_param == "float32":
        raise ConfigError(
            f"{said} takes fp32 weights and keeps shards of 16 bits, but training.dtype = "
            f"{shown(training.dtype)} and training.mixed_precision_param = "
            f'{shown(training.mixed_precision_param)}; write "float32" and "bfloat16", or delete '
            "the line"
        )
    for name in IN_HF:
        if getattr(config.checkpoint, name):
            raise ConfigError(
                f"checkpoint.{name} = true reorders whole weights, and with {said} a rank has "
                "pieces of them: convert a checkpoint of DCP beforehand or afterwards, or delete "
                "one of the lines"
            )


def _inert(config: RunConfig, origin: Mapping[str, str]) -> tuple[str, ...]:
    listed = []
    for row in rows().values():
        if origin[row.key] != "default" and row.is_inert(config):
            why = _switched_off(row.off_when) if row.is_off(config) else row.note
            listed.append(f"{row.key} = {shown(value_at(config, row.key))}: {why}")
    return tuple(listed)


def _switched_off(conditions: Sequence[Mapping[str, Any]]) -> str:
    told = [
        f"{each['key']} lacks {each['lacks']}"
        if "lacks" in each
        else f"{each['key']} is {shown(each['is'])}"
        for each in conditions
    ]
    return f"off, since {' or '.join(told)}"
