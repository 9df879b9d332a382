"""Sequences of a run, of training and of validation, and the parts that they are cut into. Pure."""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.plan.tensor_parallel import uneven_length
from mics_dtensor.train.config import RunConfig

MASK_BLOCK = 128
"""Tokens: torch makes the mask of a part of a sequence in such blocks (_create_cp_block_mask)."""


def refuse_lengths(config: RunConfig, *, in_blocks: bool) -> None:
    """Raises ConfigError for a sequence that cannot be cut over the ranks that share it.

    `in_blocks`: whether the masks of the model's attention are made of blocks, as FlexAttention's.
    """
    degrees = config.parallelism
    tp, cp = degrees.tensor_parallel_degree, degrees.context_parallel_degree
    unit = (tp if degrees.enable_sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    why = f"tensor_parallel_degree {tp} and context_parallel_degree {cp}"
    if cp > 1 and in_blocks:
        unit = max(unit, MASK_BLOCK * cp)
        why = f"context_parallel_degree {cp}, whose masks are made of blocks of {MASK_BLOCK} tokens"
    for table, length in lengths(config).items():
        if (uneven := uneven_length(length, unit, why, table=table)) is not None:
            raise ConfigError(uneven)


def lengths(config: RunConfig) -> dict[str, int]:
    """Tokens of a sequence by the table that says so; of validation where it is enabled."""
    found = {"training": config.training.seq_len}
    return found | ({"validation": config.validation.seq_len} if config.validation.enable else {})
