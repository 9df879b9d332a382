"""Replicas start equal, and can be checked to be so still."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mics_dtensor.errors import ConfigError, ReplicaError
from mics_dtensor.parts import parts_of
from mics_dtensor.stage import stage
from mics_dtensor.upstream import do_before_unshard, local_of, units_of


def synchronize_replicas(model: nn.Module | Iterable[nn.Module]) -> None:
    """Every replica takes replica 0's parameters and buffers, byte for byte.

    fully_shard does not make replicas equal: with a seed of its own each rank differs. One
    broadcast a unit over its replication group, and one for buffers and parameters outside FSDP
    over that of the first unit. Collective: every rank that holds the model calls it, once it is
    materialised. Raises ConfigError, before anything is sent, for parameters on the meta device,
    and for a model without FSDP units.
    """
    for held in _held(model, statistics=True):
        if held.group.size() == 1:
            continue
        with torch.no_grad(), stage("synchronize replicas", held.name, held.group) as group:
            tensors = list(held.tensors.values())
            message = torch.cat([_bytes(tensor).to(held.device) for tensor in tensors])
            if message.numel():
                dist.broadcast(message, group=group, group_src=0)
            sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
            for tensor, piece in zip(tensors, torch.split(message, sizes), strict=True):
                flat = tensor if tensor.is_contiguous() else tensor.contiguous()
                _bytes(flat).copy_(piece)
                if flat is not tensor:
                    tensor.copy_(flat)


def check_replicas(model: nn.Module | Iterable[nn.Module]) -> None:
    """Raise ReplicaError, on every rank, if a parameter or buffer differs between replicas.

    Running statistics of batch and instance norms are not compared: each rank has those of its own
    batches, as under FSDP2 alone.
    One checksum a tensor, one small message a unit and one over the world: cheap beside a step. It
    sees any change of a single number, and all but a vanishing part of the others. The error names
    what differs. Collective: every rank of the world calls it.
    """
    differing: list[str] = []
    device = torch.device("cpu")
    for held in _held(model, statistics=False):
        device = held.device
        if held.group.size() > 1:
            sums = torch.stack([_checksum(its).to(device) for its in held.tensors.values()])
            both = torch.cat([sums, -sums])
            with stage("check replicas", held.name, held.group) as group:
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            unequal = (both[: len(sums)] != -both[len(sums) :]).tolist()
            differing += [name for name, bad in zip(held.tensors, unequal, strict=True) if bad]
    anywhere = torch.tensor(int(bool(differing)), dtype=torch.int32, device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere.item():
        return
    said: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(said, differing)
    names = list(dict.fromkeys(name for theirs in said for name in theirs))
    raise ReplicaError(
        f"replicas differ in {', '.join(names)}: call synchronize_replicas(model) to start equal, "
        "and give every replica the same number of optimizer steps"
    )


@dataclass(frozen=True)
class _Held:
    """What the ranks of one replication group hold alike."""

    name: str
    group: dist.ProcessGroup
    device: torch.device  # where messages are made; shards lie elsewhere under CPU offload
    tensors: dict[str, torch.Tensor]  # local, by the name in the model


def _held(model: nn.Module | Iterable[nn.Module], *, statistics: bool) -> list[_Held]:
    """Unit by unit, in an order that all replicas share; then what is in no unit."""
    parts = parts_of(model)
    units = units_of(parts)
    if not units:
        raise ConfigError(
            "the model has no FSDP units, so no replicas: call torch.distributed.fsdp.fully_shard "
            "on it first"
        )
    do_before_unshard(units)
    mine = {(unit.part, param.name) for unit in units for param in unit.params}
    left_out = set() if statistics else {id(its) for part in parts for its in _statistics(part)}
    label = "part {}, {}" if len(parts) > 1 else "{1}"
    held = [
        _Held(
            unit.name,
            unit.replicate_group,
            unit.device,
            {label.format(unit.part, param.name): param.local for param in unit.params},
        )
        for unit in units
        if unit.replicate_group is not None
    ]
    others = {
        label.format(number, name): local_of(tensor.detach())
        for number, part in enumerate(parts)
        for name, tensor in (*part.named_buffers(), *part.named_parameters())
        if (number, name) not in mine and id(tensor) not in left_out
    }
    if held and others:
        first = held[0]
        held.append(
            _Held("(buffers and parameters outside FSDP)", first.group, first.device, others)
        )
    meta = [name for its in held for name, tensor in its.tensors.items() if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{meta[0]} is on the meta device: call model.to_empty(device=...) and initialise, or "
            "load a checkpoint, before replicas are made equal"
        )
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a root that ran would go on with its unsharded copy
    return held


def _statistics(part: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers that a forward fills from its own batch."""
    for module in part.modules():
        if isinstance(module, _NORMS):
            yield from module.buffers(recurse=False)


_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 that differs when one number does: odd weights have an inverse modulo 2**64."""
    whole = tensor.detach().contiguous().view(-1)
    numbers = whole.view(_INTEGERS[min(whole.itemsize, 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, numbers.numel(), _CHUNK):  # int64 copies of whole shards would be large
        some = numbers[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + some.numel(), device=tensor.device)
        total += (some * (2 * places + 1)).sum()  # wraps, the same way on every rank
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22
