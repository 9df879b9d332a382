"""The rows of keys_0_2.toml: what becomes of a key, and whether a value can be honoured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import value_at


@dataclass(frozen=True, kw_only=True)
class Row:
    """One key of torchtitan; the head of keys_0_2.toml says what each field means."""

    key: str
    default: Any = None
    since: str | None = None
    to: str | None = None
    by: str | None = None
    inert: tuple[Any, ...] | Literal["any"] = ()
    accepts: tuple[Any, ...] | None = None
    off_when: tuple[Mapping[str, Any], ...] = ()
    refuse: str | None = None
    note: str = "torchtitan 0.3 always does so"

    def is_off(self, config: RunConfig) -> bool:
        """Whether another key switches this one off."""
        for condition in self.off_when:
            other = value_at(config, condition["key"])
            if "lacks" in condition and condition["lacks"] not in other:
                return True
            if "is" in condition and condition["is"] == other:
                return True
        return False

    def is_inert(self, config: RunConfig) -> bool:
        """Whether the value is accepted and does nothing."""
        if self.to is not None:
            return self.is_off(config)
        return self.inert == "any" or self.is_off(config) or self._value(config) in self.inert

    def is_refused(self, config: RunConfig) -> bool:
        """Whether torchtitan 0.3.0 cannot honour the value."""
        if self.is_off(config):
            return False
        if self.to is None:
            return not self.is_inert(config)
        return self.accepts is not None and self._value(config) not in self.accepts

    def _value(self, config: RunConfig) -> Any:
        return frozen(value_at(config, self.key))


def frozen(value: Any) -> Any:
    """The value with its lists as tuples, at every depth."""
    return tuple(frozen(each) for each in value) if isinstance(value, list | tuple) else value


@cache
def rows() -> Mapping[str, Row]:
    """Every row by its key."""
    read = _document()["keys"]
    return {name: Row(key=name, **{k: frozen(v) for k, v in r.items()}) for name, r in read.items()}


def lost_models() -> Mapping[str, str]:
    """Models that torchtitan 0.3.0 no longer trains, each with what to say."""
    return dict(_document()["models"])


def renamed_flavors() -> Mapping[str, Mapping[str, str]]:
    """Flavors of 0.2.2 by "model.flavor", each with the keys to write in their place."""
    return dict(_document()["flavors"])


@cache
def _document() -> dict[str, Any]:
    file = resources.files("mics_dtensor.train") / "keys_0_2.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
