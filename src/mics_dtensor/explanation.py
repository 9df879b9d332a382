"""explain: what a model sends in a step, where, and how much."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from mics_dtensor.collectives import HierarchicalAllGather
from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import GroupShape
from mics_dtensor.mesh import hop_stages_of, node_blocks, ranks_of
from mics_dtensor.parts import parts_of
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.plan.options import BUCKET_SIZE_BYTES, Options
from mics_dtensor.plan.unit import Unit
from mics_dtensor.slices import slice_of
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import ShardedParameter, units_of
from mics_dtensor.upstream import Unit as FsdpUnit


def explain(
    model: nn.Module | Iterable[nn.Module],
    *,
    num_micro_steps: int,
    topology: Topology | None = None,
    second_hop_dtype: torch.dtype | None = None,
    bucket_size_bytes: int = BUCKET_SIZE_BYTES,
    two_hop: bool = True,
) -> Comparison:
    """Per FSDP unit: groups, stages, bytes per micro-step and per step on each link.

    Reads the model as it stands: its groups, its collectives, its policies, and whether a
    ReplicaShardedOptimizer has cut it into slices. `topology` is the one
    given to apply_mics; say it here for a model that has not been through apply_mics. The next two
    are those of `gradient_accumulation`; `two_hop=False` tells of a loop without it. No
    communication; any rank may call it alone. Of a pipeline it counts the stages of this rank, as
    if every stage were like them. Bytes are those of the best algorithm, summed over the world;
    calls are those of one rank. Raises ConfigError where no topology is known.
    """
    parts = parts_of(model)
    if type(num_micro_steps) is not int or num_micro_steps < 1:
        raise ConfigError(f"num_micro_steps is {num_micro_steps!r}; give a whole number, 1 or more")
    topology = topology or next((getattr(part, "mics_topology", None) for part in parts), None)
    if topology is None:
        raise ConfigError(
            "explain does not know the nodes of the ranks: call apply_mics(model, topology=...) "
            "first, or pass topology= here"
        )
    units = units_of(parts)
    described = tuple(_describe(unit, topology, second_hop_dtype) for unit in units)
    backend = dist.get_backend() if dist.is_initialized() else "nccl"
    in_stages = any(isinstance(unit.all_gather, HierarchicalAllGather) for unit in units)
    options = Options(
        num_micro_steps=num_micro_steps,
        hierarchical=in_stages or bool(hop_stages_of(parts)),
        bucket_size_bytes=bucket_size_bytes,
        two_hop=two_hop,
        backend="gloo" if backend == "gloo" else "nccl",
    )
    return Comparison(described, options, topology.num_nodes, topology.ranks_per_node)


def _describe(unit: FsdpUnit, topology: Topology, hop: torch.dtype | None) -> Unit:
    def shapes(*, trainable: bool) -> tuple[tuple[int, ...], ...]:
        return tuple(_sharded_first(p) for p in unit.params if _trains(p) == trainable)

    trained = {id(param.parameter): param for param in unit.params if _trains(param)}
    again = (p for p in unit.params if _trains(p) and p is not trained[id(p.parameter)])
    smaller = unit.regather_group
    return Unit(
        name=unit.name,
        shapes=shapes(trainable=True),
        frozen=shapes(trainable=False),
        repeated=tuple(_sharded_first(param) for param in again),
        shard=_shape_of(unit.shard_group, topology),
        replicate=_shape_of(unit.replicate_group, topology),
        gathers=2 if unit.reshards_after_forward else 1,
        regather=_shape_of(smaller, topology) if smaller is not None else None,
        gather_itemsize=unit.gather_dtype.itemsize,
        reduce_itemsize=unit.reduce_dtype.itemsize,
        hop_itemsize=(hop or unit.reduce_dtype).itemsize,
        update_itemsize=_update_itemsize(unit),
    )


def _update_itemsize(unit: FsdpUnit) -> int | None:
    """Of a shard, where ReplicaShardedOptimizer has cut the unit into slices."""
    sliced = [p.parameter for p in unit.params if slice_of(p.parameter) is not None]
    return sliced[0].dtype.itemsize if sliced else None


def _sharded_first(param: ShardedParameter) -> tuple[int, ...]:
    """The shape with the dim that is cut in front, which is where the traffic looks for rows."""
    rest = list(param.shape)
    return (rest.pop(param.sharded_dim), *rest)


def _trains(param: ShardedParameter) -> bool:
    return param.parameter.requires_grad


def _shape_of(group: dist.ProcessGroup | None, topology: Topology) -> GroupShape:
    if group is None:
        return GroupShape(1, 1, topology.world_size)
    blocks = node_blocks(ranks_of(group), topology)
    num_groups = topology.world_size // group.size()
    return GroupShape(len(blocks), len(blocks[0]), num_groups)
