"""The gradient of one parameter on its way through an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from mics_dtensor.slices import Slice
from mics_dtensor.upstream import ShardedParameter, local_of


@dataclass(eq=False)
class Gradient:
    """Sums over micro-steps; leaves for the second hop; comes back. Local shards throughout.

    The sum is in `.grad` where FSDP2 puts it, or, for parameters narrower than fp32, in `total`: in
    bf16, 256 and eight times 1 would make 256. In static mode `.grad` is written in place and never
    bound anew, for CUDA graphs hold its address.
    """

    param: ShardedParameter
    static: bool = False
    slice: Slice | None = None  # where this replica gets only its own part of the sum
    total: torch.Tensor | None = None  # fp32; one shard more in memory
    aside: DTensor | None = None  # found before: already reduced, added at the end
    arrivals: int = 0  # in this micro-step; every backward that reduces is one
    expected: int = 1  # those of the micro-step before
    is_used: bool = False  # on this rank, since it was last taken; else what arrives is filler
    is_filler: bool = False  # what arrives next on this rank: zeros beside the unit's other values

    @property
    def is_narrow(self) -> bool:
        """Whether the parameter's dtype is too narrow for a sum over micro-steps."""
        return self.param.parameter.dtype in (torch.bfloat16, torch.float16)

    @property
    def is_present(self) -> bool:
        """Whether this rank had a part in the sum that has not left."""
        return self.is_used

    def set_aside(self, *, static_scale: float) -> None:
        """What is there before the first micro-step counts as reduced, and is not reduced again."""
        parameter = self.param.parameter
        if self.static and parameter.grad is not None:
            local_of(parameter.grad).mul_(static_scale)  # the hop will undo it
            self.is_used = True  # the replay of a graph would not tell us
        elif not self.static:
            self.aside = cast("DTensor | None", parameter.grad)
            parameter.grad = None

    def foresee(self, *, counts_unused: bool) -> None:
        """Before FSDP2 reduces the unit: has a backward of this rank used the parameter?"""
        if self.slice is not None:
            self.slice.accept_gradient_dtype()
        used = counts_unused or self.param.has_unreduced_gradient()
        self.is_used, self.is_filler = self.is_used or used, not used

    def arrive(self) -> None:
        """After FSDP2 has added a reduced gradient to `.grad` (a post-accumulate-grad hook)."""
        self.arrivals += 1
        self.is_used |= not self.is_filler  # also by a backward that FSDP2 had no part in
        self.is_filler = False
        if self.is_narrow and (gradient := self.param.parameter.grad) is not None:
            local = local_of(gradient)
            self.total = local.float() if self.total is None else self.total.add_(local)
            self.param.parameter.grad = None

    def take(self) -> torch.Tensor | None:
        """The partial sum, out of `.grad`: what arrives from now on is a delta of its own."""
        total, gradient = self.total, self.param.parameter.grad
        self.is_used = False
        if not self.static:
            self.total = self.param.parameter.grad = None
        if total is None or gradient is None:
            return total if gradient is None else local_of(gradient)
        return total.add_(local_of(gradient))  # a `.grad` that somebody wrote beside the sum

    def put(self, reduced: torch.Tensor) -> None:
        """Store what the second hop brought (1-D), beside what was set aside or put before."""
        parameter, local = self.param.parameter, self.param.local
        reduced = reduced.view(local.shape).to(local.device)
        there = self.aside if self.aside is not None else parameter.grad
        if self.slice is not None and there is not None:
            there = self.slice.own(cast("DTensor", there))
        if there is None and self.slice is not None:
            parameter.grad = self.slice.as_gradient(reduced)
        elif there is None:
            parameter.grad = self.param.as_gradient(reduced.to(local.dtype))
        elif self.static:
            if local_of(there).data_ptr() != reduced.data_ptr():  # it was not sent as it lay
                local_of(there).copy_(reduced)
        else:
            local_of(there).add_(reduced)
            parameter.grad, self.aside = there, None

    def settle(self, *, present: bool) -> None:
        """At the end: where no rank used the parameter, only what was set aside is left."""
        if not present:
            self.param.parameter.grad = None
        self.total = None
        if self.aside is not None:
            self.param.parameter.grad, self.aside = self.aside, None

    def abandon(self) -> None:
        """After an exception: the step is lost; `.grad` is what it was before (static: zero)."""
        self.total, self.is_used, self.is_filler = None, False, False
        if self.static and self.param.parameter.grad is not None:
            local_of(self.param.parameter.grad).zero_()
        else:
            self.param.parameter.grad, self.aside = self.aside, None
