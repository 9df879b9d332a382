"""Activation checkpointing of every n-th block: a number in selective_ac_option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC


class EveryNthBlockAC(FullAC):
    """Recompute blocks n, 2n, ... (counted from 1) of a model whole, and leave the others.

    torchtitan 0.3.0 has no such policy; 0.2.2 counted as this does, but over all models of a
    process, so that under pipeline parallelism its second stage could begin in the middle.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """Every how many blocks; 1 is FullAC."""

        every: int = 2

    def apply(self, model: nn.Module) -> None:
        """Wrap the blocks of `model.layers`, in place."""
        self._seen = 0
        super().apply(model)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        self._seen += 1
        if self._seen % cast("EveryNthBlockAC.Config", self.config).every:
            return module
        return cast("nn.Module", super()._wrap_block(module, base_fqn=base_fqn))
