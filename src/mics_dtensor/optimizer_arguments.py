"""What ReplicaShardedOptimizer is given: a sharded model, a class of optimizers, groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mics_dtensor.errors import ConfigError
from mics_dtensor.parts import parts_of
from mics_dtensor.upstream import Unit, units_of

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "DistMuon")

Groups = list[dict[str, Any]]


def refuse_class(optimizer_cls: Any, elementwise: bool | None) -> None:
    """Raise ConfigError for what is no class of optimizers, or one whose states cannot be cut."""
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        is_class = isinstance(optimizer_cls, type)
        what = (
            optimizer_cls.__name__ if is_class else f"an instance of {type(optimizer_cls).__name__}"
        )
        raise ConfigError(
            f"optimizer_cls is {what}: give a class of torch.optim and its options, as in "
            "ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-4)"
        )
    name = optimizer_cls.__name__
    if name in NOT_ELEMENTWISE or elementwise is False:
        said = "" if name in NOT_ELEMENTWISE else ", as elementwise=False says"
        raise ConfigError(
            f"{name} looks at more than one element at a time, so a slice of its states means "
            f"nothing{said}: use Adam, AdamW or SGD, or a plain optimizer"
        )
    if elementwise is None and optimizer_cls not in ELEMENTWISE:
        raise ConfigError(
            f"{name} is not known to treat every element alone; use Adam, AdamW or SGD, or say "
            "elementwise=True if it does"
        )


def sharded_parts(model: Any) -> tuple[list[nn.Module], list[Unit]]:
    """The model parts and their units. Raises ConfigError where there are none."""
    try:
        parts = parts_of(model)
    except ConfigError as error:
        raise ConfigError(f"{error}; choose among them with param_groups=") from None
    units = units_of(parts)
    if not units:
        raise ConfigError(
            "the model has no FSDP units, so no states can be cut: call "
            "torch.distributed.fsdp.fully_shard on it before the optimizer is made"
        )
    _refuse_held_twice(units)
    return parts, units


def _refuse_held_twice(units: list[Unit]) -> None:
    """Each would be cut into slices of its own, and clear the gradient of the other's."""
    seen: set[int] = set()
    for unit in units:
        for param in unit.params:
            if id(param.parameter) in seen:
                raise ConfigError(
                    f"{param.name} is one parameter that FSDP2 holds twice, in unit {unit.name} "
                    "(tied after it was sharded, as torchtitan does under tensor parallel), so its "
                    "states have no one slice: tie before fully_shard, or use a plain optimizer"
                )
            seen.add(id(param.parameter))


def groups_of(parts: list[nn.Module], units: list[Unit], given: Iterable[Any] | None) -> Groups:
    """The groups as torch's optimizers hold them, parameters in lists; tensors alone are one.

    None given are all that train, in the order of `model.parameters()`, as states of a plain
    optimizer are numbered.
    """
    if given is None:
        held = {id(param.parameter) for unit in units for param in unit.params}
        every = dict.fromkeys(p for part in parts for p in part.parameters())
        given = [p for p in every if p.requires_grad and id(p) in held]
    given = list(given)
    if all(isinstance(its, torch.Tensor) for its in given):
        given = [{"params": given}]
    if wrong := next((its for its in given if not isinstance(its, dict)), None):
        raise ConfigError(
            f'param_groups holds a {type(wrong).__name__}: give dicts with "params", or '
            "parameters alone"
        )
    groups = []
    for group in given:
        its = group["params"]
        groups.append({**group, "params": [its] if isinstance(its, torch.Tensor) else list(its)})
    if not any(group["params"] for group in groups):
        raise ConfigError(
            "there is no parameter to train: all are frozen, or param_groups is empty"
        )
    return groups
