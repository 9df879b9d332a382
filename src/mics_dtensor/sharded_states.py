"""ReplicaShardedOptimizer: optimizer states sharded over the replication group, the third level.

MiCS keeps R copies of the optimizer states. Here each of the R replicas of a shard owns 1/R of it:
the second hop is a reduce-scatter (slices.py), the optimizer runs on the slice alone, and the
updated slices are gathered: the bytes of the all-reduce, 1/R of the states. AMSP (arXiv 2311.00257)
measured what the copies cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, overload
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from mics_dtensor.errors import ConfigError
from mics_dtensor.slices import Slice, gather_slices, slice_of, slices_of_unit
from mics_dtensor.stage import stage
from mics_dtensor.upstream import (
    Unit,
    add_hook,
    flat_shard,
    is_replaced,
    local_of,
    run_load_hooks,
    units_of,
    version_of,
)

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "DistMuon")

MasterWeights = Literal["fp32", "sharded"]
Groups = list[dict[str, Any]]


class ReplicaShardedOptimizer(torch.optim.Optimizer):
    """An elementwise optimizer whose states take 1/R of the memory, R being the replicas.

    `optimizer_cls`: torch's Adam, AdamW or SGD with its options in `defaults`, foreach and fused
    included, or another class that treats every element alone, which `elementwise=True` says.
    `param_groups` as torch takes them; by default all trainable parameters of `model` (or model
    parts), which must lie in FSDP units. Call it after sharding, `apply_mics` and
    `synchronize_replicas`. While it lives, gradient_accumulation ends with a reduce-scatter over
    the replicas: `.grad` is then this replica's summand of the gradient, zero outside of its slice
    (a DTensor that is Partial over the replicas). It may be scaled; it must stay zero there.

    `skip_nonfinite`: skip the step, on every rank of the world, if a gradient of one is not finite;
    `skipped` then says so. Entries may be changed in `param_groups` between steps, as learning-rate
    schedulers do. `state` is a view: read it, load with load_state_dict.

    Collective: step(), over the replicas. Raises ConfigError for what cannot be sliced.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        param_groups: Iterable[dict[str, Any]] | None = None,
        elementwise: bool | None = None,
        skip_nonfinite: bool = False,
        **defaults: Any,
    ) -> None:
        _refuse_class(optimizer_cls, elementwise)
        self.skip_nonfinite, self.skipped = skip_nonfinite, False
        units = units_of(model)
        groups = _groups(units, param_groups)
        chosen = {id(parameter) for group in groups for parameter in group["params"]}
        self._buckets = [
            bucket for unit in units if (bucket := _Bucket.of(unit, chosen)) is not None
        ]
        self._slots = {
            slot.parameter: slot
            for bucket in self._buckets
            for slot in bucket.slots
            if id(slot.parameter) in chosen
        }
        self._refuse_outside(groups)
        self._inner = optimizer_cls(
            [{**g, "params": [self._slots[p].tensor for p in g["params"]]} for g in groups],
            **defaults,
        )
        super().__init__(groups, self._inner.defaults)
        self._copy_options(self._inner, self)
        hooks = [
            add_hook(slot.parameter, slot.slice)
            for bucket in self._buckets
            for slot in bucket.slots
        ]
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
        for slot in self._slots.values():
            slot.follow()
        self._copy_options(self, self._inner)
        for slot in self._slots.values():
            slot.take_gradient()
        self.skipped = self.skip_nonfinite and self._any_nonfinite()
        if not self.skipped:
            self._inner.step()
        for slot in self._slots.values():
            slot.tensor.grad = None
        if not self.skipped:
            for bucket in self._buckets:
                bucket.gather()
        return loss

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
        device = self._buckets[0].unit.device if self._buckets else torch.device("cpu")
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


@dataclass(eq=False)
class _Slot:
    """A parameter, and the tensor that the inner optimizer updates: its slice."""

    slice: Slice
    parameter: nn.Parameter
    tensor: torch.Tensor
    address: int = 0

    @classmethod
    def of(cls, its: Slice) -> _Slot:
        flat = flat_shard(its.param)
        return cls(its, its.param.parameter, its.of(flat), flat.data_ptr())

    def follow(self) -> None:
        """To where the shard lies by now. Raises ConfigError if it is another parameter's."""
        if is_replaced(self.slice.param, self.parameter):
            raise ConfigError(
                f"{self.slice.param.name} is another object than when ReplicaShardedOptimizer was "
                "made (load_state_dict(assign=True)?), and would not be trained: load in place, or "
                "make the optimizer anew"
            )
        flat = flat_shard(self.slice.param)
        if flat.data_ptr() != self.address or flat.dtype != self.tensor.dtype:
            self.tensor.data = self.slice.of(flat)
            self.address = flat.data_ptr()

    def take_gradient(self) -> None:
        """The slice of `.grad`: no copy."""
        gradient = self.parameter.grad
        self.tensor.grad = None
        if gradient is not None:
            self.tensor.grad = self.slice.of(local_of(gradient)).to(self.tensor.dtype)


@dataclass(eq=False)
class _Bucket:
    """The parameters of one unit: one message after the step."""

    unit: Unit
    slots: list[_Slot] = field(default_factory=list)

    @classmethod
    def of(cls, unit: Unit, chosen: set[int]) -> _Bucket | None:
        if not any(id(param.parameter) in chosen for param in unit.params):
            return None
        for param in unit.params:
            if slice_of(param.parameter) is not None:
                raise ConfigError(
                    f"{param.name} is sliced by a ReplicaShardedOptimizer already: give all "
                    "parameters of a unit to one, or delete the other first"
                )
        return cls(unit, [_Slot.of(its) for its in slices_of_unit(unit, None)])

    def gather(self) -> None:
        """The slices of the other replicas. Collective over the replication group."""
        if self.unit.num_replicas == 1 or self.unit.replicate_group is None:
            return
        with stage("gather of updated slices", self.unit.name, self.unit.replicate_group) as group:
            gather_slices([slot.slice for slot in self.slots], group=group, device=self.unit.device)


def _groups(units: list[Unit], given: Iterable[dict[str, Any]] | None) -> Groups:
    """The groups as torch's optimizers hold them, parameters in lists."""
    if given is None:
        trained = [p.parameter for u in units for p in u.params if p.parameter.requires_grad]
        return [{"params": trained}]
    groups = []
    for group in given:
        its = group["params"]
        groups.append({**group, "params": [its] if isinstance(its, torch.Tensor) else list(its)})
    return groups


def _refuse_class(optimizer_cls: type[torch.optim.Optimizer], elementwise: bool | None) -> None:
    name = optimizer_cls.__name__
    if name in NOT_ELEMENTWISE:
        raise ConfigError(
            f"{name} looks at more than one element at a time, so a slice of its states means "
            "nothing: use Adam, AdamW or SGD, or a plain optimizer"
        )
    if elementwise is False or (elementwise is None and optimizer_cls not in ELEMENTWISE):
        raise ConfigError(
            f"{name} is not known to treat every element alone; use Adam, AdamW or SGD, or say "
            "elementwise=True if it does"
        )


def _remove(hooks: list[Callable[[], None]]) -> None:
    for remove in hooks:
        remove()
