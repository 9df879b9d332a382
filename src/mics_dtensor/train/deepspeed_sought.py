"""The keys of a DeepSpeed configuration, and what has become of them so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.values import shown


@dataclass
class Sought:
    """The keys of the file by dotted name, and what becomes of them.

    `auto`: keys that Hugging Face's Trainer fills, about which nothing is known. `values`: keys of
    ours. `differs`: by key of theirs, why the run is not quite what it asked for.
    """

    given: Mapping[str, Any]
    auto: frozenset[str] = frozenset()
    world_size: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of theirs."""
        found = self.given.get(key, default)
        return default if found is None else found

    def number(self, key: str, default: float | None = None) -> Any:
        """The same, which must be a number."""
        found = self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float | None):
            raise ConfigError(f"{key} = {shown(found)}; DeepSpeed takes a number there")
        return found

    def set(self, key: str, value: Any, *, unless_auto: str) -> None:
        """A key of ours; not where the key of theirs that decides it is left to somebody else."""
        if unless_auto not in self.auto:
            self.values[key] = value
