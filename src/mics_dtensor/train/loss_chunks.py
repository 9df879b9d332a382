"""How many slices the loss is computed in. Pure."""

from __future__ import annotations

import math

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import value_at
from mics_dtensor.train.lengths import lengths


def num_loss_chunks(config: RunConfig) -> int:
    """Slices in which the loss is computed: as written, else torchtitan's 8 where that can be."""
    degrees = config.parallelism
    part = config.training.seq_len
    part //= degrees.context_parallel_degree * degrees.tensor_parallel_degree
    return config.loss.num_chunks or (8 if part % 8 == 0 else 1)


def refuse_chunks(config: RunConfig) -> None:
    """Raises ConfigError where the slices do not divide a rank's part of a sequence.

    Validation has the loss of the training, and so its number of slices.
    """
    cp, chunks = config.parallelism.context_parallel_degree, num_loss_chunks(config)
    parts = {table: length // cp for table, length in lengths(config).items()}
    for table, part in parts.items():
        if part % chunks:
            said = "loss.num_chunks" if config.loss.num_chunks else "loss.num_chunks, not given,"
            good = max(1, part // chunks) * chunks * cp
            raise ConfigError(
                f"{said} is {chunks}, which does not divide the {part} tokens that a rank has of "
                f"{table}.seq_len {value_at(config, table).seq_len}; write {table}.seq_len = "
                f"{good}, or loss.num_chunks = {math.gcd(chunks, *parts.values())}"
            )
