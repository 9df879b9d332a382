"""MiCS for the models and the Trainer of transformers (5.24), and for trainers built on it (TRL).

A model sharded here says of itself what one loaded by `from_pretrained(distributed_config=...)`
says, so that transformers leaves its sharding alone and gathers it in `save_pretrained`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, Trainer
from transformers.distributed import DistributedConfig

from mics_dtensor.clip import clip_grad_norm_
from mics_dtensor.errors import ConfigError
from mics_dtensor.integrations.micro_steps import BoundaryOptions, MicroSteps


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the model itself says must not be split: its transformer blocks.

    The outermost only. Raises ConfigError where the model names none, or none that it has.
    """
    names = set(model._no_split_modules or ())
    found: list[nn.Module] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__ in names and not any(name.startswith(its) for its in inside):
            found.append(module)
            inside.append(f"{name}.")
    if not found:
        raise ConfigError(
            f"{type(model).__name__} names {sorted(names)} as _no_split_modules, and has no such "
            "module: call fully_shard on its blocks yourself"
        )
    return found


def shard_pretrained(model: PreTrainedModel, *, mesh: DeviceMesh, **policies: Any) -> None:
    """fully_shard for a transformers model: one unit a block, one for the embeddings, the rest.

    `mesh` has the axes (replicate, shard); `policies` go to every fully_shard (mp_policy, ...).
    The head stays with the root, where fused losses read its weight, and so do embeddings that are
    tied to it: in one unit. Switch activation checkpointing on before. From then on
    `save_pretrained`, called on every rank, writes whole weights once.
    """
    if mesh.mesh_dim_names != ("replicate", "shard"):
        raise ConfigError(
            f'the axes of the mesh are {mesh.mesh_dim_names}: pass mesh["replicate", "shard"]'
        )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **policies)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        fully_shard(embedding, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    replicas, shards = mesh.shape
    model.config.distributed_config = DistributedConfig(
        dp_replicate_size=replicas, fsdp_size=shards
    )
    model._is_distributed_loading_by_transformers = True
    model._is_fsdp_managed_module = True


class MicsTrainer(Trainer):
    """transformers' Trainer, with `gradient_accumulation_steps` as our micro-steps.

    The model is sharded (shard_pretrained), and apply_mics and synchronize_replicas have been
    called. It goes before other trainers too:

        class MicsSFTTrainer(MicsTrainer, SFTTrainer): ...

    transformers refuses `save_strategy` for such models unless with `save_only_model=True`.
    Every rank runs the trainer.
    """

    boundary: BoundaryOptions | None = None  # set it on a subclass

    def train(self, *arguments: Any, **options: Any) -> Any:
        """The trainer's, with nothing left open where it stops in the middle of a step."""
        self._micro_steps = MicroSteps(self.model, self.boundary)
        try:
            return super().train(*arguments, **options)
        finally:
            self._micro_steps.abandon()

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """One micro-step: forward and backward, and after the last one the second hop."""
        with self._micro_steps.micro_step(last=self.accelerator.sync_gradients):
            loss: torch.Tensor = super().training_step(*arguments, **options)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        return nullcontext()  # transformers' own way to leave the replicas out of a micro-step
