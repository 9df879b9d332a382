"""MiCS in Accelerate (1.15): its Accelerator, with our micro-steps in place of `no_sync`.

`no_sync` of FSDP2 keeps the whole unsharded gradient of every unit on every rank between
micro-steps; ours keeps the shard (benchmarks/held_gradients.py counts both).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mics_dtensor.apply import apply_mics
from mics_dtensor.clip import clip_grad_norm_
from mics_dtensor.errors import ConfigError
from mics_dtensor.integrations.micro_steps import BoundaryOptions, MicroSteps
from mics_dtensor.layout import Layout
from mics_dtensor.replicas import synchronize_replicas
from mics_dtensor.topology import Topology


class MicsAccelerator(Accelerator):
    """Accelerator for a model that `fully_shard` has been applied to; the loop stays as it is.

        accelerator = MicsAccelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(batch)))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # where sync_gradients
                optimizer.step()
                optimizer.zero_grad()

    `prepare` installs the hierarchical collectives and makes replicas equal; `accumulate` runs
    micro-steps; the second hop runs before the first of `clip_grad_norm_`, `optimizer.step` and
    the end of the block. Models that are not sharded take Accelerate's own way. `topology` is
    detected from the hosts where it is not given. Every rank prepares the same models in the same
    order. Other arguments are Accelerator's.
    """

    def __init__(
        self,
        *arguments: Any,
        topology: Topology | None = None,
        boundary: BoundaryOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._topology = topology
        self._boundary = boundary
        self._micro_steps: dict[tuple[nn.Module, ...], MicroSteps] = {}

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Accelerate's, after which every sharded model has the collectives of its groups."""
        prepared = super().prepare(*args, **options)
        for model in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(model, nn.Module) and _is_sharded(model):
                self._topology = self._topology or Topology.detect()
                apply_mics(model, topology=self._topology)
                synchronize_replicas(model)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A sharded model is in its place and reduces its gradients: no DDP around it."""
        if _is_sharded(model):
            device_placement, evaluation_mode = False, True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Accelerate's, whose step comes after the second hop."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        step = prepared.step

        def step_on_whole_gradients(closure: Any = None) -> None:
            self._end_last()
            step(closure)

        prepared.step = step_on_whole_gradients
        return prepared

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-step of `models`. Collective, as gradient_accumulation is."""
        sharded = tuple(model for model in models if _is_sharded(model))
        others = [model for model in models if not _is_sharded(model)]
        with super().accumulate(*others):  # it also counts, and decides `sync_gradients`
            if not sharded:
                yield
                return
            micro_steps = self._micro_steps.setdefault(sharded, MicroSteps(sharded, self._boundary))
            with micro_steps.micro_step(last=self.sync_gradients):
                yield

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Our clip_grad_norm_: the norm of one process, over parameters on any meshes."""
        self._end_last()
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def abandon(self) -> None:
        """Leave an optimizer step whose loop was left before its last micro-step."""
        for micro_steps in self._micro_steps.values():
            micro_steps.abandon()

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's; models are forgotten here too."""
        self.abandon()
        self._micro_steps.clear()
        return super().free_memory(*objects)

    def _end_last(self) -> None:
        if self.sync_gradients:
            for micro_steps in self._micro_steps.values():
                micro_steps.end()


def layout_of(config: ParallelismConfig, *, topology: Topology) -> Layout:
    """The Layout of `ParallelismConfig(dp_replicate_size, dp_shard_size, cp_size, tp_size)`. Pure.

    FSDP2 shards over dp_shard x cp. Raises ConfigError where the sizes do not make up the world,
    where there is DeepSpeed's sequence parallelism, and for what a Layout refuses.
    """
    if config.sp_size > 1:
        raise ConfigError(
            f"sp_size is {config.sp_size}, DeepSpeed's sequence parallelism: leave it at 1, or "
            "use cp_size, whose ranks share the shards of FSDP2"
        )
    if config.total_size != topology.world_size:
        raise ConfigError(
            f"the sizes of {config} multiply to {config.total_size}, and the world has "
            f"{topology.world_size} ranks: choose dp_replicate_size x dp_shard_size x cp_size x "
            "tp_size to be the world"
        )
    return Layout(
        topology=topology,
        partition_size=config.dp_shard_size * config.cp_size,
        tensor_parallel_size=config.tp_size,
    )


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())
