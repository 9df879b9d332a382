"""DeepSpeed's ZeRO-3 as its documentation sets it up, in an environment of its own.

Twice: with its defaults it keeps parameters that are used again soon and so skips gathers in the
backward, at the price of memory; with `stage3_max_reuse_distance = 0` it gathers in forward and
backward as FSDP2 with reshard_after_forward does, like for like.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks at it when it is imported

import deepspeed
import torch.distributed as dist

from benchmarks.bound import bound_of_stages
from benchmarks.phases import Phases
from benchmarks.workload import Linears
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.unit import Unit

# What is not written here is DeepSpeed's default, for stage 3 what its documentation recommends.
_ZERO = "zero_optimization"
_LIKE_FOR_LIKE = {
    "stage3_max_reuse_distance": 0,
    # The prefetch keeps what it sees coming within 5e7 elements, more than the whole model here.
    "stage3_max_live_parameters": 0,
}


class Training:
    """A DeepSpeed engine with a model of its own. Building it and each step are collective."""

    def __init__(self, name: str, workload: Linears) -> None:
        reuse = _LIKE_FOR_LIKE if name == "deepspeed-zero3-reuse0" else {}
        self.configuration: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "gradient_accumulation_steps": workload.micro_steps,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            _ZERO: {"stage": 3, **reuse},
        }
        self._workload = workload
        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = workload.model()
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model), config=dict(self.configuration)
        )
        self._batches = list(workload.batches(dist.get_rank()))

    def bound_of_stages(self) -> dict[str, int]:
        """The least that a step must send between nodes with this sharding."""
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        unit = Unit(
            name="layer",
            shapes=((self._workload.dim, self._workload.dim),),
            shard=GroupShape(dist.get_world_size() // per_node, per_node, 1),
            replicate=GroupShape(1, 1, dist.get_world_size()),
            count=self._workload.num_layers,
            gathers=2 if "stage3_max_reuse_distance" in self.configuration[_ZERO] else 1,
        )
        return bound_of_stages([unit], micro_steps=self._workload.micro_steps)

    def step(self, phases: Phases) -> float:
        """One optimizer step; the gradient norm before clipping."""
        for batch in self._batches:
            phases.begin("forward")
            # The engine divides by gradient_accumulation_steps itself.
            loss = self._workload.loss(self._engine, batch) * self._workload.micro_steps
            phases.begin("backward")
            self._engine.backward(loss)
            phases.begin("boundary")
            self._engine.step()
        phases.begin("before")
        return float(self._engine.get_global_grad_norm())

    def count_step(self, phases: Phases) -> None:
        """One step, counted by phase: gathers and reductions of the backward cannot be parted."""
        phases.counting = True
        try:
            self.step(phases)
        finally:
            phases.counting = False
