"""torchtitan's validator with a batch and a sequence of its own, as torchtitan 0.2 had them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.validate import Validator


class OwnSizeValidator(Validator):
    """torchtitan 0.3.0 validates with the training's batch and sequence; this one with its own."""

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
