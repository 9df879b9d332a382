"""What a checkpoint holds of a model, its optimizer and whatever else, under the names of DCP."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from mics_dtensor.checkpoint.placement import OPTIMIZER
from mics_dtensor.errors import CheckpointError
from mics_dtensor.upstream import local_of, units_of

EXTRA = "extra"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
State = dict[str, Any]


@dataclass(frozen=True)
class States:
    """A model, its optimizer, and by name what else has a state_dict (schedulers, EMA, loaders)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def state_dict(self) -> State:
        """Parameters and buffers by their names, "optimizer" flat, and "extra"."""
        state: State = get_model_state_dict(self.model)
        if taken := {OPTIMIZER, EXTRA} & state.keys():
            raise CheckpointError(f"the model has a parameter called {taken.pop()}: rename it")
        if self.optimizer is not None:
            state[OPTIMIZER] = self._optimizer_state(self.optimizer)
        if self.extra:
            state[EXTRA] = {name: its.state_dict() for name, its in self.extra.items()}
        return state

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        own = set(map(id, self.model.parameters()))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if others := [p for p in held if id(p) not in own]:
            raise CheckpointError(
                f"the optimizer holds {len(others)} parameters that are not the model's (the first "
                f"of shape {list(others[0].shape)}): make it after fully_shard, of "
                "model.parameters()"
            )
        is_new = not optimizer.state
        state: State = get_optimizer_state_dict(self.model, optimizer, options=FLAT)
        if is_new:  # torch has made the states by a step of zeros, which must not count as one
            for its in optimizer.state.values():
                if isinstance(steps := its.get("step"), torch.Tensor):
                    steps.zero_()
        return state

    def load_state_dict(self, state: State) -> None:
        """Into the model, the optimizer and the others."""
        state = dict(state)
        extra, optimizer = state.pop(EXTRA, {}), state.pop(OPTIMIZER, None)
        set_model_state_dict(self.model, state)
        if self.optimizer is not None and optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=FLAT)
        for name, its in self.extra.items():
            if name in extra:
                its.load_state_dict(extra[name])


def held_on_cpu(value: Any, into: Any = None) -> Any:
    """A copy of a state dict in host memory that later steps do not change. No communication.

    `into`: an earlier copy that nobody reads any more. Its tensors are written over where they fit:
    memory that is new costs several times what copying does (benchmarks/checkpoints.py).
    """
    if isinstance(value, dict):
        before = into if isinstance(into, dict) else {}
        return {key: held_on_cpu(its, before.get(key)) for key, its in value.items()}
    if type(value) in (list, tuple):
        parts = into if type(into) is type(value) and len(into) == len(value) else repeat(None)
        pairs = zip(value, parts, strict=False)
        return type(value)(held_on_cpu(its, before) for its, before in pairs)
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if not lies_alike(value, into):
        return value.to("cpu", copy=True)
    local_of(into).copy_(local_of(value))
    return into


def lies_alike(value: torch.Tensor, other: Any) -> bool:
    """Whether `other` is a tensor of the same numbers on this rank: the same part of the same."""
    of_both = ("shape", "dtype", "placements", "device_mesh", "boxes")  # DTensor's, Piece's
    return type(other) is type(value) and all(
        getattr(value, name, None) == getattr(other, name, None) for name in of_both
    )


def replication_groups(parts: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """Those of this rank, each once."""
    found = {}
    for unit in units_of(list(parts)):
        if (group := unit.replicate_group) is not None:
            found[tuple(dist.get_process_group_ranks(group))] = group
    return list(found.values())


def device_of(parts: Iterable[nn.Module]) -> torch.device:
    """Where messages of the model's groups lie."""
    units = units_of(list(parts))
    return units[0].device if units else torch.device("cpu")
