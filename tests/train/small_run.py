"""A run of a few seconds, by our trainer or by torchtitan's own, inside a forked rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness.checkpointed import entries
from harness.ranks import run_on_ranks
from torchtitan.trainer import Trainer

from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.train import device_shim
from mics_dtensor.train.build import trainer_config
from mics_dtensor.train.config import Mics
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load
from mics_dtensor.train.trainer import MicsTrainer, Placement

SMALL = """
[model]
flavor = "debugmodel"
n_layers = 1
hf_assets_path = ""
[training]
dataset = "python_docs"
steps = 20
seq_len = 32
local_batch_size = 1
global_batch_size = 16
mixed_precision_param = "float32"
[mics]
ranks_per_node = 2
partition_size = 2
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[comm]
trace_buf_size = 0
[debug]
seed = 1
"""
# A rounding that sends a token to another expert changes the norm by parts in a thousand. At the
# rate of the small run that happens in step 3; with steps this small two trainers stay together.
SMALL_STEPS = "--optimizer.lr=1e-5"
MICS = Mics()


@dataclass
class Trained:
    """What a run printed, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def configured(folder: Path, *overrides: str) -> tuple[Trainer.Config, Layout]:
    """The small run with `--section.key=value` overrides; every rank of the world calls it."""
    path = folder / "small.toml"
    if dist.get_rank() == 0:
        path.write_text(SMALL)
    dist.barrier()
    dump = f"--job.dump_folder={folder}"
    run, layout = resolve(
        load(["--config-file", str(path), dump, *overrides]),
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
    )
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    device_shim.use_device("cpu")
    return trainer_config(run, device_type="cpu"), layout


def entries_but_read_ahead(path: Path) -> dict[str, str]:
    """Of every value of a checkpoint its hash, but for the tokens that a lane holds in advance.

    torchtitan's data set reads one more document when it is resumed, and yields the same sequences.
    """
    held = {k: v for k, v in entries(path).items() if not k.startswith("dataloader.lane_")}
    assert any(name.startswith("dataloader.sequences") for name in held)
    return held


def ours(config: Trainer.Config, layout: Layout, mics: Mics = MICS) -> MicsTrainer:
    # The Layout is that of one pipeline stage; a stage has whole nodes here.
    nodes = {"ranks_per_node": layout.topology.ranks_per_node}
    topology = Topology.uniform(world_size=dist.get_world_size(), **nodes)
    placement = Placement(layout=layout, topology=topology)
    return MicsTrainer(config, placement=placement, run_id="test", mics=mics)


def torchtitans(config: Trainer.Config, layout: Layout) -> Trainer:  # noqa: ARG001
    """Plain HSDP of torchtitan; only what gloo lacks is worked around."""
    trainer = Trainer(config)
    device_shim.use_sums_of_gloo(trainer.model_parts)
    return trainer


Make = Callable[[Trainer.Config, Layout], Trainer]


def train(make: Make, folder: Path, *over: str) -> Trained:
    """Train the small run and say what came of it."""
    trainer = make(*configured(folder, *over))
    trained, log = Trained(), trainer.metrics_processor.log

    def recorded(step: int, loss: float, max_loss: float, norm: float, **more: Any) -> None:
        trained.losses.append(loss)
        trained.norms.append(norm)
        log(step, loss, max_loss, norm, **more)

    trainer.metrics_processor.log = recorded
    trainer.train()
    trainer.close()
    return trained


def trained_by(make: Make, folder: Path, *overrides: str, world_size: int = 4) -> Trained:
    """The same on ranks that are forked for it; called from where no process group is."""
    return trained_by_each(make, folder, overrides, world_size=world_size)[0]


def trained_by_each(
    make: Make, folder: Path, *runs: Sequence[str], world_size: int = 4
) -> list[Trained]:
    """The same of several runs, one after the other in one world."""
    told = folder / f"{make.__name__}.json"

    def body() -> None:
        trained = []
        for number, overrides in enumerate(runs):
            its = folder / f"{make.__name__}-{number}"
            its.mkdir(exist_ok=True)
            everyones = [Trained()] * world_size
            dist.all_gather_object(everyones, train(make, its, *overrides))
            # A stage of a pipeline that does not know the loss says -1 a micro-step.
            trained.append(asdict(max(everyones, key=lambda each: each.losses)))
        if dist.get_rank() == 0:
            told.write_text(json.dumps(trained))

    run_on_ranks(world_size, body, timeout_s=30 * world_size + 40 * len(runs))
    return [Trained(**its) for its in json.loads(told.read_text())]
