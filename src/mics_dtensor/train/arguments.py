"""The command line of a run: `--config-file X --section.key value`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.names import check_known
from mics_dtensor.train.values import LISTS, parsed

USAGE = f"""\
usage: torchrun --nproc-per-node N -m mics_dtensor.train --config-file FILE.toml [options]

  --config-file FILE.toml   the run, in the tables and keys of docs/configuration.md
  --table.key value         in place of what the file says; --table.key and --table.no-key switch
                            what is true or false; lists are written {LISTS}

`mics explain FILE.toml` prints the resolved run and what it will send, without a GPU and without
ranks; `--all` every key there is."""

FILE_OPTIONS = ("config_file", "job.config_file")


def read_arguments(argv: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The file and the overrides by dotted key.

    A switch needs no value: `--compile.enable`, `--compile.no-enable`. Dashes in names are read as
    underscores; lists are written a,b,c or as in TOML.
    """
    path: Path | None = None
    overrides: dict[str, Any] = {}
    words = list(argv)
    while words:
        option, has_value, value = words.pop(0).partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"unexpected {option!r}; write --section.key value")
        name = option.removeprefix("--").replace("-", "_")
        if name in FILE_OPTIONS:
            given = value if has_value else _next(words, option)
            if not given:
                raise ConfigError(f"{option} has an empty name; give the TOML file of a run")
            path = Path(given)
            continue
        if "." not in name and difflib.get_close_matches(name, FILE_OPTIONS[:1]):
            raise ConfigError(f"unknown option {option}; did you mean --config-file?")
        name, switched = _switch(name)
        check_known([name], "the command line")
        key = config_keys()[name]
        if has_value:
            overrides[name] = parsed(key, value)
        elif switched is not None and (not words or words[0].startswith("--")):
            overrides[name] = switched
        else:
            overrides[name] = parsed(key, _next(words, option))
    if path is None:
        raise ConfigError("which run? give --config-file FILE.toml")
    return path, overrides


def _switch(name: str) -> tuple[str, bool | None]:
    """The key, and the value that its bare name stands for: None where it is not a switch."""
    table, _, last = name.rpartition(".")
    positive = f"{table}.{last.removeprefix('no_')}"
    keys = config_keys()
    if name not in keys and positive in keys and keys[positive].type is bool:
        return positive, False
    return name, True if name in keys and keys[name].type is bool else None


def _next(words: list[str], option: str) -> str:
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{option} wants a value")
    return words.pop(0)
