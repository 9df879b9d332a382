"""torchtitan's validator with a batch and a sequence of its own, as torchtitan 0.2 had them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.validate import Validator


class OwnSizeValidator(Validator):
    """torchtitan 0.3.0 validates with the training's batch and sequence; this one with its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Sequences of a rank at a time, and tokens of a sequence."""

        local_batch_size: int
        seq_len: int

    def __init__(self, config: Config, **built: Any) -> None:
        built |= {"local_batch_size": config.local_batch_size, "seq_len": config.seq_len}
        super().__init__(config, **built)
