"""Slices: what each replica of a shard owns, where optimizer states are sharded over the replicas.

The local shards of a unit are laid end to end and cut into R equal pieces, one a replica. A piece
covers whole shards, parts of shards, or nothing of them; per parameter it is a flat range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.mesh import Stages, ranks_of
from mics_dtensor.upstream import (
    ShardedParameter,
    Unit,
    all_gather,
    as_summand,
    flat_shard,
    hooks_of,
    lies_end_to_end,
    local_of,
    mesh_of_parameter,
    reduce_scatter,
)

Range = tuple[int, int]  # of flat elements: start, end


def cut(sizes: Sequence[int], num_replicas: int) -> list[list[Range]]:
    """Of tensors of `sizes` elements laid end to end: [tensor][replica], each replica's range.

    Every replica has ceil(total / R) elements, the last ones fewer: below R of difference. Pure.
    """
    share = -(-sum(sizes) // num_replicas)
    ranges: list[list[Range]] = []
    at = 0
    for size in sizes:
        edges = [min(max(replica * share - at, 0), size) for replica in range(num_replicas)]
        ranges.append(list(zip(edges, [*edges[1:], size], strict=True)))
        at += size
    return ranges


@dataclass(frozen=True, eq=False)
class Slice:
    """The range of one parameter's shard that this replica owns: updates, and has the gradient of.

    It is a post-accumulate-grad hook on its parameter, which is also where it is found.
    """

    param: ShardedParameter
    ranges: tuple[Range, ...]  # [replica], in the flat local shard
    replica: int
    axis: int | None  # of the parameter's mesh, over the replicas; None where there is one
    wide_dtype: torch.dtype | None  # of gradients, where it is not the parameter's own

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What `.grad` is summed in."""
        return self.wide_dtype or self.param.parameter.dtype

    @property
    def mine(self) -> Range:
        """Start and end."""
        return self.ranges[self.replica]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the shard's shape: a view, 1-D."""
        start, end = self.mine
        return local.view(-1)[start:end]

    def __call__(self, parameter: torch.Tensor) -> None:
        """After FSDP2 has added a whole gradient to the local part of a partial one (`+=`)."""
        if is_partial(parameter.grad, self.axis):
            self.clear_rest(local_of(cast("torch.Tensor", parameter.grad)))

    def own(self, gradient: DTensor) -> DTensor:
        """A gradient that every replica has, as this replica's summand; in place."""
        if self.axis is None or is_partial(gradient, self.axis):
            return gradient
        local = local_of(gradient)
        self.clear_rest(local)
        return as_summand(self.param, local, axis=self.axis)

    def as_gradient(self, local: torch.Tensor) -> DTensor:
        """`local`, zero outside of the slice, as this replica's summand of the gradient."""
        self.accept_gradient_dtype()
        return as_summand(self.param, local.to(self.gradient_dtype), axis=self.axis)

    def accept_gradient_dtype(self) -> None:
        """Let `.grad` be wider than the parameter. Each time: `.to(dtype)` sets it back."""
        if self.gradient_dtype != self.param.parameter.dtype:
            self.param.parameter.grad_dtype = None

    @torch.no_grad()
    def clear_rest(self, local: torch.Tensor) -> None:
        """Zeros outside of the slice."""
        start, end = self.mine
        flat = local.view(-1)
        flat[:start].zero_()
        flat[end:].zero_()


def slice_of(parameter: torch.Tensor) -> Slice | None:
    """The slice of a parameter whose states are sharded over the replicas, else None."""
    return next((hook for hook in hooks_of(parameter) if isinstance(hook, Slice)), None)


def is_partial(gradient: torch.Tensor | None, axis: int | None) -> bool:
    """Whether a gradient is a summand over `axis` of its mesh."""
    if axis is None or not isinstance(gradient, DTensor):
        return False
    return bool(gradient.placements[axis].is_partial())


def slices_of_unit(unit: Unit, gradient_dtype: torch.dtype | None) -> list[Slice]:
    """Cut the trainable parameters of a unit. `gradient_dtype` None: the parameter's own. Pure."""
    trained = [param for param in unit.params if param.parameter.requires_grad]
    group = unit.replicate_group
    ranges = cut([param.local.numel() for param in trained], unit.num_replicas)
    return [
        Slice(
            param=param,
            ranges=tuple(its),
            replica=0 if group is None else group.rank(),
            axis=_axis_of(param, group),
            wide_dtype=gradient_dtype,
        )
        for param, its in zip(trained, ranges, strict=True)
    ]


