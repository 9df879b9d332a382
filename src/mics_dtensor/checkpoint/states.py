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
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from mics_dtensor.checkpoint.optimizer_states import saved_states
from mics_dtensor.checkpoint.outline import EXTRA, OUTLINES, outline_of, written
from mics_dtensor.checkpoint.placement import OPTIMIZER
from mics_dtensor.errors import CheckpointError
from mics_dtensor.upstream import local_of, units_of

State = dict[str, Any]


@dataclass(frozen=True)
class States:
    """A model, its optimizers, by name what else has a state_dict (schedulers, EMA, loaders)."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def state_dict(self) -> State:
        """Parameters and buffers by their names, "optimizer" flat, "extra", and its outlines."""
        state = self.weights()
        if self.optimizers:
            state[OPTIMIZER] = saved_states(self.model, self.optimizers)
        held = {name: its.state_dict() for name, its in self.extra.items()}
        parameters = parameters_by_name(self.model)
        state[OUTLINES] = written(
            {name: outline_of(its, f"{EXTRA}.{name}", parameters) for name, its in held.items()}
        )
        if held:
            state[EXTRA] = held
        return state

    def weights(self) -> State:
        """Parameters and buffers by their names. Raises CheckpointError where one is taken."""
        state: State = get_model_state_dict(self.model)
        if taken := {OPTIMIZER, EXTRA} & state.keys():
            raise CheckpointError(f"the model has a parameter called {taken.pop()}: rename it")
        return state


def parameters_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Under the names of a checkpoint, which leave wrappers out."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


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
