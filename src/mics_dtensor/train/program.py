"""The training program, from its arguments to its exit status."""

from __future__ import annotations

import logging
import socket
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mics_dtensor.errors import MicsError
from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.launch import Launch, agreed, say_and_stop
from mics_dtensor.train.load import Run, load

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train, and return the exit status; every rank of the world calls it with the same `argv`.

    What can be refused is refused before the process group, then before the model: by rank 0 in one
    sentence, with status 1 on every rank. Anything else is a traceback, as it should be.
    """
    rank = int(environ.get("RANK", "0"))
    try:
        run = load(argv)
        launch = Launch.read(environ)
        run, layout = resolve(
            run, world_size=launch.world_size, local_world_size=launch.local_world_size
        )
        _train(run, layout, launch, environ)
    except MicsError as error:
        return say_and_stop(error, rank=rank)
    return 0


def _train(run: Run, layout: Layout, launch: Launch, environ: Mapping[str, str]) -> None:
    # torchtitan takes seconds to import: a run that is refused does not wait for it.
    import torch
    import torch.distributed as dist

    from mics_dtensor.train import device_shim
    from mics_dtensor.train.build import trainer_config

    _configure_logging(launch, environ)
    device_type: device_shim.DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    device_shim.use_device(device_type)
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.observability import structured_logger

    config = trainer_config(run, device_type=device_type)
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    if device_type == "cpu":
        _use_attention_of_cpu(config)
    if device_type == "cuda":
        torch.cuda.set_device(launch.rank % launch.local_world_size % torch.cuda.device_count())
    dist_utils.init_distributed(
        config.comm,
        enable_cpu_backend=config.training.enable_cpu_offload,
        base_folder=config.dump_folder,
    )
    try:
        agreed(lambda: _check(run, layout, launch))
        _run_trainer(run, layout, launch, config)
    finally:
        dist.destroy_process_group()


def _check(run: Run, layout: Layout, launch: Launch) -> None:
    """What needs the other ranks, or this rank's disk. Nothing is allocated yet."""
    import torch.distributed as dist

    from mics_dtensor.train.data import check_data

    hosts = [""] * launch.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    resolve(
        run,
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
        hosts=hosts,
    )
    cp = run.config.parallelism.context_parallel_degree
    check_data(run.config, num_readers=layout.num_replicas * layout.partition_size // cp)
