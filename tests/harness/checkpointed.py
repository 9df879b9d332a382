"""Models with optimizers for tests of checkpoints, and what is compared of them."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.sharded import batch, mesh_of, shard, whole
from mics_dtensor import ReplicaShardedOptimizer, gradient_accumulation
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.upstream import local_of

SLICED, TENSOR_PARALLEL, FEED = "sliced", "tensor parallel", "feed"


class Uneven(nn.Module):
    """Rows that no number of shards divides, a buffer, a scalar-like parameter."""

    def __init__(self, last: int = 17) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 9), nn.Linear(9, last)])
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.one


class Block(nn.Module):
    """What tensor parallelism cuts, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 8), nn.Linear(8, 5), nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


class Feed(nn.Module):
    """For two ranks of tensor parallelism, or for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def made(
    replicate: int, partition: int, *, kind: str = "", seed: int = 0, last: int = 17
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    if kind == TENSOR_PARALLEL:
        mesh = mesh_of(replicate, partition, 2)
        feed: Any = Feed()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(feed.layers[0], mesh["tp"], plan)
        model = shard(feed, mesh["replicate", "shard"])
    else:
        model = shard(Feed() if kind == FEED else Uneven(last), mesh_of(replicate, partition))
    if kind == SLICED:
        return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    """Steps of two micro-steps; the losses of this rank."""
    rank = dist.get_rank() // (2 if is_tensor_parallel(model) else 1)  # two ranks read the same
    losses = []
    for step in steps:
        with gradient_accumulation(model, num_micro_steps=2) as accumulation:
            for micro in range(2):
                with accumulation.micro_step():
                    loss = model(batch(step, micro, rank)).square().mean()
                    loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def is_tensor_parallel(model: nn.Module) -> bool:
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(value).clone() for name, value in named}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def states_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Of this rank: shards, or pieces."""
    found = {}
    for key, its in optimizer.state_dict()["state"].items():
        for name, value in its.items():
            flat = getattr(value, "flat", value)
            found[key, name] = local_of(flat).clone()
    return found


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as torch alone reads it; by one process."""
    reader = FileSystemReader(path)
    described = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.full(its.size, -1, dtype=its.properties.dtype)
        for name, its in described.items()
        if isinstance(its, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


def entries(path: Path) -> dict[str, str]:
    """Of every value of a checkpoint, part by part, the hash of its bytes in the files."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    files = {file.name: (path / file.name).read_bytes() for file in Manifest.read(path).files}
    found = {}
    for index, its in metadata.storage_data.items():
        data = files[its.relative_path][its.offset : its.offset + its.length]
        found[f"{index.fqn} {index.offset}"] = sha256(data).hexdigest()
    return found


@dataclass
class Position:
    """Where a run stands in its data: a step reads what this says."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@dataclass
class Run:
    """A model in training, with all that a checkpoint of it holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)

    def go_on(self, num_steps: int) -> list[tuple[float, float]]:
        """Of each micro-step, its loss on this rank and the learning rate."""
        found = []
        for _ in range(num_steps):
            (rate,) = self.scheduler.get_last_lr()
            losses = train(self.model, self.optimizer, self.position.step)
            found += [(loss, rate) for loss in losses]
            self.scheduler.step()
            self.position.step += 1
        return found

    def checkpoints(self, folder: Path, **options: Any) -> Checkpoints:
        extra: Any = {"lr": self.scheduler, "data": self.position}
        its = CheckpointOptions(**options)
        return Checkpoints(
            folder, model=self.model, optimizer=self.optimizer, extra=extra, options=its
        )
