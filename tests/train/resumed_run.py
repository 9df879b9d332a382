"""A run of a few steps that saves where it ends, for laws of what goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from harness.checkpointed import stored
from harness.ranks import run_on_ranks
from train.small_run import MICS, configured, entries_but_read_ahead, ours

from mics_dtensor.train.config import Mics

ENABLED = (
    "--checkpoint.enable=true",
    "--checkpoint.interval=2",
    "--checkpoint.last_save_model_only=false",
    "--training.global_batch_size=8",
    "--lr_scheduler.decay_ratio=0.5",
)


def trained(
    folder: Path,
    *overrides: str,
    steps: int,
    ranks: int = 4,
    mics: Mics = MICS,
    saves_last: bool = True,
) -> dict[str, list[float]]:
    """Of each step its loss, norm and learning rate; all of the last one is saved."""
    told = folder / "told.json"

    def body() -> None:
        config, layout = configured(folder, *ENABLED, *overrides)
        trainer = ours(config, layout, mics)
        found: dict[str, list[float]] = {}
        log = trainer.metrics_processor.log

        def recorded(step: int, loss: float, max_loss: float, norm: float, **more: object) -> None:
            rate = trainer.lr_schedulers.schedulers[0].get_last_lr()[0]
            found[str(step)] = [loss, norm, rate]
            log(step, loss, max_loss, norm, **more)

        trainer.metrics_processor.log = recorded
        trainer.should_continue_training = lambda: trainer.step < steps
        trainer.train()
        found["tokens"] = [trainer.ntokens_seen * trainer.dataloader.dp_world_size]
        assert not saves_last or trainer.checkpointer.save_now(steps)
        trainer.close()
        if dist.get_rank() == 0:
            told.write_text(json.dumps(found))

    run_on_ranks(ranks, body, timeout_s=100)
    found: dict[str, list[float]] = json.loads(told.read_text())
    return found


def at_the_end(folder: Path, step: int) -> dict[str, str]:
    """Parameters, states, schedule, position and counts of a run, to the last byte."""
    return entries_but_read_ahead(folder / "checkpoint" / f"step-{step}")


def pass_on(
    folder: Path,
    *overrides: str,
    step: int,
    ranks: int,
    saved: Mapping[str, torch.Tensor],
    position: object = None,
) -> None:
    """Resume the step before on `ranks` and save it as `step`: every value is that of `saved`."""

    def body() -> None:
        trainer = ours(*configured(folder, *ENABLED, *overrides))
        assert trainer.checkpointer.load(-1)
        assert trainer.step == step - 1
        assert position is None or trainer.dataloader.position == position
        trainer.step = step
        assert trainer.checkpointer.save_now(step)
        trainer.close()

    run_on_ranks(ranks, body, timeout_s=100)
    its = stored(folder / "checkpoint" / f"step-{step}")
    assert its.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(its[name], value), (step, name)
