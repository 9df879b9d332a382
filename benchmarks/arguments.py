"""What the commands of this folder are given: types for argparse, which refuse before a start."""

from __future__ import annotations

import math
import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

# Beyond these, tc's 32-bit burst and latency of `tbf` wrap around, and it limits to something else.
_SLOWEST, _FASTEST = "8kbit", "300gbit"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def count(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise ArgumentTypeError(f"{text}; give a whole number of 1 or more")
    return found


def duration(text: str) -> float:
    """A number above 0."""
    if not 0 < (found := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text}; give a number above 0")
    return found


def pause(text: str) -> float:
    """A number of 0 or more."""
    if not 0 <= (found := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text}; give a number of 0 or more")
    return found


def rate(text: str) -> str:
    """Of a link, as tc writes it."""
    is_one = re.fullmatch(rf"[0-9]+(\.[0-9]+)?({'|'.join(_UNITS)})", text)
    if not is_one or not bits_per_s(_SLOWEST) <= bits_per_s(text) <= bits_per_s(_FASTEST):
        raise ArgumentTypeError(f"{text}; give {_SLOWEST} to {_FASTEST}, as 400mbit")
    return text


def rate_or_none(text: str) -> str | None:
    """Of a link, as tc writes it; None for `unlimited`."""
    try:
        return None if text == "unlimited" else rate(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or unlimited") from None


def bits_per_s(rate: str) -> float:
    """Of a rate as tc writes it."""
    return float(rate[:-4]) * _UNITS[rate[-4:]]


def result_file(text: str) -> Path:
    """A file that can be written, whether it is there or not; its folder is. Makes nothing."""
    path = Path(text)
    folder = Path(os.path.realpath(path)).parent  # of what a link leads to
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except OSError as error:
        why = (error.strerror or "").lower()
        raise ArgumentTypeError(
            f"{path} cannot be written ({why}); give a file elsewhere"
        ) from None
    else:
        there = True
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a folder; give a file, as {path / 'results.json'}")
    if not there and not folder.is_dir():
        raise ArgumentTypeError(
            f"{path} cannot be written, since {folder} is no folder; make it, or give another"
        )
    if not os.access(path if there else folder, os.W_OK):
        raise ArgumentTypeError(
            f"{path} cannot be written, since {path if there else folder} is not yours to write; "
            "give a file elsewhere"
        )
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
