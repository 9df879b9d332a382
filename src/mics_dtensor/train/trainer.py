"""torchtitan's trainer with the two-hop step; the loop stays torchtitan's own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from mics_dtensor.accumulate import gradient_accumulation
from mics_dtensor.apply import apply_mics, stage_groups
from mics_dtensor.clip import (
    clip_grad_norm_,
    clip_with_norm_,
    norm_over,
    refuse_nonfinite,
    total_norm,
)
from mics_dtensor.errors import ConfigError
from mics_dtensor.explanation import explain
from mics_dtensor.layout import Layout
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.replicas import check_replicas, synchronize_replicas
from mics_dtensor.topology import Topology
from mics_dtensor.train import checkpoints, device_shim
from mics_dtensor.train.chunked_loss import HeadUnit
from mics_dtensor.train.config import Mics
from mics_dtensor.train.exposed import ExposedCommunication
from mics_dtensor.train.metrics import Progress, Record, config_of
from mics_dtensor.train.stopping import StopRequest
from mics_dtensor.train.weights import refuse_cut
from mics_dtensor.upstream import Unit, set_timeout, units_of
from mics_dtensor.world import agreed

logger = logging.getLogger(__name__)

Batches = Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a run lies. `layout` is that of one pipeline stage, `topology` that of the world."""

    layout: Layout
    topology: Topology


_DEFAULTS = Mics()


