"""ReplicaShardedOptimizer: optimizer states sharded over the replication group, the third level.

MiCS keeps R copies of the optimizer states. Here each of the R replicas of a shard owns 1/R of it:
the second hop is a reduce-scatter (slices.py), the optimizer runs on the slice alone, and the
updated slices are gathered: the bytes of the all-reduce, 1/R of the states. AMSP (arXiv 2311.00257)
measured what the copies cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.masters import place_state_hooks
from mics_dtensor.mesh import hop_stages_of
from mics_dtensor.optimizer_arguments import Groups, groups_of, refuse_class, sharded_parts
from mics_dtensor.slots import UnitSlots
from mics_dtensor.upstream import (
    add_hook,
    full_state_is_asked,
    local_of,
    narrow_parameters,
    run_load_hooks,
    set_post_optim_event,
)

MasterWeights = Literal["fp32", "sharded"]


class ReplicaShardedOptimizer(torch.optim.Optimizer):
    """An elementwise optimizer whose states take 1/R of the memory, R being the replicas.

    `optimizer_cls`: torch's Adam, AdamW or SGD with its options in `defaults`, foreach and fused
    included, or another class that treats every element alone, which `elementwise=True` says.
    `param_groups` as torch takes them; by default all trainable parameters of `model` (or model
    parts), which must lie in FSDP units. Call it after sharding, `apply_mics` and
    `synchronize_replicas`. While it lives, gradient_accumulation ends with a reduce-scatter over
    the replicas: `.grad` is then this replica's summand of the gradient, zero outside of its slice
    (a DTensor that is Partial over the replicas). It may be scaled; it must stay zero there.

    `master_weights`: "fp32": the shards are what is trained. "sharded": this replica's slice has an
    fp32 copy, which is trained, and the shards are rounded from it: make the optimizer while the
    shards are fp32; it casts them to the `param_dtype` of their unit (without one, call
    `model.to(torch.bfloat16)` before the first forward). `.grad` is then fp32, and the model's
    state dict has the masters under its own names. Per element of a shard, with Adam: 4 + 4 + 8/R
    bytes, or 2 + 4 + 12/R.

    `skip_nonfinite`: skip the step, on every rank of the world, if a gradient of one is not finite;
    `skipped` then says so. Entries may be changed in `param_groups` between steps, as learning-rate
    schedulers do. `state` is a view: read it, load with load_state_dict.

    `overlap_update`: step() returns while updated slices still travel. Each unit has its own before
    FSDP2 gathers it, by whatever road, before a state dict and before the next step; before you
    read or write a parameter by hand, call wait().

    It moves the shards of each unit end to end, so that slices are gathered in place: make it
    before you keep a state dict of the model. Save and load with torch.distributed.checkpoint;
    `full_state_dict=True` of torch's state dict functions gathers.

    Collective: step(), over the replicas. Raises ConfigError for what cannot be sliced.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        param_groups: Iterable[dict[str, Any]] | None = None,
        elementwise: bool | None = None,
        master_weights: MasterWeights = "fp32",
        skip_nonfinite: bool = False,
        overlap_update: bool = False,
        **defaults: Any,
    ) -> None:
        refuse_class(optimizer_cls, elementwise)
        self.skip_nonfinite, self.skipped = skip_nonfinite, False
        self.overlap_update = overlap_update
        parts, units = sharded_parts(model)
        self._parts = parts
        groups = groups_of(parts, units, param_groups)
        chosen = {id(parameter) for group in groups for parameter in group["params"]}
        if master_weights not in ("fp32", "sharded"):
            raise ConfigError(f'master_weights is {master_weights!r}; give "fp32" or "sharded"')
        has_masters = master_weights == "sharded"
        found = [UnitSlots.of(unit, chosen, has_masters=has_masters) for unit in units]
        self._units = [its for its in found if its is not None]
        self._slots = {
            slot.parameter: slot
            for unit in self._units
            for slot in unit.slots
            if id(slot.parameter) in chosen
        }
        self._refuse_outside(groups)
        if has_masters:
            _narrow(parts, self._units)
        for unit_slots in self._units:
            unit_slots.lay()
        self._inner = optimizer_cls(
            [{**g, "params": [self._slots[p].tensor for p in g["params"]]} for g in groups],
            **defaults,
        )
        super().__init__(groups, self._inner.defaults)
        self._copy_options(self._inner, self)
        hooks = [
            add_hook(slot.parameter, slot.slice) for unit in self._units for slot in unit.slots
        ]
        if has_masters or overlap_update:
            hooks += place_state_hooks(parts, self._units)
        finalize(self, _remove, hooks)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the own slices and gather those of the others. Collective over the replicas."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        for slot in self._slots.values():
            slot.follow()
            slot.refuse_wide_shard()
        self._copy_options(self, self._inner)
        for slot in self._slots.values():
            slot.take_gradient()
        self.skipped = self.skip_nonfinite and self._any_nonfinite()
        if not self.skipped:
            self._inner.step()
        for slot in self._slots.values():
            slot.tensor.grad = None
        if not self.skipped:
            for slot in self._slots.values():
                slot.write_back()
            stages = hop_stages_of(self._parts)
            for unit in self._units:
                unit.gather(stages, overlap=self.overlap_update)
            if self.overlap_update:
                device = self._units[0].unit.device if self._units else torch.device("cpu")
                event = torch.get_device_module(device).Event()
                event.record()
                set_post_optim_event(self._parts, event)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without its foreach, which knows no sums that are still in parts."""
        if set_to_none:
            super().zero_grad()
            return
        for gradient in (p.grad for p in self._slots if p.grad is not None):
            local_of(gradient).zero_()

    def wait(self) -> None:
        """Until all shards are whole: before parameters are read or written by hand.

        With `overlap_update` alone; whatever goes through FSDP2, a state dict or step() waits by
        itself. No communication starts here.
        """
        if self.overlap_update:
            for unit in self._units:
                unit.wait()
            set_post_optim_event(self._parts, None)  # the next forward sees what is written by hand

    def state_dict(self) -> dict[str, Any]:
        """As torch's; states are pieces. Collective if torch is asked for full_state_dict=True."""
        self.wait()
        return super().state_dict()

    @property  # type: ignore[override]
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By parameter: its states, those of the slice's shape as pieces of the whole tensor."""
        found: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)  # as torch's
        is_full = full_state_is_asked()
        for unit in vars(self).get("_units", []):
            for slot in unit.slots:
                if its := self._inner.state.get(slot.tensor):
                    found[slot.parameter] = {
                        name: value
                        if not _is_of(slot.tensor, value)
                        else slot.as_whole(value, unit.unit.replicate_group)
                        if is_full
                        else slot.as_piece(value)
                        for name, value in its.items()
                    }
        return found

    @state.setter
    def state(self, value: dict[nn.Parameter, dict[str, Any]]) -> None:
        if value:
            raise ConfigError("the states of slices are loaded with load_state_dict")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """States of this layout, or whole ones; DCP moves others into this layout beforehand.

        A parameter of which nothing was saved has none then, as in torch's optimizers.
        No communication. Raises CheckpointError for states of another layout.
        """
        self.wait()
        state_dict = run_load_hooks(self, state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise CheckpointError(
                f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}: "
                "make it with the same param_groups"
            )
        for name, parameter in zip(names, parameters, strict=True):
            saved = dict(state_dict["state"].get(name, {}))
            slot = self._slots[parameter]
            if not saved:
                self._inner.state.pop(slot.tensor, None)
            else:
                self._inner.state[slot.tensor] = {
                    key: slot.from_saved(value) for key, value in saved.items()
                }
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {k: v for k, v in saved.items() if k not in ("params", "param_names")}
        self._copy_options(self, self._inner)
        run_load_hooks(self)

    def drop_states(self, parameters: Iterable[nn.Parameter]) -> None:
        """As if no step had used these parameters. For `Checkpoints`. No communication."""
        for parameter in parameters:
            self._inner.state.pop(self._slots[parameter].tensor, None)

    def states_aside(self) -> Callable[[], None]:
        """Have no states; returns what puts those back that were there. For `Checkpoints`."""
        before = dict(self._inner.state)
        self._inner.state.clear()

        def back() -> None:
            self._inner.state.clear()
            self._inner.state.update(before)

        return back

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """At construction only: slices are cut once."""
        if "_inner" in vars(self) and len(self.param_groups) == len(self._inner.param_groups):
            raise ConfigError(
                "ReplicaShardedOptimizer has all its parameter groups from the start: pass them as "
                "param_groups="
            )
        super().add_param_group(param_group)

    def _any_nonfinite(self) -> bool:
        """Whether a gradient of some rank is not finite. Collective over the world."""
        mine = [slot.tensor.grad for slot in self._slots.values() if slot.tensor.grad is not None]
        bad = any(not bool(torch.isfinite(gradient).all()) for gradient in mine)
        device = self._units[0].unit.device if self._units else torch.device("cpu")
        flag = torch.tensor(int(bad), dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _copy_options(self, source: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
        for its, theirs in zip(source.param_groups, to.param_groups, strict=True):
            theirs |= {k: v for k, v in its.items() if k not in ("params", "param_names")}

    def _refuse_outside(self, groups: Groups) -> None:
        for group in groups:
            for parameter in group["params"]:
                if parameter not in self._slots:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in no FSDP unit of the "
                        "model, or is frozen: give it to an optimizer of its own"
                    )


def _narrow(parts: list[nn.Module], units: list[UnitSlots]) -> None:
    """Shards beside a master to the dtype in which they are gathered, if that is narrower."""
    dtypes: dict[torch.dtype, list[nn.Parameter]] = {}
    for unit in units:
        for slot in unit.slots:
            if (dtype := unit.unit.gather_dtype).itemsize < slot.shard.itemsize:
                dtypes.setdefault(dtype, []).append(slot.parameter)
    for dtype, parameters in dtypes.items():
        narrow_parameters(parts, parameters, dtype)


def _is_of(tensor: torch.Tensor, value: object) -> bool:
    """Whether a state is of the slice's shape, and not a number of steps."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == tensor.shape


def _remove(hooks: list[Callable[[], None]]) -> None:
    for remove in hooks:
        remove()
