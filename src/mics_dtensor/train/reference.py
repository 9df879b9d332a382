"""docs/configuration.md, from the tables and their rows: python -m mics_dtensor.train.reference"""

from __future__ import annotations

from mics_dtensor.train.bounds import BOUNDS, OF_A_GROUP
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.key import Key
from mics_dtensor.train.param_groups import KEYS
from mics_dtensor.train.rows import Row, rows
from mics_dtensor.train.values import described, shown

HEAD = """\
# Configuration

Every key of a run's TOML file, and of the command line (`--section.key value`). Command line >
file > default. A list of the command line is written a,b,c or as in TOML, `'["a", "b", "c"]'`; one
of lists or of tables as in TOML alone. An unknown key or table is refused with the nearest known
name. Defaults are torchtitan 0.2.2's, also where 0.3.0 changed them. A number outside of the bounds
that stand beside its type is refused.

*In 0.3* says what becomes of the key: the place of its value in torchtitan 0.3.0's
`Trainer.Config`; *no effect* (accepted, and listed at start if the file sets it); or *refused*
unless off.

This page is made by `python -m mics_dtensor.train.reference`, and a test holds it current."""


def reference() -> str:
    """The page, in Markdown."""
    tables: dict[str, list[str]] = {}
    for name, key in config_keys().items():
        table, _, last = name.rpartition(".")
        cells = [f"`{last}`", _type(key), f"`{shown(key.default)}`", key.meaning, _fate(name)]
        row = f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        tables.setdefault(table, []).append(row)
    parts = [HEAD]
    for table, lines in tables.items():
        header = "| key | type | default | meaning | in 0.3 |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## `[{table}]`\n", header, *lines]))
        if table == "optimizer":
            parts.append(_param_groups())
    return "\n\n".join(parts) + "\n"


PARAM_GROUPS = """\
## `[[optimizer.param_groups]]`

The tables of `param_groups`. A parameter belongs to the first table whose `pattern` is found in its
name (`re.search`; names as checkpoints have them, such as `layers.0.attention.wo.weight`), else to
`[optimizer]`, which also holds for what a table leaves out. A pattern that no parameter belongs to
is refused at start.

| key | type | meaning |
|---|---|---|
"""


def _param_groups() -> str:
    rows = [f"| `{key.name}` | {_type(key)} | {key.meaning} |" for key in KEYS.values()]
    return PARAM_GROUPS + "\n".join(rows)


def _type(key: Key) -> str:
    bounds = {**OF_A_GROUP, **BOUNDS}
    bound = f" ({bounds[key.name].words})" if key.name in bounds else ""
    return f"{described(key.type)}{bound}{f', in {key.unit}' if key.unit else ''}"


def _fate(name: str) -> str:
    row: Row | None = rows().get(name)
    if row is None:
        return "this project's own"
    new = "new; " if row.since == "0.3" else ""
    if row.to is not None:
        return f"{new}`{row.to}`" + (f"; else refused: {row.refuse}" if row.refuse else "")
    if row.inert == "any":
        return f"{new}no effect: {row.note}"
    return f"{new}refused: {row.refuse}" if row.refuse else f"{new}no effect: {row.note}"


if __name__ == "__main__":
    print(reference(), end="")
