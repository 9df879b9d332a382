"""Values of keys: checked against their type, read from the command line, shown as TOML."""

from __future__ import annotations

import json
import tomllib
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.key import Key

LISTS = """a,b,c or '["a", "b", "c"]'"""
"""How the command line writes a list."""


def converted(key: Key, value: Any, source: str) -> Any:
    """`value` as the type of `key` (lists become tuples); ConfigError where it is of another."""
    fits, made = _fit(key.type, value)
    if not fits:
        raise ConfigError(
            f"{key.name} = {shown(value)} in {source}; it takes {described(key.type)}"
        )
    return made


def fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a type."""
    return _fit(kind, value)[0]


def parsed(key: Key, word: str) -> Any:
    """The value of one word of the command line; ConfigError where it is of another type."""
    kinds = _alternatives(key.type)
    for kind in sorted(kinds, key=lambda each: each is not NoneType):  # "none" before any string
        fits, value = _parse(kind, word)
        if fits:
            return value
    lists = any(get_origin(kind) is tuple for kind in kinds)
    raise ConfigError(
        f"--{key.name} {word} on the command line; it takes {described(key.type)}"
        + f", written {LISTS}" * lists
    )


def shown(value: Any) -> str:
    """The value as TOML writes it; none for what is not given."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(each) for each in value)}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {shown(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, default=str)


def counted(number: int, one: str, several: str = "") -> str:
    """A number of things: "1 group", "2 groups"."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def described(kind: Any) -> str:
    """A type in words: "a whole number", "one of ..."."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    told = []
    for each in _alternatives(kind):
        if each is NoneType:
            continue
        if get_origin(each) is Literal:
            told.append("one of " + ", ".join(shown(choice) for choice in get_args(each)))
        elif get_origin(each) is tuple:
            word, of, inner = described(get_args(each)[0]).removeprefix("a ").partition(" of ")
            told.append(f"a list of {word}s{of}{inner}")
        elif get_origin(each) is dict:
            told.append("a table")
        else:
            told.append(words[each])
    return " or ".join(told)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fit(kind: Any, value: Any) -> tuple[bool, Any]:
    for each in _alternatives(kind):
        origin = get_origin(each)
        if origin is Literal:
            if value in get_args(each) and not isinstance(value, bool):
                return True, value
        elif origin is tuple:
            # One string where a list is wanted is how torchtitan 0.2's grouped_mm fqns are written.
            listed = [value] if isinstance(value, str) and get_args(each)[0] is str else value
            if isinstance(listed, list | tuple):
                made = [_fit(get_args(each)[0], one) for one in listed]
                if all(fits for fits, _ in made):
                    return True, tuple(one for _, one in made)
        elif origin is dict:
            if isinstance(value, dict):
                return True, value
        elif each is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True, float(value)
        elif type(value) is each:
            return True, value
    return False, None


def _parse(kind: Any, word: str) -> tuple[bool, Any]:
    if kind is NoneType:
        return word.lower() == "none", None
    if kind is bool:
        return word.lower() in ("true", "false"), word.lower() == "true"
    if kind in (int, float):
        try:
            return True, kind(word)
        except ValueError:
            return False, None
    if kind is str:
        return True, word
    if get_origin(kind) is Literal:
        return word in get_args(kind), word
    if get_origin(kind) is tuple and word.lstrip().startswith("["):
        return _fit(kind, _toml_list(word))
    if get_origin(kind) is tuple and get_args(kind)[0] is str:
        return True, tuple(each.strip() for each in word.split(",") if each.strip())
    return False, None


def _toml_list(word: str) -> Any:
    """The list, else none."""
    try:
        read = tomllib.loads(f"it = {word}")
    except tomllib.TOMLDecodeError:
        return None
    return read["it"] if len(read) == 1 else None
