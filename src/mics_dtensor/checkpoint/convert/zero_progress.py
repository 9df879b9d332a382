"""How far a DeepSpeed run had come, and what of its state has no place elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OF_DEEPSPEED = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
}
"""Keys of a model file that are read, or that say nothing once the ranks are put together."""

WITHOUT_COUNTERPART = {
    "lr_scheduler": "a schedule comes from the configuration; the steps it made are carried over",
    "data_sampler": "where a curriculum stood; data loaders are not DeepSpeed's",
    "random_ltd": "random layer token drop has no counterpart",
}


@dataclass(frozen=True)
class Progress:
    """Optimizer steps, and how many of them fp16 overflows skipped; samples over all ranks."""

    step: int
    skipped_steps: int
    samples: int
    data_parallel_size: int

    @classmethod
    def of(cls, model: Mapping[str, Any], num_files: int) -> Progress:
        """From a model file."""
        return cls(
            step=int(model.get("global_steps") or 0),
            skipped_steps=int(model.get("skipped_steps") or 0),
            samples=int(model.get("global_samples") or 0),
            data_parallel_size=int(model.get("dp_world_size") or num_files),
        )

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning-rate schedule: a skipped step does not move it."""
        return self.step - self.skipped_steps


def left_behind(model: Mapping[str, Any], states: Mapping[str, Any]) -> Iterator[str]:
    """What is not carried over of the state around the tensors, each with its reason."""
    for key, why in WITHOUT_COUNTERPART.items():
        if model.get(key):
            yield f"{key}: {why}"
    for key in model:
        if key not in OF_DEEPSPEED and key not in WITHOUT_COUNTERPART:
            yield f"{key}: of the script's own client_state; load it with torch.load if you need it"
    if states.get("dynamic_loss_scale"):
        yield "loss_scaler: the scale of fp16; a scaler starts anew, bf16 has none"
