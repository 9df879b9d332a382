"""Which optimizers can have their states cut into slices over the replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig

ELEMENTWISE = ("Adam", "AdamW")


def refuse_unsliced(config: RunConfig) -> None:
    """Raises ConfigError for what mics.optimizer_over_replicas cannot cut, or would ignore."""
    its = config.optimizer
    groups: tuple[Mapping[str, Any], ...] = its.param_groups
    names = [group.get("optimizer_name", its.name) for group in groups]
    if config.mics.optimizer_over_replicas:
        refuse_kinds(its.implementation, [*names, its.name])


def refuse_kinds(implementation: str, names: Iterable[str]) -> None:
    """The same of torchtitan's own names: an implementation, and a kind for each group."""
    if implementation == "fused_opt_states_bf16":
        raise ConfigError(
            'optimizer.implementation = "fused_opt_states_bf16" would be ignored with '
            'mics.optimizer_over_replicas = true: write "fused", or delete one of the lines'
        )
    for name in names:
        if name not in ELEMENTWISE:
            raise ConfigError(
                f"optimizer {name} looks at more than one element at a time, so "
                "mics.optimizer_over_replicas = true cannot slice its states: use AdamW, or "
                "delete one of the lines"
            )
