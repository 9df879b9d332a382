"""The Llama debug model through the training program: its TOML, its trainer, its data.

fsdp2 and hsdp are torchtitan's own trainer on the same configuration. A step is one turn of the
trainer's own loop, which waits between two steps for the launcher.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.trainer import Trainer

from benchmarks.bound import bound_of_stages
from benchmarks.launch import ROOT
from benchmarks.phases import Phases
from benchmarks.stages import counted_stages
from mics_dtensor import Topology, explain
from mics_dtensor.train import device_shim
from mics_dtensor.train.build import trainer_config
from mics_dtensor.train.chunked_loss import HeadUnit
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.launch import configure_logging
from mics_dtensor.train.load import load
from mics_dtensor.train.trainer import MicsTrainer, Placement
from mics_dtensor.upstream import units_of


@dataclass(frozen=True, kw_only=True)
class Llama:
    """train_configs/debug.toml with other numbers. What it writes goes to `folder`."""

    folder: str
    micro_steps: int = 4
    seq_len: int = 128


class _InTurns(Trainer):
    """A trainer whose loop waits for `go` before each step, and tells its gradient norm."""

    def wait_for_turns(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.norm, self.error = float("nan"), None
        log = self.metrics_processor.log

        def told(step: int, loss: float, max_loss: float, norm: float, **more: Any) -> None:
            self.norm = norm
            log(step, loss, max_loss, norm, **more)

        self.metrics_processor.log = told

    def should_continue_training(self) -> bool:
        if self.step:
            self.done.release()
        self.go.acquire()
        return super().should_continue_training()


class _Mics(_InTurns, MicsTrainer):
    pass


class Training:
    """One system with a trainer of its own. Building it and each step are collective."""

    def __init__(
        self, system: str, workload: Llama, *, partition_nodes: float, topology: Topology
    ) -> None:
        size = round(partition_nodes * topology.ranks_per_node)
        self.configuration = {
            "mics.partition_size": topology.world_size if system == "fsdp2" else size,
            "mics.ranks_per_node": topology.ranks_per_node,
            "mics.hierarchical": system != "mics-no-hierarchy",
            "training.global_batch_size": workload.micro_steps * topology.world_size,
            "training.seq_len": workload.seq_len,
            "training.steps": 1000,
            "job.dump_folder": workload.folder,
        }
        self._micro_steps = workload.micro_steps
        overrides = [f"--{key}={str(v).lower()}" for key, v in self.configuration.items()]
        run, layout = resolve(
            load(["--config-file", str(ROOT / "train_configs/debug.toml"), *overrides]),
            world_size=topology.world_size,
            local_world_size=topology.ranks_per_node,
        )
        del self.configuration["job.dump_folder"]
        configure_logging(rank=dist.get_rank(), environ={"LOG_RANK": "none"})
        device_shim.use_device("cpu")
        config = trainer_config(run, device_type="cpu")
        if system.startswith("mics"):
            placement = Placement(layout=layout, topology=topology)
            self._trainer = _Mics(
                config, placement=placement, run_id="benchmark", mics=run.config.mics
            )
        else:
            self._trainer = _InTurns(config)
            device_shim.use_sums_of_gloo(self._trainer.model_parts)
        for part in self._trainer.model_parts:
            start_equal(part)
        self._topology = topology
        self._trainer.wait_for_turns()
        self._loop = threading.Thread(target=self._train, daemon=True)

    def bound_of_stages(self) -> dict[str, int]:
        """The least that a step must send between nodes with this sharding."""
        parts = self._trainer.model_parts
        told = explain(parts, num_micro_steps=self._micro_steps, topology=self._topology)
        head = HeadUnit.of(self._trainer.loss_fn, units_of(parts))
        units = told.units if head is None else head.explained(told).units
        return bound_of_stages(units, micro_steps=self._micro_steps)

    def step(self, phases: Phases) -> float:  # noqa: ARG002  the loop has no phases to tell
        """One optimizer step; the gradient norm before clipping."""
        self._trainer.go.release()
        if not self._loop.is_alive():
            self._loop.start()
        self._trainer.done.acquire()
        if self._trainer.error is not None:
            raise self._trainer.error
        return self._trainer.norm

    def count_step(self, phases: Phases) -> None:
        """One step, counted stage by stage. The head runs with the loss, behind the forward."""
        with counted_stages(self._trainer.model_parts, phases), self._telling(phases):
            phases.begin("backward")
            self.step(phases)
            phases.begin("before")

    @contextmanager
    def _telling(self, phases: Phases) -> Iterator[None]:
        model = self._trainer.model_parts[0]
        before = model.register_forward_pre_hook(lambda *_: phases.begin("forward"), prepend=True)
        after = model.register_forward_hook(lambda *_: phases.begin("backward"))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._trainer.error = error
            self._trainer.done.release()


@torch.no_grad()
def start_equal(model: torch.nn.Module) -> None:
    """The same parameters whatever the mesh: on a CPU, DTensor draws others for other shards."""
    for name, parameter in model.named_parameters():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.ones(parameter.shape)
        if parameter.dim() > 1:
            whole.normal_(std=0.02, generator=random)
        if isinstance(parameter, DTensor):
            at = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(whole, *at, src_data_rank=None))
        else:
            parameter.copy_(whole)
