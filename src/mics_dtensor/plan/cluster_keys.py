"""The keys of a cluster file, and what each may hold. Pure.

Bounds are wide, and narrow enough that a number in another unit (GB/s, us) lies outside.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster import UNCERTAINTY
from mics_dtensor.plan.timing import WAYS

LARGEST = sys.float_info.max
ABOVE_0 = math.ulp(0.0)
BELOW_1 = math.nextafter(1.0, 0.0)
REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """`words` say what `read` takes; `read` answers None for what it does not take."""

    words: str
    read: Callable[[Any], Any]
    default: Any = REQUIRED
    listed: bool = False
    """The value is a list, not an empty one, and `read` takes each of it."""

    def or_else(self, default: Any) -> Key:
        """The same, which need not be written."""
        return replace(self, default=default)


def _number(least: float, most: float) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if fits and least <= value <= most else None

    return read


def _whole(least: int, most: int) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        number = _number(least, most)(value)
        return int(value) if number is not None and number.is_integer() else None

    return read


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _one_of(names: Iterable[str]) -> Key:
    known = tuple(names)
    return Key(
        f"one of {', '.join(known)}",
        lambda value: value if isinstance(value, str) and value in known else None,
    )


def _shares(value: Any) -> tuple[tuple[float, float], ...] | None:
    size, share = _number(1, 1e15), _number(1e-12, 1)
    if not isinstance(value, list) or not value:
        return None
    found = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        its_size, its_share = size(pair[0]), share(pair[1])
        if its_size is None or its_share is None:
            return None
        found.append((its_size, its_share))
    return tuple(found) if all(low[0] < high[0] for low, high in pairwise(found)) else None


TEXT = Key("a string", _text)
NODES = Key("a whole number from 1 to 1048576", _whole(1, 1 << 20))
LATENCY = Key("seconds, from 0 to less than 1: 54 us are 54e-6", _number(0, BELOW_1))
BYTES_PER_S = Key("bytes a second, from 1e6 to 1e15: 340 GB/s are 340e9", _number(1e6, 1e15))
ORIGIN = _one_of(UNCERTAINTY).or_else("user")

LINK: Mapping[str, Key] = {
    "bandwidth_bytes_per_s": BYTES_PER_S,
    "latency_s": LATENCY,
    "shares": Key(
        "a list of [bytes, share], bytes ascending from 1 to 1e15, shares from 1e-12 to 1",
        _shares,
        default=None,
    ),
    "origin": ORIGIN,
}

TABLES: Mapping[str, Mapping[str, Key]] = {
    "cluster": {
        "name": TEXT,
        "device": TEXT,
        "ranks_per_node": NODES,
        "peak_flops_per_s": Key(
            "FLOP/s, from 1e6 to 1e18: 989 TFLOP/s are 989e12", _number(1e6, 1e18)
        ),
        "product_share": Key("a share from 1e-6 to 1: 60 % are 0.6", _number(1e-6, 1)),
        "product_half_width": Key("a width, from 0 to 1e6", _number(0, 1e6), default=0.0),
        "memory_bytes": Key("whole bytes, from 1e8 to 1e15: 80 GB are 80e9", _whole(10**8, 10**15)),
        "memory_bytes_per_s": BYTES_PER_S,
        "base_latency_s": LATENCY.or_else(0.0),
        "reserved_bytes": Key("whole bytes, from 0 to 1e15", _whole(0, 10**15), default=None),
        "overlap_slowdown": Key(
            "seconds for each second of messages, from 0 to 1000", _number(0, 1000), default=0.0
        ),
        "unit_s": Key("seconds, from 0 to 10: 2 ms are 2e-3", _number(0, 10), default=0.0),
        "unit_s_per_byte": Key(
            "seconds a byte, from 0 to 1e-3: 1 s for 1 GB is 1e-9", _number(0, 1e-3), default=0.0
        ),
        "num_nodes": NODES.or_else(None),
        "hosts": Key("a list of one string or more", _text, default=(), listed=True),
        "backend": TEXT.or_else(None),
        "origin": ORIGIN,
    },
    "link.intra_node": LINK,
    "link.inter_node": LINK,
    "timing": {
        "collective": _one_of(WAYS),
        "num_nodes": NODES,
        "ranks_per_node": NODES,
        "size_bytes": Key(
            "a list of whole bytes, each from 1 to 1e15", _whole(1, 10**15), listed=True
        ),
        "seconds": Key("a list of seconds, each from 1e-9 to 1e5", _number(1e-9, 1e5), listed=True),
    },
    "product": {
        "name": TEXT.or_else(None),
        "shape": Key(
            "a list of whole numbers, each from 1 to 1e15",
            _whole(1, 10**15),
            default=None,
            listed=True,
        ),
        "flops_per_s": Key("FLOP/s above 0", _number(ABOVE_0, LARGEST), default=None),
    },
}
"""By table and key: what reads and refuses (docs/formats.md has their meaning)."""


def values(read: Any, keys: Mapping[str, Key], where: str) -> dict[str, Any]:
    """Every key of a table as the planner holds it. `where` names the table in messages.

    Raises PlanError for an unknown key, one that is lacking, and a value that cannot be.
    """
    known(read, keys, where)
    return {name: _value(read, name, key, where) for name, key in keys.items()}


def known(read: Any, names: Iterable[str], where: str) -> None:
    """Raises PlanError for what is no table, and for a key that is none of `names`."""
    if not isinstance(read, dict):
        raise PlanError(f"{where} is {shown(read)}, not a table; write its keys under {where}")
    all_names = list(names)
    for name in read:
        if name not in all_names:
            near = difflib.get_close_matches(name, all_names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(all_names)}"
            raise PlanError(f"unknown key {name} in {where}; {hint}")


def lacking(name: str, where: str) -> PlanError:
    """For a key, or a table, without which there is no cluster."""
    return PlanError(f"{where} lacks the key {name}; docs/formats.md lists them")


def _value(read: Mapping[str, Any], name: str, key: Key, where: str) -> Any:
    if name not in read:
        if key.default is REQUIRED:
            raise lacking(name, where)
        return key.default
    given, verb = read[name], "="
    each = given if key.listed else [given]
    if isinstance(each, list) and each:
        found = [key.read(one) for one in each]
        if None not in found:
            return tuple(found) if key.listed else found[0]
        given, verb = each[found.index(None)], "holds" if key.listed else "="
    raise PlanError(f"{name} {verb} {shown(given)} in {where} cannot be; give {key.words}")


def shown(value: Any) -> str:
    """A value as TOML writes it, and at most 80 characters of it."""
    if isinstance(value, float):
        return str(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