class MicsTrainer(Trainer):
    """Trains `config` on the partition groups of `placement`, by the options of [mics].

    Building one is collective: every rank gives the same arguments, after
    `device_shim.use_device`. `resolved`: the run as its checkpoints are to describe it. Raises
    ConfigError on every rank for what it cannot run.
    """

    def __init__(
        self,
        config: Trainer.Config,
        *,
        placement: Placement,
        run_id: str,
        mics: Mics = _DEFAULTS,
        resolved: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_cuda_graphs(config, placement.layout)
        self.stop_request: StopRequest | None = None  # asked after every step
        self._mics = mics
        self._has_replicas = placement.layout.num_replicas > 1
        super().__init__(
            dataclasses.replace(
                config,
                metrics=config_of(config.metrics),
                checkpoint=checkpoints.config_of(
                    config.checkpoint,
                    placement=mics.checkpoint_placement,
                    layout=placement.layout,
                    run=resolved,
                ),
            )
        )
        if config.checkpoint.create_seed_checkpoint:  # one rank, nothing is sharded
            return
        agreed(lambda: refuse_cut(self.checkpointer))
        units = units_of(self.model_parts)
        ep = config.parallelism.expert_parallel_degree
        agreed(lambda: audit_groups(units, placement.layout, rank=dist.get_rank(), experts=ep))
        device_shim.use_sums_of_gloo(self.model_parts)
        apply_mics(
            self.model_parts,
            topology=placement.topology,
            hierarchical=mics.hierarchical,
            node_local_backward=mics.node_local_backward,
        )
        synchronize_replicas(self.model_parts)
        self._head = HeadUnit.of(self.loss_fn, units)
        self.explanation = self._explained()
        graphs = not config.training.disable_cuda_graphs
        self.metrics_processor.record_to(
            Record(run_id=run_id, traffic=self.explanation, dump_folder=config.dump_folder),
            exposed=ExposedCommunication.of(units, graphs=graphs),
        )

    def _explained(self) -> Comparison:
        told = explain(
            self.model_parts,
            num_micro_steps=self.gradient_accumulation_steps,
            second_hop_dtype=second_hop_dtype(self._mics),
            bucket_size_bytes=self._mics.bucket_size_bytes,
            two_hop=self._has_replicas,
        )
        options = dataclasses.replace(told.options, overlap_update=self._mics.overlap_update)
        told = dataclasses.replace(told, options=options)
        return told if self._head is None else self._head.explained(told)

    def init_distributed(self) -> ParallelDims:
        """The meshes of torchtitan; its process group where the program has not made it already."""
        if not dist.is_initialized():
            return super().init_distributed()
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    @record
    def train(self) -> None:
        """The loop of torchtitan, from the checkpoint's step on."""
        self._progress: Progress | None = None
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        if self.step >= (steps := self.config.training.steps):
            if self.metrics_processor.tells:
                words = "nothing to do: step %d of %d; raise training.steps to go on"
                logger.info(words, self.step, steps)
            return
        timeouts = self._with_stages(dist_utils.set_pg_timeouts)
        loaded = _replaced(self.checkpointer, "load", lambda **_: True)  # not twice
        with _replaced(dist_utils, "set_pg_timeouts", timeouts), loaded:
            super().train()

    def should_continue_training(self) -> bool:
        """Whether there is a step to do. Where the ranks agree to stop, all of the run is saved."""
        if not super().should_continue_training():
            return False
        if self.stop_request is None or not self.stop_request.agreed(self.device):
            return True
        device_shim.save_now(self.checkpointer, self.step)
        logger.warning(
            "told to stop: saved, and ended after step %d of %d; start it again to go on there",
            self.step,
            self.config.training.steps,
        )
        return False

    def train_step(self, data_iterator: Batches) -> None:
        """One optimizer step: the second hop is over when torchtitan asks for the norm."""
        if self._progress is None:
            self._progress = Progress(done=self.step - 1, last=self.config.training.steps)
        self._micro_steps_done = 0
        clipping = _replaced(dist_utils, "clip_grad_norm_", _clip)
        with self.metrics_processor.step(), ExitStack() as self._open_step, clipping:
            super().train_step(data_iterator)
        if self._mics.check_replicas_every and self.step % self._mics.check_replicas_every == 0:
            check_replicas(self.model_parts)
        if self.metrics_processor.tells and (words := self._progress.words(self.step)):
            logger.info(words)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """One micro-step. torchtitan does not say which one it is, so they are counted here."""
        if self._head is not None:
            self._head.restore()
        if not self._has_replicas:  # one hop is all there is; CUDA graphs may replay it
            loss: torch.Tensor = super().forward_backward_step(**batch)
            return loss
        num_micro_steps = self.gradient_accumulation_steps
        if self._micro_steps_done == 0:
            # Not before: a step for which the data run out must not begin.
            self._accumulation = self._open_step.enter_context(
                gradient_accumulation(
                    self.model_parts,
                    num_micro_steps=num_micro_steps,
                    second_hop_dtype=second_hop_dtype(self._mics),
                    bucket_size_bytes=self._mics.bucket_size_bytes,
                    overlap_boundary=self._mics.overlap_boundary,
                )
            )
        with self._accumulation.micro_step():
            loss = super().forward_backward_step(**batch)
        self._micro_steps_done += 1
        if self._micro_steps_done == num_micro_steps:
            self._open_step.close()
        return loss

    def _with_stages(self, of_meshes: Callable[..., None]) -> Callable[..., None]:
        """The groups of the hierarchical collectives get the timeout of torchtitan's own."""

        def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
            of_meshes(timeout=timeout, parallel_dims=parallel_dims)
            for group in stage_groups(self.model_parts):
                set_timeout(timeout, group)

        return set_pg_timeouts


def second_hop_dtype(mics: Mics) -> torch.dtype | None:
    """The torch dtype of [mics] second_hop_dtype."""
    return None if mics.second_hop_dtype is None else getattr(torch, mics.second_hop_dtype)


def refuse_cuda_graphs(config: Trainer.Config, layout: Layout) -> None:
    """A replay runs no Python, so it would never take the second hop."""
    if config.training.disable_cuda_graphs:
        return
    if utils.device_type == "cpu":
        raise ConfigError(
            "training.disable_cuda_graphs = false on a machine without a GPU; write "
            "disable_cuda_graphs = true"
        )
    if layout.num_replicas > 1:
        raise ConfigError(
            f"training.disable_cuda_graphs = false with {layout.num_replicas} replicas: the second "
            "hop does not run under CUDA graphs yet; write disable_cuda_graphs = true"
        )


def audit_groups(units: Iterable[Unit], layout: Layout, *, rank: int, experts: int = 1) -> None:
    """Hold the groups that torchtitan made against the layout. No communication.

    With `experts` ranks to share them, experts have shards of their own: the ranks of a partition
    group are then cut into such sets of consecutive ranks. Raises ConfigError.
    """
    stage = rank - rank % layout.topology.world_size  # its first rank
    wanted = {
        "partition": _shifted(layout.partition_group(rank - stage), stage),
        "replication": _shifted(layout.replication_group(rank - stage), stage),
    }
    block = layout.partition_size * layout.tensor_parallel_size  # ranks, in order
    first = rank - (rank - stage) % block
    wanted_of_experts = wanted | {
        "partition": list(range(first + (rank - first) % experts, first + block, experts))
    }
    for unit in units:
        of_experts = "efsdp" in (unit.mesh.mesh_dim_names or ())
        made = {"partition": unit.shard_group, "replication": unit.replicate_group}
        for kind, group in made.items():
            ranks = [rank] if group is None else dist.get_process_group_ranks(group)
            right = (wanted_of_experts if of_experts else wanted)[kind]
            if ranks != right:
                raise ConfigError(
                    f"unit {unit.name}: torchtitan's {kind} group of rank {rank} is {ranks}, but "
                    f"by the degrees of this run it is {right}; give the degrees in "
                    "[parallelism] and [mics] to the program, not to torchtitan's Trainer.Config"
                )


def _shifted(ranks: Iterable[int], by: int) -> list[int]:
    return [rank + by for rank in ranks]


def _clip(
    parameters: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pp_mesh: DeviceMesh | None = None,
    foreach: bool | None = None,
    **_: Any,  # ep_enabled: our norm is taken over each mesh that parameters lie on
) -> torch.Tensor:
    """Our clip_grad_norm_ under the signature that torchtitan calls: one norm for all stages."""
    if pp_mesh is None:
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = total_norm(parameters, norm_type=norm_type, foreach=foreach)
    norm = norm_over([pp_mesh.get_group()], norm, norm_type=norm_type)
    if error_if_nonfinite:
        refuse_nonfinite(norm, norm_type=norm_type)
    clip_with_norm_(parameters, max_norm=max_norm, norm=norm, foreach=foreach)
    return norm


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `module.name` is `value`: for functions that torchtitan's loop looks up there."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
