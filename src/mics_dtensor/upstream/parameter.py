"""One parameter of a unit, as FSDP2 holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WAS_SENT = "mics_was_sent"  # our attribute, on FSDPParam


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a unit, as FSDP2 holds it on this rank."""

    name: str
    fsdp: Any  # torch's FSDPParam

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter: a DTensor, the one the optimizer has; its `.grad` is ours too."""
        parameter: nn.Parameter = self.fsdp.sharded_param
        return parameter

    @property
    def forms(self) -> tuple[torch.Tensor, ...]:
        """The parameter as the module may show it: sharded, gathered, or cut after the forward."""
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        found = (getattr(self.fsdp, name, None) for name in names)
        return tuple(each for each in found if each is not None)

    @property
    def shown(self) -> torch.Tensor | None:
        """What its module shows in its place now."""
        where = self.fsdp._module_info
        return getattr(where.module, where.param_name, None)

    @property
    def only_module(self) -> nn.Module | None:
        """The module that it is a parameter of; None where several share it."""
        where = self.fsdp._module_info
        module: nn.Module = where.module
        return None if where.shared_modules else module

    @property
    def was_sent(self) -> bool:
        """Whether its gradient crossed the replicas at the last boundary; all of them know it."""
        return bool(getattr(self.fsdp, WAS_SENT, False))

    def remember(self, *, sent: bool) -> None:
        """For `was_sent`, also of objects made later for the same parameter."""
        setattr(self.fsdp, WAS_SENT, sent)

    @property
    def local(self) -> torch.Tensor:
        """The shard of this rank, without padding."""
        shard: torch.Tensor = self.fsdp.sharded_param._local_tensor
        return shard

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before this unit's sharding: one rank's part under tensor parallel."""
        return tuple(self.fsdp._orig_size)

    @property
    def sharded_dim(self) -> int:
        """The dim of `shape` that is cut into shards; 0 unless a shard_placement_fn chose one."""
        return int(self.fsdp.fsdp_placement.dim)

    @property
    def padded_numel(self) -> int:
        """Elements of one shard with FSDP2's padding: the same on every rank of the group."""
        return int(self.fsdp.padded_sharded_param_size.numel())

    def as_gradient(self, local: torch.Tensor) -> DTensor:
        """`local`, of the shape of this rank's shard, as a gradient of the parameter; no copy."""
        gradient: DTensor = self.fsdp.to_sharded_dtensor(local)
        return gradient

    def on_arrival(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever FSDP2 has added a reduced gradient to `.grad`; returns the undoing."""
        parameter: Any = self.parameter  # torch gives the method no types
        hook = parameter.register_post_accumulate_grad_hook(lambda _: call())
        remove: Callable[[], None] = hook.remove
        return remove

    def has_unreduced_gradient(self) -> bool:
        """Whether a backward left a gradient that FSDP2 has not reduced (its sync was off)."""
        unsharded = getattr(self.fsdp, "_unsharded_param", None)
        return self.fsdp.unsharded_accumulated_grad is not None or (
            unsharded is not None and unsharded.grad is not None
        )

    def fill_unreduced_gradient(self) -> None:
        """Zeros, if a backward has left no gradient where it could have."""
        unsharded = getattr(self.fsdp, "_unsharded_param", None)
        if unsharded is not None and unsharded.requires_grad and not self.has_unreduced_gradient():
            unsharded.grad = torch.zeros_like(unsharded, requires_grad=False)

    def drop_unreduced_gradient(self) -> None:
        """Forget such a gradient: zero_grad() reaches only the parameters the module shows."""
        self.fsdp.unsharded_accumulated_grad = None
        if getattr(self.fsdp, "_unsharded_param", None) is not None:
            self.fsdp._unsharded_param.grad = None
