"""The states of optimizers by the names of their parameters, flat, as torch's functions give them.

torch makes the states of a new optimizer by a step of zeros. That step is not nothing: it leaves
momenta, products and averages that a first step would have begun otherwise. So a save makes none,
and of those that loading makes only what was saved stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mics_dtensor.checkpoint.matching import differing_options
from mics_dtensor.checkpoint.placement import OPTIMIZER
from mics_dtensor.errors import CheckpointError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
State = dict[str, Any]
Optimizers = Sequence[torch.optim.Optimizer]


def refuse_foreign(model: nn.Module, optimizers: Optimizers) -> None:
    """Raise CheckpointError where a parameter of an optimizer is not the model's."""
    own = set(map(id, model.parameters()))
    if others := [p for its in optimizers for p in parameters_of(its) if id(p) not in own]:
        raise CheckpointError(
            f"the optimizer holds {len(others)} parameters that are not the model's (the first "
            f"of shape {list(others[0].shape)}): make it after fully_shard, of "
            "model.parameters()"
        )


def saved_states(model: nn.Module, optimizers: Optimizers) -> State:
    """Options of all parameters, and states of those that have any. Changes nothing."""
    refuse_foreign(model, optimizers)
    with states_as_they_are(optimizers):
        return get_optimizer_state_dict(model, optimizers, options=FLAT)


class StatesToFill:
    """The states of optimizers while a checkpoint is loaded; `saved` are the names in it.

    Into `state` its values are read. All trained parameters have states there, but for those that
    have none in the checkpoint, since no step had used them. Then `load`, or `give_up`. Collective
    where an optimizer's step is.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, saved: Set[str]) -> None:
        refuse_foreign(model, optimizers)
        self._model, self._optimizers = model, optimizers
        self._undo: list[Callable[[], None]] = []
        try:
            for its in optimizers:
                held = its.state
                if any(p.requires_grad and p not in held for p in parameters_of(its)):
                    self._make_anew(its)
            self.state = saved_states(model, optimizers)
            self._names = names_of(model, optimizers)
        except BaseException:
            self.give_up()
            raise
        self._unused = unused(self.state, saved, set(self._names.values()))
        for name in [n for n in self.state if parameter_in(n, self._unused)]:
            if name.startswith("state."):
                del self.state[name]

    def _make_anew(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [dict(group) for group in optimizer.param_groups]
        self._undo += [partial(put_back, optimizer, groups), states_aside(optimizer)]
        with gradients_aside(optimizer):
            get_optimizer_state_dict(self._model, optimizer)  # makes them

    def load(self) -> None:
        """What was read, into the optimizers."""
        self._undo.clear()
        for its in self._optimizers:
            drop_states(its, [p for p in parameters_of(its) if self._names[p] in self._unused])
        with states_as_they_are(self._optimizers):
            set_optimizer_state_dict(self._model, self._optimizers, self.state, options=FLAT)
        for its in self._optimizers:  # torch leaves empty ones
            held = its.state
            drop_states(its, [p for p in parameters_of(its) if not held.get(p)])

    def give_up(self) -> None:
        """The optimizers as they were, where nothing was loaded."""
        while self._undo:
            self._undo.pop()()


def unused(state: Mapping[str, Any], saved: Set[str], names: Set[str]) -> set[str]:
    """Of the parameters `names`, those that the optimizer that was saved had, without any state.

    Where its options are others both ways it was of another kind, and had other states. Pure.
    """

    def by_parameter(flat: Iterable[str], kind: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in flat:
            if name.startswith(f"{kind}.") and (its := parameter_in(name, names)):
                found.setdefault(its, set()).add(name.removeprefix(f"{kind}.{its}."))
        return found

    prefix = f"{OPTIMIZER}."
    flat = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
    options, theirs = by_parameter(state, "param_groups"), by_parameter(flat, "param_groups")
    with_states = by_parameter(flat, "state")
    return {
        its
        for its in by_parameter(state, "state")
        if its not in with_states
        and its in theirs
        and not any(differing_options(options[its], theirs[its]))
    }


def parameter_in(name: str, parameters: Set[str]) -> str | None:
    """Which of them "state.NAME.exp_avg" or "param_groups.NAME.lr" is about. Pure."""
    parts = name.split(".")[1:]
    ends = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((its for its in ends if its in parameters), None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(model: nn.Module, optimizers: Optimizers) -> dict[nn.Parameter, str]:
    """By parameter, its name in a flat state."""
    found: dict[nn.Parameter, str] = {}
    with states_as_they_are(optimizers):
        for its in optimizers:
            groups: Any = get_optimizer_state_dict(model, its)["param_groups"]
            names = [name for group in groups for name in group["params"]]
            found.update(zip(parameters_of(its), names, strict=True))
    return found


@contextmanager
def states_as_they_are(optimizers: Optimizers) -> Iterator[None]:
    """No states are made here: torch makes none where it sees a gradient."""
    lent = []
    for its in optimizers:
        parameters = parameters_of(its)
        if parameters and not its.state and all(p.grad is None for p in parameters):
            smallest = min(parameters, key=torch.Tensor.numel)
            smallest.grad = torch.zeros_like(smallest)
            lent.append(smallest)
    try:
        yield
    finally:
        for parameter in lent:
            parameter.grad = None


@contextmanager
def gradients_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The parameters have none here, and theirs again afterwards."""
    before = [(p, p.grad) for p in parameters_of(optimizer)]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def states_aside(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The optimizer has no states; returns the call that puts back those that it had."""
    if isinstance(optimizer, ReplicaShardedOptimizer):
        return optimizer.states_aside()
    before = dict(optimizer.state)
    optimizer.state.clear()

    def back() -> None:
        optimizer.state.clear()
        optimizer.state.update(before)

    return back


def drop_states(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Those of some parameters, which are as if no step had used them."""
    if isinstance(optimizer, ReplicaShardedOptimizer):
        optimizer.drop_states(parameters)
        return
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def put_back(optimizer: torch.optim.Optimizer, groups: Sequence[State]) -> None:
    """The options of parameter groups, as they were."""
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(before)