def _axis_of(param: ShardedParameter, group: dist.ProcessGroup | None) -> int | None:
    """By ranks: the mesh of a parameter under tensor parallel has other axes than the unit's."""
    if group is None or group.size() == 1:
        return None
    mesh = mesh_of_parameter(param)
    groups = [ranks_of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return groups.index(ranks_of(group))


class SlicesSent:
    """A sum over the replicas on its way, of which each gets its own slices. Collective.

    `cuts`: [replica], the ranges of `flat` that are its slices. Once it has been waited for, `flat`
    holds the sums in this replica's slices, and zeros elsewhere. (R - 1)/R of the message leaves a
    rank, half of what an all-reduce sends; with `stages`, where nodes hold several replicas, each
    node's sum crosses once. gloo's reduce-scatter moves an all-reduce, so there, and where slices
    are unequal, it is an all-to-all and a sum in fp32.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        cuts: Sequence[Sequence[Range]],
        *,
        group: dist.ProcessGroup,
        stages: Stages | None = None,
    ) -> None:
        sizes = [sum(end - start for start, end in its) for its in cuts]
        self._flat, self._mine, self._size = flat, cuts[group.rank()], sizes[group.rank()]
        self._work: dist.Work | None = None
        message = _as_it_lies(flat, cuts)
        if stages is not None and len(sizes) * max(sizes) <= 2 * sum(sizes):
            if message is None or len(set(sizes)) > 1:
                message = flat.new_zeros(len(sizes), max(sizes))  # [replica, slice]
                for row, its, size in zip(message, cuts, sizes, strict=True):
                    row[:size] = torch.cat([flat[start:end] for start, end in its])
            self._received = flat.new_empty(max(sizes))
            HierarchicalReduceScatter(stages, unit="slices", by_block=True)(
                self._received, message.view(-1), group, dist.ReduceOp.SUM
            )
            self._received = self._received[: self._size]
            return
        if message is None:
            message = torch.cat([flat[start:end] for its in cuts for start, end in its])
        if len(set(sizes)) == 1 and dist.get_backend(group) != dist.Backend.GLOO:
            self._received = flat.new_empty(self._size)
            self._work = reduce_scatter(self._received, message, group=group, async_op=True)
        else:
            self._received = flat.new_empty(len(sizes) * self._size)  # [replica, slice]
            self._work = dist.all_to_all_single(
                self._received,
                message,
                [self._size] * len(sizes),
                sizes,
                group=group,
                async_op=True,
            )

    @torch.no_grad()
    def wait(self) -> None:
        """Until the sums are here (on CUDA: until the current stream may use them)."""
        if self._work is not None:
            self._work.wait()
        wide = torch.float32 if self._flat.itemsize < 4 else self._flat.dtype
        total = self._received
        if self._size:
            total = total.view(-1, self._size).sum(0, dtype=wide)
        self._flat.zero_()
        at = 0
        for start, end in self._mine:
            self._flat[start:end] = total[at : at + end - start]
            at += end - start


def _as_it_lies(flat: torch.Tensor, cuts: Sequence[Sequence[Range]]) -> torch.Tensor | None:
    """The part of `flat` in which the slices lie end to end, replica by replica; else None."""
    ranges = [its for each in cuts for its in each if its[0] < its[1]]
    if not ranges or any(end != start for (_, end), (start, _) in pairwise(ranges)):
        return None
    return flat[ranges[0][0] : ranges[-1][1]]


class SlicesGathered:
    """Every replica's slices of one unit on their way into the shards. Collective over `group`.

    In place where the shards lie end to end in `room`: one message, nothing is copied. Else staged:
    one message of the whole shard of the unit, freed when `wait` has copied it out. So it is where
    the shards have moved from `room` meanwhile (`.to(dtype)`).
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        stages: Stages | None = None,
        room: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> None:
        self._slices, self._me = slices, group.rank()
        self._rows: torch.Tensor | None = None  # [replica, share], staged or in place
        self._room = room
        self._work: dist.Work | None = None
        share = max(sum(end - start for start, end in its) for its in self._of_replicas(group))
        if not share:
            return
        if room is None:
            flats = [flat_shard(its.param) for its in slices]
            staged = flats[0].new_empty(group.size(), share, device=device)
            mine = torch.cat([its.of(at) for its, at in zip(slices, flats, strict=True)])
            staged[self._me, : mine.numel()] = mine
            room = staged.view(-1)
        whole = room[: group.size() * share]
        self._rows = whole.view(group.size(), share)
        own = whole[self._me * share : (self._me + 1) * share]
        if stages is not None:
            hierarchical = HierarchicalAllGather(stages, unit="slices", by_block=True)
            self._work = hierarchical(whole, own, group, async_op)
        else:
            self._work = all_gather(whole, own, group=group, async_op=async_op)

    @torch.no_grad()
    def wait(self) -> None:
        """Until the shards are whole (on CUDA: until the current stream may use them)."""
        if self._work is not None:
            self._work.wait()
        rows, self._rows = self._rows, None
        if rows is None or self._is_in_place:
            return
        if rows.is_cuda:  # it may be copied out on another stream than it was made on
            rows.record_stream(torch.cuda.current_stream(rows.device))
        for replica, row in enumerate(rows):
            at = 0
            for its in self._slices:
                start, end = its.ranges[replica]
                if replica != self._me:
                    flat_shard(its.param)[start:end] = row[at : at + end - start]
                at += end - start

    @property
    def _is_in_place(self) -> bool:
        """Whether the message has gone to where the shards lie by now."""
        params = [its.param for its in self._slices]
        return self._room is not None and lies_end_to_end(params, self._room)

    def _of_replicas(self, group: dist.ProcessGroup) -> list[list[Range]]:
        return [[its.ranges[replica] for its in self._slices] for replica in range(group.size())]
