"""Hooks of a model whose optimizer states are sharded over the replicas, on its state dict.

In it each parameter whose fp32 master is in the slices is that master, under the parameter's own
name: pieces, which DCP saves and loads without communication, or whole where whole tensors are
asked for. The shards, rounded from it, are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mics_dtensor.mesh import hop_stages_of
from mics_dtensor.slots import Slot, UnitSlots
from mics_dtensor.upstream import Piece, full_state_is_asked, rewrites_state_dict


@dataclass(eq=False)
class StateHooks:
    """Of one module: the slots of its own parameters, by name, with the units they belong to.

    `around` are the modules that contain it, itself included: their hooks see its state dict.
    """

    parts: Sequence[nn.Module]
    around: Sequence[nn.Module]
    slots: Mapping[str, tuple[Slot, UnitSlots]]
    loaded: list[tuple[Slot, UnitSlots]] = field(default_factory=list)

    def place(self, module: Any) -> list[Callable[[], None]]:
        """On the module; returns the undoing. Torch sets an attribute on what it is given."""
        handles = [
            module.register_state_dict_pre_hook(partial(self.before_saving)),
            module.register_state_dict_post_hook(partial(self.after_saving)),
            module.register_load_state_dict_pre_hook(partial(self.before_loading)),
            module.register_load_state_dict_post_hook(partial(self.after_loading)),
        ]
        return [handle.remove for handle in handles]

    def before_saving(self, *_: Any) -> None:
        """Updated slices are in before anybody reads the shards."""
        for _slot, unit in self.slots.values():
            unit.wait()

    @torch.no_grad()
    def after_saving(
        self, _: nn.Module, state: dict[str, Any], prefix: str, _metadata: object
    ) -> None:
        """Masters in place of what is rounded from them. They are read, and stay as they are.

        Collective, in a DTensor, if whole ones are asked for, or where other people's hooks compute
        with them.
        """
        is_full = full_state_is_asked() or any(map(rewrites_state_dict, self.around))
        for name, (slot, unit) in self.slots.items():
            if slot.has_master and prefix + name in state:
                value = slot.up_to_date()
                state[prefix + name] = (
                    slot.as_whole(value, unit.unit.replicate_group)
                    if is_full
                    else slot.as_piece(value)
                )

    @torch.no_grad()
    def before_loading(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """Masters take what is wider than the shards; of a piece the shards take the rounding."""
        self.loaded.clear()
        for name, (slot, unit) in self.slots.items():
            unit.wait()
            value = state.get(prefix + name)
            if not slot.has_master or not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, Piece):
                slot.tensor.copy_(slot.from_saved(value))
                slot.write_back()
                self.loaded.append((slot, unit))
                state[prefix + name] = getattr(module, name)  # it is there already
            elif value.dtype.itemsize > slot.shard.itemsize:
                slot.tensor.copy_(slot.from_saved(slot.as_cut(value)))
                slot.settle()

    @torch.no_grad()
    def after_loading(self, *_: Any) -> None:
        """The other replicas' slices of what came in pieces. Collective over the replicas."""
        units = dict.fromkeys(unit for _, unit in self.loaded)
        for unit in units:
            slices = [slot.slice for slot, its in self.loaded if its is unit]
            if (sent := unit.send(slices, hop_stages_of(self.parts))) is not None:
                sent.wait()
        self.loaded.clear()


def place_state_hooks(
    parts: Sequence[nn.Module], units: Iterable[UnitSlots]
) -> list[Callable[[], None]]:
    """On every module that has a parameter of `units`, tied ones included; returns the undoing."""
    found = {slot.parameter: (slot, unit) for unit in units for slot in unit.slots}
    undo: list[Callable[[], None]] = []
    around: dict[nn.Module, list[nn.Module]] = {}
    for part in parts:
        for name, module in part.named_modules(remove_duplicate=False):
            steps = name.split(".") if name else []
            prefixes = [".".join(steps[:depth]) for depth in range(len(steps) + 1)]
            around.setdefault(module, []).extend(map(part.get_submodule, prefixes))
    for module, containing in around.items():
        its = {
            name: found[parameter]
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in found
        }
        if its:
            undo += StateHooks(parts, containing, its).place(module)
    return undo
