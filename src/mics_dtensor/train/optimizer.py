"""torchtitan's container of optimizers, their states sharded over the replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.train.sliced import refuse_kinds


class SlicedOptimizers(OptimizersContainer):
    """Each optimizer of the container is a ReplicaShardedOptimizer; the rest is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's. Refuses what slices of states cannot be, or would ignore in silence."""

        master_weights: Literal["fp32", "sharded"] = "fp32"
        overlap_update: bool = False

        def __post_init__(self) -> None:
            refuse_kinds(self.implementation, (g.optimizer_name for g in self.param_groups))

    def __init__(self, config: Config, **options: Any) -> None:
        self._own: dict[str, Any] = {
            "master_weights": config.master_weights,
            "overlap_update": config.overlap_update,
        }
        super().__init__(config, **options)

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Optimizer]:
        return partial(self._sliced, OptimizersContainer._resolve_optimizer_factory(name))

    def _sliced(
        self, optimizer_cls: Any, groups: list[dict[str, Any]], **options: Any
    ) -> Optimizer:
        return ReplicaShardedOptimizer(
            self.model_parts, optimizer_cls, param_groups=groups, **self._own, **options
        )
