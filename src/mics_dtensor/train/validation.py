"""torchtitan's validator with a batch and a sequence of its own, as torchtitan 0.2 had them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.validate import Validator
from torchtitan.tools import utils

from mics_dtensor.errors import ConfigError

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class OwnSizeValidator(Validator):
    """torchtitan 0.3.0 validates with the training's batch and sequence; this one with its own.

    With `steps = -1` it ends with the first rank whose data end: gathers are collective, and
    torchtitan's own would wait for ever where ranks hold unequal numbers of batches.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Sequences of a rank at a time, and tokens of a sequence.

        Not `local_batch_size` and `seq_len`: torchtitan hands the training's to `build` by those
        names, and refuses a name that is a field too.
        """

        own_local_batch_size: int
        own_seq_len: int

    def __init__(self, config: Config, **built: Any) -> None:
        built |= {"local_batch_size": config.own_local_batch_size, "seq_len": config.own_seq_len}
        super().__init__(config, **built)
        self.dl_config: Any
        if config.steps == -1:
            self.dl_config = UntilOneEnds(config.dataloader)


class UntilOneEnds:
    """Builds a loader that ends on every rank with the first that ends on one. Collective."""

    def __init__(self, config: Any) -> None:  # of a HuggingFaceTextDataLoader
        self._config = config

    def build(self, **built: Any) -> Iterator[Batch]:
        """Batches, each of which every rank has. Raises ConfigError if there is none."""
        loader = iter(replace(self._config, infinite=False).build(**built))
        num_batches = 0
        while True:
            batch = next(loader, None)
            everyone_has = torch.tensor(int(batch is not None), device=utils.device_type)
            dist.all_reduce(everyone_has, op=dist.ReduceOp.MIN)
            if batch is None or not everyone_has.item():
                break
            num_batches += 1
            yield batch
        if num_batches == 0:
            raise ConfigError(
                "the validation data do not hold one batch for each data-parallel rank, of "
                f"{built['local_batch_size']} sequences of {built['seq_len']} tokens: give more in "
                "validation.dataset_path, or lower validation.local_batch_size or seq_len"
            )
