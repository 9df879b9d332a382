"""A key of the TOML: a dataclass field that knows its meaning and unit. No torch, no torchtitan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as `docs/configuration.md` and the loader see it."""

    name: str
    """Dotted: "training.dataloader.num_workers"."""
    type: Any
    default: Any
    meaning: str
    unit: str


def key(default: Any, meaning: str, *, unit: str = "") -> Any:
    """A field of a table: its default, what it means, and the unit it is counted in."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "unit": unit})


def keys(table: type, prefix: str = "") -> Iterator[Key]:
    """Every key below `table`, a dataclass type, in the order of the file."""
    types = get_type_hints(table)
    for field in dataclasses.fields(table):
        name = prefix + field.name
        if dataclasses.is_dataclass(types[field.name]):
            yield from keys(types[field.name], name + ".")
        else:
            yield Key(
                name=name,
                type=types[field.name],
                default=field.default,
                meaning=field.metadata["meaning"],
                unit=field.metadata["unit"],
            )


def value_at(config: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replace_at(config: Any, name: str, value: Any) -> Any:
    """A copy of the configuration with one dotted key changed."""
    first, _, rest = name.partition(".")
    if rest:
        value = replace_at(getattr(config, first), rest, value)
    return dataclasses.replace(config, **{first: value})
