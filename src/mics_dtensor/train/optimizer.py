"""torchtitan's container of optimizers, their states sharded over the replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.train.param_groups import first_matches
from mics_dtensor.train.sliced import refuse_kinds


class GroupedOptimizers(OptimizersContainer):
    """torchtitan's. Patterns see the names that checkpoints have, and a stage may have none.

    torchtitan's own see those of wrapped blocks with the wrapper's name in the middle, and refuse a
    pattern that finds nothing in a stage of a pipeline.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's."""

    @staticmethod
    def _build_param_groups(model: Any, param_group_configs: list[Any], impl_kwargs: Any) -> Any:
        named = [(canonical_fqn(name), its) for name, its in model.named_parameters()]
        names = (name for name, its in named if its.requires_grad)
        used = first_matches([its.pattern for its in param_group_configs], names)
        return OptimizersContainer._build_param_groups(
            cast("torch.nn.Module", SimpleNamespace(named_parameters=lambda: named)),
            [param_group_configs[number] for number in sorted(used)],
            impl_kwargs,
        )


class SlicedOptimizers(GroupedOptimizers):
    """Each optimizer of the container is a ReplicaShardedOptimizer; the rest is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedOptimizers.Config):
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
