"""Activation checkpointing of every n-th block: a number in selective_ac_option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.module import Module

from mics_dtensor.upstream.wrapper import CheckpointWrapper


class CheckpointedBlock(CheckpointWrapper, Module):
    """A wrapped block that is initialised in its turn.

    torchtitan 0.3.0 initialises blocks that it finds inside other wrappers after all that are not
    wrapped. Where only some are, the random numbers would go to other blocks than without
    checkpointing, and the first loss would differ.
    """

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """The states of the block inside."""
        for block in self.children():
            cast("Module", block).init_states(buffer_device=buffer_device)


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
        del base_fqn
        self._seen += 1
        if self._seen % cast("EveryNthBlockAC.Config", self.config).every:
            return module
        return CheckpointedBlock(
            module,
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )
