"""Replicas start equal, and can be checked to be so still."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from mics_dtensor.errors import ConfigError, ReplicaError
from mics_dtensor.stage import stage
from mics_dtensor.upstream import Unit, local_of, units_of


def synchronize_replicas(model: nn.Module | Iterable[nn.Module]) -> None:
    """Every replica takes replica 0's parameters and buffers, byte for byte.

    fully_shard does not make replicas equal: with a seed of its own each rank differs. One
    broadcast a unit over its replication group, and one for buffers and parameters outside FSDP
    over that of the first unit. Collective: every rank that holds the model calls it, once it is
    materialised. Raises ConfigError, before anything is sent, for parameters on the meta device.
    """
    for name, group, tensors in _held(model):
        if group.size() == 1:
            continue
        with torch.no_grad(), stage("synchronize replicas", name, group):
            message = torch.cat([_bytes(tensor) for _, tensor in tensors])
            dist.broadcast(message, group=group, group_src=0)
            sizes = [tensor.numel() * tensor.itemsize for _, tensor in tensors]
            pieces = torch.split(message, sizes)
            for (_, tensor), piece in zip(tensors, pieces, strict=True):
                flat = tensor if tensor.is_contiguous() else tensor.contiguous()
                _bytes(flat).copy_(piece)
                if flat is not tensor:
                    tensor.copy_(flat)


def check_replicas(model: nn.Module | Iterable[nn.Module]) -> None:
    """Raise ReplicaError, on every rank, if a parameter or buffer differs between replicas.

    One checksum a tensor, two small messages a unit: cheap beside a step. It sees any change of one
    element, not every change of several. Collective: every rank that holds the model calls it.
    """
    differing: list[str] = []
    units = units_of(model)
    for _, group, tensors in _held(model):
        if group.size() > 1:
            sums = torch.stack([_checksum(tensor) for _, tensor in tensors])
            both = torch.cat([sums, -sums])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            unequal = (both[: len(sums)] != -both[len(sums) :]).tolist()
            differing += [name for (name, _), bad in zip(tensors, unequal, strict=True) if bad]
    anywhere = _anywhere(units, bool(differing))
    if differing:
        raise ReplicaError(
            f"replicas differ in {', '.join(differing)}: call synchronize_replicas(model) to start "
            "equal, and give every replica the same number of optimizer steps"
        )
    if anywhere:
        raise ReplicaError("replicas differ in a shard of another rank, which names the parameter")


def _held(
    model: nn.Module | Iterable[nn.Module],
) -> Iterator[tuple[str, dist.ProcessGroup, list[tuple[str, torch.Tensor]]]]:
    """Unit name, replication group and local tensors, in an order that all replicas share."""
    parts = [model] if isinstance(model, nn.Module) else list(model)
    mine = {id(param.parameter) for unit in units_of(parts) for param in unit.params}
    held: list[tuple[str, dist.ProcessGroup, list[tuple[str, torch.Tensor]]]] = [
        (unit.name, unit.replicate_group, [(param.name, param.local) for param in unit.params])
        for unit in units_of(parts)
        if unit.replicate_group is not None
    ]
    others = [
        (name, local_of(tensor.detach()))
        for part in parts
        for name, tensor in (*part.named_buffers(), *part.named_parameters())
        if id(tensor) not in mine
    ]
    if held and others:
        held.append(("(buffers and parameters outside FSDP)", held[0][1], others))
    meta = [name for _, _, tensors in held for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{meta[0]} is on the meta device: call model.to_empty(device=...) and initialise, or "
            "load a checkpoint, before replicas are made equal"
        )
    yield from held


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    # Bytes weighted by their position in a word, so that swapped bytes show; int64 wraps, the same
    # way on every rank.
    flat = _bytes(tensor).to(torch.int64)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device).remainder_(65521).add_(1)
    return (flat * weights).sum()


def _anywhere(units: list[Unit], flag: bool) -> bool:
    """Whether any rank of the partition groups says so."""
    for unit in units:
        if unit.shard_group is not None and unit.shard_group.size() > 1:
            said = torch.tensor(int(flag), dtype=torch.int32, device=unit.device)
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=unit.shard_group)
            flag = bool(said.item())
            break
    return flag
