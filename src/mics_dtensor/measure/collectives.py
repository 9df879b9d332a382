"""Collectives timed on the candidate groups, all groups of a shape at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.errors import PlanError
from mics_dtensor.measure.clock import calls_at_once, of_the_slowest, own_seconds
from mics_dtensor.measure.groups import Candidate
from mics_dtensor.plan.stage import Collective
from mics_dtensor.plan.timing import Timing
from mics_dtensor.upstream import all_gather, reduce_scatter

COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
ITEMSIZE = 4  # fp32: what gradients are reduced in


def sizes_between(smallest: int, largest: int, *, factor: int = 2) -> list[int]:
    """Sizes of messages in bytes, each `factor` times the one before."""
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def timings(
    candidate: Candidate, sizes: Sequence[int], device: torch.device, *, repetitions: int
) -> list[Timing]:
    """Every collective of a candidate group at every size. Collective over the world.

    On gloo also the all-to-all, through which our reduction between nodes goes there.
    """
    kinds = list(COLLECTIVES)
    if dist.get_backend(candidate.group) == dist.Backend.GLOO:
        kinds.append("all_to_all")
    return [
        _timing(candidate, kind, sizes, device, repetitions, _plain(kind, candidate.group))
        for kind in kinds
    ]


def hierarchical_timings(
    candidate: Candidate, sizes: Sequence[int], device: torch.device, *, repetitions: int
) -> list[Timing]:
    """Ours, where the group has stages; else nothing. Collective over the world."""
    stages, group = candidate.stages, candidate.group
    if stages is None:
        return []
    gather, reduce = HierarchicalAllGather(stages), HierarchicalReduceScatter(stages)
    return [
        _timing(
            candidate,
            "all_gather",
            sizes,
            device,
            repetitions,
            lambda whole, shard: gather(whole, shard, group),
        ),
        _timing(
            candidate,
            "reduce_scatter",
            sizes,
            device,
            repetitions,
            lambda whole, shard: reduce(shard, whole, group, dist.ReduceOp.SUM),
        ),
    ]


Call = Callable[[torch.Tensor, torch.Tensor], object]


def _plain(kind: Collective, group: dist.ProcessGroup) -> Call:
    """A call over (whole message, this rank's shard of it)."""
    match kind:
        case "all_gather":
            return lambda whole, shard: all_gather(whole, shard, group=group)
        case "reduce_scatter":
            return lambda whole, shard: reduce_scatter(shard, whole, group=group)
        case "all_reduce":
            return lambda whole, _: dist.all_reduce(whole, group=group)
        case "all_to_all":
            return lambda whole, _: dist.all_to_all_single(
                torch.empty_like(whole), whole, group=group
            )
        case "send":
            raise PlanError("a message to one rank is not timed by itself: time an all_to_all")


def _timing(
    candidate: Candidate,
    kind: Collective,
    sizes: Sequence[int],
    device: torch.device,
    repetitions: int,
    call: Call,
) -> Timing:
    ranks = candidate.num_nodes * candidate.ranks_per_node
    seconds, real = [], []
    for size in sizes:
        shard = torch.zeros(max(1, size // ITEMSIZE // ranks), device=device)
        whole = torch.zeros(shard.numel() * ranks, device=device)
        own = own_seconds(
            lambda whole=whole, shard=shard: call(whole, shard),  # type: ignore[misc]
            device,
            repetitions=repetitions,
            calls=calls_at_once(size),
        )
        seconds.append(of_the_slowest(own, device))
        real.append(whole.numel() * ITEMSIZE)
    return Timing(
        collective=kind,
        num_nodes=candidate.num_nodes,
        ranks_per_node=candidate.ranks_per_node,
        sizes_bytes=tuple(real),
        seconds=tuple(seconds),
    )
