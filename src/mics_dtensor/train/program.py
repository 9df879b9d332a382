"""The training program, from its arguments to its exit status."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mics_dtensor.errors import CheckpointError, ConfigError, ReplicaError, TopologyError
from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.train.arguments import USAGE
from mics_dtensor.train.degrees import BY_PLANNER, resolve
from mics_dtensor.train.launch import Launch, configure_logging, say_and_stop
from mics_dtensor.train.load import Run, load
from mics_dtensor.train.pipeline import rank_of_loss
from mics_dtensor.world import agreed

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from mics_dtensor.train.config import RunConfig


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train, and return the exit status; every rank of the world calls it with the same `argv`.

    A setting that cannot be run is refused before the process group, or else before the model: by
    rank 0 in one sentence, with status 1 on every rank. What goes wrong later is a traceback.
    """
    if {"-h", "--help"} & set(argv):
        if environ.get("RANK", "0") == "0":
            print(USAGE, flush=True)
        return 0
    try:
        run = load(argv)
        launch = Launch.read(environ)
        run, layout = resolve(
            run, world_size=launch.world_size, local_world_size=launch.local_world_size
        )
        _train(run, layout, launch)
    except (
        CheckpointError,
        ConfigError,
        TopologyError,
        ReplicaError,
    ) as error:  # every rank has it: `agreed`
        rank, local_rank = (int(environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        return say_and_stop(error, rank=rank, local_rank=local_rank)
    return 0


def _train(run: Run, layout: Layout, launch: Launch) -> None:
    # torchtitan takes seconds to import: a run that is refused does not wait for it.
    import torch
    import torch.distributed as dist

    from mics_dtensor.train import device_shim

    configure_logging(
        rank=launch.rank,
        rank_of_loss=rank_of_loss(
            run.config.parallelism.pipeline_parallel_schedule,
            world_size=launch.world_size,
            stages=run.config.parallelism.pipeline_parallel_degree,
        ),
    )
    device_type: device_shim.DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    device_shim.use_device(device_type)
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.observability import structured_logger

    from mics_dtensor.train.build import trainer_config

    config = trainer_config(run, device_type=device_type)
    make_dump_folder(Path(config.dump_folder))
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    if device_type == "cuda":
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    dist_utils.init_distributed(
        config.comm,
        # On a CPU gloo is there already, and torch refuses to have it twice.
        enable_cpu_backend=config.training.enable_cpu_offload and device_type != "cpu",
        base_folder=config.dump_folder,
    )
    agreed(lambda: _check(run, layout, launch))
    agreed(lambda: _check_vocabulary(config))
    _run(run, layout, launch, config)
    # Not after an error: the other ranks may be waiting in a collective.
    dist.destroy_process_group()


def _run(run: Run, layout: Layout, launch: Launch, config: Trainer.Config) -> None:
    from mics_dtensor.train.stopping import StopRequest
    from mics_dtensor.train.trainer import MicsTrainer, Placement

    request = StopRequest()
    if saves := config.checkpoint.enable and not config.checkpoint.load_only:
        request.listen()
    else:  # it ends the process, as ever; scripts/torchrun.sh starts ranks that ignore it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mics = run.config.mics
    topology = Topology.uniform(
        world_size=launch.world_size,
        ranks_per_node=mics.ranks_per_node or launch.local_world_size,
    )
    placement = Placement(layout=layout, topology=topology)
    trainer = MicsTrainer(
        config,
        placement=placement,
        run_id=_run_id(),
        mics=mics,
        resolved=asdict(run.config),
    )
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            return
        if launch.rank == 0:
            print("\n".join([*run.planned, str(trainer.explanation)]), flush=True)
            for key in run.inert:
                print(f"does nothing: {key}", flush=True)
        if saves:
            trainer.stop_request = request
        trainer.train()
    finally:
        trainer.close()


def _check(run: Run, layout: Layout, launch: Launch) -> None:
    """What needs the other ranks, or this rank's disk. Nothing is allocated yet."""
    import torch
    import torch.distributed as dist

    from mics_dtensor.measure.survey import device_name
    from mics_dtensor.train.data import check_data
    from mics_dtensor.train.planning import refuse_other_device

    hosts = [""] * launch.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    resolve(
        run,
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
        hosts=hosts,
    )
    sizes = [0] * launch.world_size
    dist.all_gather_object(sizes, layout.partition_size)
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"ranks have different partition sizes, {sorted(set(sizes))}: the file {run.path}, or "
            "the one that mics.cluster names, is not the same on all nodes"
        )
    if run.config.mics.cluster and run.origin["mics.partition_size"] == BY_PLANNER:
        # Only now, since the planner runs where no device is.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        refuse_other_device(run.config, device_name(torch.device(kind)))
    cp = run.config.parallelism.context_parallel_degree
    num_readers = layout.num_replicas * layout.partition_size // cp
    check_data(run.config, num_readers=num_readers, goes_on=_may_go_on(run.config))


def _may_go_on(config: RunConfig) -> bool:
    """Whether the position in the data may be a checkpoint's, which has lanes of its own."""
    from mics_dtensor.checkpoint.commit import named

    its = config.checkpoint
    if not its.enable or "://" in its.folder or "dataloader" in its.exclude_from_loading:
        return False
    if config.training.dataloader.num_workers:
        return False
    starts = its.initial_load_path and not its.initial_load_model_only
    return bool(starts or named(Path(config.job.dump_folder) / its.folder))


def _check_vocabulary(config: Trainer.Config) -> None:
    """A token that the model has no row for would read past its embeddings."""
    from torchtitan.models.common.config_utils import decoder_vocab_size

    from mics_dtensor.train.tokenizer import readable

    tokenizer = readable(config.tokenizer, config.hf_assets_path)
    held, rows = tokenizer.get_vocab_size(), decoder_vocab_size(config.model_spec)
    if held > rows:
        raise ConfigError(
            f"the tokenizer at model.hf_assets_path {config.hf_assets_path!r} has {held} tokens, "
            f"but {config.model_spec.name} {config.model_spec.flavor} has a vocabulary of {rows}; "
            "choose a flavor with a larger one, or the tokenizer of this model"
        )


def make_dump_folder(folder: Path) -> None:
    """Everything that the run writes goes there. Raises ConfigError where nothing can."""
    said = f"job.dump_folder {str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{said} is a file, or lies in one; name a folder") from None
    except OSError as error:
        raise ConfigError(f"{said} cannot be made ({error.strerror}); name another") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{said} is not to be written by this user; name another")


def _run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
