"""A checkpoint on its way into a model, its optimizers, and what else was saved with them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from mics_dtensor.checkpoint.optimizer_states import StatesToFill
from mics_dtensor.checkpoint.outline import (
    EXTRA,
    OUTLINES,
    Outline,
    filled,
    outline_of,
    read_outlines,
    to_fill,
)
from mics_dtensor.checkpoint.placement import OPTIMIZER
from mics_dtensor.checkpoint.states import States, parameters_by_name

State = dict[str, Any]


class Loading:
    """After `begin` values are read into `state`; then `finish`, or `give_up` if they were not.

    Each of `extra` gets all that was saved of it, whatever it holds by now. A checkpoint without
    outlines, from before there were any, is loaded by those of what its state_dict holds. `device`:
    the model's, for new tensors that were on such a one.
    """

    def __init__(self, states: States, metadata: Metadata, device: torch.device) -> None:
        self._states, self._metadata, self._device = states, metadata, device
        self._outlines: dict[str, Outline] = {}
        self._optimizers: StatesToFill | None = None
        self.state: State = {}

    def begin(self) -> None:
        """Make what values are read into. Raises CheckpointError; then `give_up` on all ranks."""
        its = self._states
        self.state = its.weights()
        if its.optimizers:
            saved = self._metadata.state_dict_metadata.keys()
            self._optimizers = StatesToFill(its.model, its.optimizers, saved)
            self.state[OPTIMIZER] = self._optimizers.state
        if its.extra:
            self.state[EXTRA] = self._extra()

    def _extra(self) -> State:
        held = {name: its.state_dict() for name, its in self._states.extra.items()}
        kept = saved_outlines(self._metadata)
        parameters = parameters_by_name(self._states.model)
        found: State = {}
        for name, own in held.items():
            if kept is None:
                found[name] = {}  # so that what is saved under this name is minded
                outline = outline_of(own, f"{EXTRA}.{name}", parameters)
            elif name not in kept:
                found[name] = None  # so that it is named among what the checkpoint lacks
                continue
            else:
                outline = pickle.loads(kept[name])
            self._outlines[name] = outline
            values = to_fill(outline, own, self._metadata, parameters, self._device)
            found |= {its.removeprefix(f"{EXTRA}."): value for its, value in values.items()}
        return found

    def finish(self) -> None:
        """What was read, to where it belongs."""
        state, extra = dict(self.state), self.state.get(EXTRA, {})
        state.pop(OPTIMIZER, None)
        state.pop(EXTRA, None)
        values = {f"{EXTRA}.{name}": value for name, value in extra.items()}
        of_extra = {name: filled(its, values) for name, its in self._outlines.items()}
        set_model_state_dict(self._states.model, state)
        if self._optimizers is not None:
            self._optimizers.load()
        for name, its in self._states.extra.items():
            its.load_state_dict(of_extra[name])

    def give_up(self) -> None:
        """All as it was."""
        if self._optimizers is not None:
            self._optimizers.give_up()


def saved_outlines(metadata: Metadata) -> dict[str, bytes] | None:
    """By name, of what was saved as `extra`; None for a checkpoint that does not say."""
    return read_outlines((metadata.planner_data or {}).get(OUTLINES))
