"""DeepSpeed's JSON as the TOML of a run: every key of it mapped, needless, or not carried over.

deepspeed_keys.toml says which; deepspeed_mapping.py does it. Needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.deepspeed_mapping import ALWAYS, MAPPINGS
from mics_dtensor.train.deepspeed_sought import Sought
from mics_dtensor.train.values import converted, shown

TO_BE_SAID = (
    "[model] name, flavor, hf_assets_path",
    "[training] dataset, seq_len, and steps where they are not above",
    "[checkpoint] enable, folder, interval",
    "what the script itself decides: an optimizer or a scheduler that it makes, checkpointing",
)
"""What DeepSpeed's file never says, since the script does."""

COMMENT = re.compile(
    r"""("(?:[^"\\]|\\.)*") | //[^\n]* | \#[^\n]* | /\*.*?\*/""", re.VERBOSE | re.DOTALL
)
TRAILING_COMMA = re.compile(r"""("(?:[^"\\]|\\.)*") | ,(?=\s*[}\]])""", re.VERBOSE)


@dataclass(frozen=True)
class Converted:
    """`values`: keys of ours. The others by key of theirs, each with the reason."""

    values: Mapping[str, Any]
    differs: Mapping[str, str]
    needless: Mapping[str, str]

    def to_toml(self, source: str) -> str:
        """The file: its keys, and below them, as comments, what is to be known of the way."""
        lines: list[str] = []
        for table in dict.fromkeys(name.rpartition(".")[0] for name in config_keys()):
            mine = {n: v for n, v in self.values.items() if n.rpartition(".")[0] == table}
            if mine:
                lines += [f"[{table}]"]
                lines += [f"{name.rpartition('.')[2]} = {_toml(v)}" for name, v in mine.items()]
                lines += [""]
        lines += [f"# From {source}. To be said here, since the script said it there:"]
        lines += [f"#   {line}" for line in TO_BE_SAID]
        if self.differs:
            lines += ["#", "# Not carried over, or not the same:"]
            lines += [f"#   {key}: {why}" for key, why in self.differs.items()]
        if self.needless:
            lines += ["#", "# Without effect here:"]
            lines += [f"#   {key}: {why}" for key, why in self.needless.items()]
        return "\n".join(lines) + "\n"


def convert_config(given: Mapping[str, Any], *, world_size: int | None = None) -> Converted:
    """The run that a DeepSpeed configuration asks for. Raises ConfigError where there is none."""
    flat = _flattened(given)
    differs: dict[str, str] = {}
    needless: dict[str, str] = {}
    mapped: dict[str, Any] = {}
    filled: list[str] = []  # by somebody else
    wanted = set(ALWAYS)
    for key, value in flat.items():
        row = row_of(key)
        if row is None:
            near = difflib.get_close_matches(key, rows(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            differs[_told(key, value)] = f"no key of DeepSpeed 0.16 to 0.19{hint}"
        elif "by" in row:
            wanted.add(row["by"])
            if value == "auto":
                filled.append(key)
                needless |= {_told(key, value): row["auto"]} if "auto" in row else {}
            else:
                mapped[key] = value
        elif "needs" in row:
            needless[_told(key, value)] = row["needs"]
        elif value is None or value in row.get("same", ()):
            needless[_told(key, value)] = "it asks for what is done here"
        else:
            differs[_told(key, value)] = row["lost"]
    its = Sought(mapped, frozenset(filled), world_size)
    for name, function in MAPPINGS.items():
        if name in wanted:
            function(its)
    differs |= {_told(key, "auto"): _to_be_written(key, its.values) for key in filled}
    differs = {told: why for told, why in differs.items() if told not in needless}
    differs |= {_told(key, flat.get(key)): why for key, why in its.differs.items()}
    keys = config_keys()
    values = {name: converted(keys[name], value, "it") for name, value in its.values.items()}
    return Converted(values, differs, needless)


def read_deepspeed(path: Path) -> dict[str, Any]:
    """The file; comments and trailing commas may be in it, as in DeepSpeed. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; give DeepSpeed's JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    text = COMMENT.sub(lambda found: found[1] or " ", text)
    text = TRAILING_COMMA.sub(lambda found: found[1] or "", text)
    try:
        found = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "comments and trailing commas may stay, Hjson's other liberties may not"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; give DeepSpeed's configuration")
    return found


@cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """What becomes of each key; the head of deepspeed_keys.toml says what the fields mean."""
    file = resources.files("mics_dtensor.train") / "deepspeed_keys.toml"
    return dict(tomllib.loads(file.read_text(encoding="utf-8"))["keys"])


def row_of(key: str) -> Mapping[str, Any] | None:
    """The row of a key: its own, else that of the nearest table with ".*"."""
    if key in rows():
        return rows()[key]
    table = key
    while table:
        table = table.rpartition(".")[0]
        if f"{table}.*" in rows():
            return rows()[f"{table}.*"]
    return rows().get(f"{key}.*")


def _to_be_written(key: str, values: Mapping[str, Any]) -> str:
    """Of a key that is "auto": which keys of ours wait for its value, and what they are now."""
    if not (ours := (row_of(key) or {}).get("ours")):
        return "Hugging Face's Trainer fills it; write the value yourself"
    now = [f"{name} = {_toml(values.get(name, config_keys()[name].default))}" for name in ours]
    return f"Hugging Face's Trainer fills it; until you write it, {' and '.join(now)}"


def _flattened(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if key == "zero_optimization" and isinstance(value, bool):  # an old way to say it
            flat["zero_optimization.stage"] = int(value)
        elif isinstance(value, dict) and value:
            flat |= _flattened(value, f"{key}.")
        elif value != {}:
            flat[key] = value
        elif key == "activation_checkpointing":
            flat[f"{key}.partition_activations"] = False  # it is there: the defaults
    return flat


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(doubles)} stands twice; DeepSpeed refuses it too")
    return dict(pairs)


def _told(key: str, value: Any) -> str:
    return key if value is None else f"{key} = {shown(value)}"


def _toml(value: Any) -> str:
    return "inf" if value == math.inf else shown(value)
