"""What torchtitan's chunked loss does to the unit of norm and lm_head, and what that sends.

The loss runs lm_head slice by slice, with the unit's flags switched by hand, and reshards it before
the norm's backward. So the unit is gathered once more than others are, and lm_head is reduced in a
message of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper

from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.plan.unit import Unit as Planned
from mics_dtensor.upstream import Unit, reduce_alone


class HeadUnit:
    """The FSDP unit that holds lm_head. One that exists is switched by the loss."""

    def __init__(self, unit: Unit, lm_head: FSDPModule, weights: set[int]) -> None:
        self.unit, self.lm_head, self._weights = unit, lm_head, weights
        self.reshards_after_forward = unit.reshards_after_forward
        # Of every rank that has a loss: no zeros for lm_head beside the norm's gradient. A tied
        # weight has one there too.
        module: object = lm_head
        own = [param for param in unit.params if param.only_module is module]
        reduce_alone(unit, own)
        self._own = {id(param.fsdp) for param in own}

    @classmethod
    def of(cls, loss: BaseLoss, units: list[Unit]) -> HeadUnit | None:
        """The unit that `loss` switches, if it is a chunked loss and lm_head is sharded here."""
        lm_head: nn.Module | None = getattr(loss, "lm_head", None)
        if not isinstance(loss, ChunkedLossWrapper) or lm_head is None:
            return None
        weights = {id(parameter) for parameter in lm_head.parameters()}
        holds = (u for u in units if any(id(p.parameter) in weights for p in u.params))
        unit = next(holds, None)
        if unit is None or not isinstance(lm_head, FSDPModule):
            return None
        return cls(unit, lm_head, weights)

    def restore(self) -> None:
        """Undo what the loss leaves behind: it sets the flag to True, whatever it was.

        Without this the largest unit of the model is gathered three times a micro-step, not twice.
        """
        self.lm_head.set_reshard_after_forward(self.reshards_after_forward, recurse=False)

    def explained(self, told: Comparison) -> Comparison:
        """`told`, with what the loss makes of this unit; plain FSDP would have the same loss."""
        units = (self._explained(u) if u.name == self.unit.name else u for u in told.units)
        return replace(told, units=tuple(units))

    def _explained(self, told: Planned) -> Planned:
        """Gathered once more, and lm_head reduced by itself; a tied table with the rest again."""
        trained = [param for param in self.unit.params if param.parameter.requires_grad]
        each = list(zip((id(param.fsdp) for param in trained), told.shapes, strict=True))
        of_head = self._own or {id(p.fsdp) for p in trained if id(p.parameter) in self._weights}
        its = tuple(shape for param, shape in each if param in of_head)
        rest = tuple(shape for param, shape in each if param not in self._own)
        messages = tuple(shapes for shapes in (its, rest) if shapes)
        return replace(told, gathers=told.gathers + 1, reduced=messages)
