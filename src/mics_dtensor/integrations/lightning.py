"""MiCS in Lightning's Trainer (lightning 2.6): a strategy.

`accumulate_grad_batches` becomes micro-steps, `gradient_clip_val` goes to our clip_grad_norm_.
In Fabric the library is called as in plain PyTorch: examples/integrations/with_fabric.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from mics_dtensor.apply import apply_mics
from mics_dtensor.clip import clip_grad_norm_
from mics_dtensor.errors import ConfigError
from mics_dtensor.integrations.micro_steps import BoundaryOptions, MicroSteps
from mics_dtensor.layout import Layout
from mics_dtensor.mesh import init_mesh
from mics_dtensor.replicas import synchronize_replicas
from mics_dtensor.topology import Topology


class MicsStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with partition groups, for a module that shards itself.

        trainer = Trainer(strategy=MicsStrategy(partition_size=8), accumulate_grad_batches=4)

    `configure_model` shards over `self.trainer.strategy.mics_mesh["replicate", "shard"]`; the
    strategy then installs the hierarchical collectives, makes replicas equal and runs the second
    hop. `topology` is detected from the hosts where it is not given. Gradients are zeroed before
    the first forward of an optimizer step, where Lightning does it after. Manual optimization is
    plain HSDP unless the module opens gradient_accumulation itself. Other arguments are those of
    ModelParallelStrategy. Raises ConfigError for what a Layout refuses, and for LBFGS.
    """

    def __init__(
        self,
        *,
        partition_size: int,
        tensor_parallel_size: int = 1,
        topology: Topology | None = None,
        boundary: BoundaryOptions | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._partition_size = partition_size
        self._tensor_parallel = tensor_parallel_size
        self._topology = topology
        self._boundary = boundary
        self._mics_mesh: DeviceMesh | None = None
        self._micro_steps: MicroSteps | None = None

    @property
    def mics_mesh(self) -> DeviceMesh:
        """Axes (replicate, shard), or (replicate, shard, tp); from `configure_model` on."""
        if self._mics_mesh is None:
            raise ConfigError(
                "the mesh exists once the ranks run: use it in configure_model(), not in __init__()"
            )
        return self._mics_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Every rank of the mesh has data of its own, but those of one tensor-parallel group."""
        rank, size = self.global_rank, self._tensor_parallel
        return {"num_replicas": self.world_size // size, "rank": rank // size}

    def setup_environment(self) -> None:
        """As Lightning does, and then the mesh. Collective."""
        super().setup_environment()
        layout = Layout(
            topology=self._topology or Topology.detect(),
            partition_size=self._partition_size,
            tensor_parallel_size=self._tensor_parallel,
        )
        self._topology = layout.topology
        self._mics_mesh = init_mesh(layout, device_type=self.root_device.type)

    def setup(self, trainer: Trainer) -> None:
        """As Lightning does, with the parameters where they will be; then ours. Collective."""
        super().setup(trainer)
        apply_mics(self.model, topology=self._topology or Topology.detect())
        synchronize_replicas(self.model)
        self._micro_steps = MicroSteps(self.model, self._boundary)
        self.precision_plugin.clip_grad_by_norm = self._clip

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A batch that only accumulates: Lightning calls it around forward and backward."""
        with self._micro_step(last=False):
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **arguments: Any,
    ) -> Any:
        """The batch that steps: forward and backward are in `closure`, and the second hop follows.

        The closure runs before the optimizer is called, which refuses partial sums.
        """
        if not (model or self.lightning_module).automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **arguments)
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS runs its closure several times a step, and the second hop runs once: take "
                "an optimizer that needs the gradient once, or manual optimization"
            )
        with self._micro_step(last=True):
            result = closure()
        return super().optimizer_step(optimizer, lambda: result, model, **arguments)

    def on_exception(self, exception: BaseException) -> None:
        """An optimizer step that had begun is abandoned."""
        if self._micro_steps is not None:
            self._micro_steps.abandon(exception)
        super().on_exception(exception)

    def on_train_end(self) -> None:
        """So is one that a stop has cut short."""
        if self._micro_steps is not None:
            self._micro_steps.abandon()
        super().on_train_end()

    @contextmanager
    def _micro_step(self, *, last: bool) -> Iterator[None]:
        if self._micro_steps is None:
            raise ConfigError("a batch before Trainer.fit() has set the strategy up")
        if not self._micro_steps.is_open:  # what is there at entry would count as synchronised
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        with self._micro_steps.micro_step(last=last):
            yield

    def _clip(self, optimizer: Optimizer, max_norm: float) -> None:
        parameters: list[torch.Tensor] = list(self.precision_plugin.main_params(optimizer))
        clip_grad_norm_(parameters, max_norm)
