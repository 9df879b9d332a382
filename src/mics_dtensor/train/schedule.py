"""The schedule of the learning rate, and how long it lasts. Pure.

torchtitan's formula (components/optimizer/lr_scheduler.py) does not stop at the end of its decay:
a linear or square-root one goes on below its floor, and soon below 0, where a step goes uphill; a
cosine climbs again; without steps of decay there is no rate at all.
"""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig


def refuse_short_schedule(config: RunConfig) -> None:
    """Raises ConfigError for a schedule that ends before the training does."""
    written, steps = config.lr_scheduler, config.training.steps
    length = steps if written.total_steps is None else written.total_steps
    if length >= steps:
        return
    decay = _decay_steps(config, length)
    if decay and written.min_lr_factor == 1:  # the decay goes nowhere
        return
    if not decay:
        after = "torchtitan has no learning rate for the steps after it"
    elif written.decay_type == "cosine":
        after = "the cosine would climb again after it"
    else:
        after = (
            f"the {written.decay_type} decay would go on after it, below min_lr_factor = "
            f"{written.min_lr_factor} and in the end below 0"
        )
    raise ConfigError(
        f"lr_scheduler.total_steps = {length} ends before training.steps = {steps}, and {after}; "
        f"write total_steps = {steps} or more, or leave it out: the schedule is then as long as "
        "the training"
    )


def _decay_steps(config: RunConfig, length: int) -> int:
    """Steps of decay, as torchtitan reckons them."""
    warmup, share = min(config.lr_scheduler.warmup_steps, length), config.lr_scheduler.decay_ratio
    rest = length - warmup
    return rest if share is None else min(rest, round(length * share))
