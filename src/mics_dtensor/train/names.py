"""Names of keys and tables: what is known, and the nearest known name of what is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import config_keys


def check_known(names: Iterable[str], source: str) -> None:
    """Raises ConfigError for the first dotted name that is no key, with the nearest one."""
    known = config_keys()
    for name in names:
        if name in known:
            continue
        table, _, last = name.rpartition(".")
        if any(key.startswith(f"{name}.") for key in known):
            raise ConfigError(f"[{name}] in {source} is a table, not a value; write its keys")
        if inside := next((key for key in known if name.startswith(f"{key}.")), None):
            raise ConfigError(f"{inside} in {source} is a key, not a table; give it a value")
        if not table:
            raise ConfigError(
                f"unknown {last} at the top of {source}; every key lies in a table{_hint(last)}"
            )
        if not any(key.startswith(f"{table}.") for key in known):
            raise ConfigError(f"unknown table [{table}] in {source}{_nearest_table(table)}")
        raise ConfigError(f"unknown key {name} in {source}{_nearest_key(table, last)}")


def _nearest_key(table: str, last: str) -> str:
    """The nearest key of the same table, else one of that name elsewhere, else what there is."""
    here = {key.rpartition(".")[2]: key for key in config_keys() if _table(key) == table}
    if near := difflib.get_close_matches(last, here, n=1):
        return f"; did you mean {here[near[0]]}?"
    return _hint(last) or f"; [{table}] has {', '.join(here)}"


def _hint(last: str) -> str:
    """The key of that name anywhere: the first, where several tables have one."""
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(list(config_keys()))}
    near = difflib.get_close_matches(last, elsewhere, n=1)
    return f"; did you mean {elsewhere[near[0]]}?" if near else ""


def _nearest_table(table: str) -> str:
    tables = list(dict.fromkeys(_table(key) for key in config_keys()))
    near = difflib.get_close_matches(table, tables, n=1)
    if near:
        return f"; did you mean [{near[0]}]?"
    return f"; the tables are {', '.join(tables)}"


def _table(key: str) -> str:
    return key.rpartition(".")[0]
