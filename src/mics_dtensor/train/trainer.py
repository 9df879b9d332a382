"""torchtitan's trainer with the two-hop step: the loop stays torchtitan's own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from mics_dtensor import (
    Layout,
    apply_mics,
    clip_grad_norm_,
    explain,
    gradient_accumulation,
    synchronize_replicas,
)
from mics_dtensor.errors import ConfigError
from mics_dtensor.train import device_shim, metrics

logger = logging.getLogger(__name__)

Batches = Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]


class MicsTrainer(Trainer):
    """Trains `config` on the partition groups of `layout`. Building one is collective.

    `device_shim.use_device` comes first. Every rank of the world gives the same arguments.
    """

    def __init__(self, config: Trainer.Config, *, layout: Layout, run_id: str) -> None:
        refuse_cuda_graphs(config, layout)
        self.layout = layout
        config = dataclasses.replace(config, metrics=metrics.config_of(config.metrics))
        super().__init__(config)
        audit_meshes(self.parallel_dims, layout)
        refuse_tokenizer(self.tokenizer, vocab_size=self.model_config.vocab_size)
        device_shim.use_sums_of_gloo(self.model_parts)
        apply_mics(self.model_parts, topology=layout.topology)
        for part in self.model_parts:
            synchronize_replicas(part)
        self.explanation = explain(
            self.model_parts, num_micro_steps=self.gradient_accumulation_steps
        )
        self.metrics_processor.record_to(
            metrics.Record(
                run_id=run_id,
                traffic=self.explanation,
                total_steps=config.training.steps,
                dump_folder=config.dump_folder,
            )
        )

    def init_distributed(self) -> ParallelDims:
        """The meshes of torchtitan; the process group where the program has not made it yet."""
        if not dist.is_initialized():
            return super().init_distributed()
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    def train_step(self, data_iterator: Batches) -> None:
        """One optimizer step: the second hop is over when torchtitan asks for the norm."""
        self._micro_steps_done = 0
        with ExitStack() as self._accumulation, _our_clip():
            super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """One micro-step. torchtitan does not say which one it is, so they are counted here."""
        if self._micro_steps_done == 0:
            # Not before: a step for which the data run out never begins.
            self._step = self._accumulation.enter_context(
                gradient_accumulation(
                    self.model_parts, num_micro_steps=self.gradient_accumulation_steps
                )
            )
        with self._step.micro_step():
            loss = super().forward_backward_step(**batch)
        self._micro_steps_done += 1
        if self._micro_steps_done == self.gradient_accumulation_steps:
            self._accumulation.close()
        return loss
