"""How many slices the loss is computed in. Pure."""

from __future__ import annotations

from mics_dtensor.train.config import RunConfig


def num_loss_chunks(config: RunConfig) -> int:
    """Slices in which the loss is computed: as written, else torchtitan's 8 where that can be."""
    degrees = config.parallelism
    part = config.training.seq_len
    part //= degrees.context_parallel_degree * degrees.tensor_parallel_degree
    return config.loss.num_chunks or (8 if part % 8 == 0 else 1)
