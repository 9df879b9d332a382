"""A bucket: the gradients of whole units that share one message of the second hop.

After FSDP2's first reduction the gradients of a unit lie in one flat storage, which is sent as it
lies; only buckets of several units, or of another dtype, are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist

from mics_dtensor.gradient import Gradient
from mics_dtensor.mesh import Ranks, Stages, ranks_of
from mics_dtensor.slices import Range, SlicesSent
from mics_dtensor.stage import stage
from mics_dtensor.upstream import Unit, all_gather, reduce_scatter


class Sent(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Until it is here (on CUDA: until the current stream may use it)."""


@dataclass(frozen=True)
class Message:
    """What a bucket is while it crosses the replicas: an asynchronous sum; where optimizer states
    are sharded over the replicas, a reduce-scatter.

    `dtype` None is the unit's reduce dtype: what plain HSDP would send. `stages` are those of the
    replication groups with several ranks in a node, by their ranks: there a flat all-reduce would
    send (R - 1)/R of the message over each edge between nodes, where (n - 1)/n suffices.
    """

    dtype: torch.dtype | None = None
    stages: Mapping[Ranks, Stages] = field(default_factory=dict)

    def dtype_for(self, unit: Unit) -> torch.dtype:
        """The dtype on the wire."""
        return self.dtype or unit.reduce_dtype

    def is_staged(self, group: dist.ProcessGroup | None) -> bool:
        """Whether it crosses `group` in stages, the first of which is over when `send` returns."""
        return group is not None and ranks_of(group) in self.stages

    def send(
        self,
        flat: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        cuts: Sequence[Sequence[Range]] = (),
        unit: str = "",
    ) -> Sent:
        """Start; `flat` holds the sum once it has been waited for. Collective over `group`.

        `unit` names what is sent, in errors and traces. With `cuts`, the ranges of each replica,
        `flat` holds the sum in those of this one, else zeros.
        """
        stages = self.stages.get(ranks_of(group))
        if cuts:
            return SlicesSent(flat, cuts, group=group, stages=stages)
        if stages is not None:
            return HierarchicalSum(flat, stages, unit=unit)
        work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
        return work


class HierarchicalSum:
    """An all-reduce that crosses nodes with what each node has already summed. Collective.

    1. within_node: the ranks of a node reduce; each holds its part of the node's sum.
    2. across_nodes: each part is all-reduced with its peers in the other nodes, in flight from
       here until `wait`.
    3. within_node: the parts come together again.
    """

    def __init__(self, flat: torch.Tensor, stages: Stages, *, unit: str = "") -> None:
        self._flat, self._stages, self._unit = flat, stages, unit
        num_parts = stages.within_node.size()
        padding = -flat.numel() % num_parts
        self._padded = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
        self._part = flat.new_empty(self._padded.numel() // num_parts)
        with stage("boundary: sum within the node", unit, stages.within_node) as within_node:
            reduce_scatter(self._part, self._padded, group=within_node)  # fast link
        with stage("boundary between nodes", unit, stages.across_nodes) as across_nodes:
            self._work: dist.Work = dist.all_reduce(
                self._part, group=across_nodes, async_op=True
            )  # slow link: 2 (n - 1)/n of a part

    def wait(self) -> None:
        """Until `flat` holds the sum (on CUDA: until the current stream may use it)."""
        with stage("boundary between nodes", self._unit, self._stages.across_nodes):
            self._work.wait()
        with stage("boundary: gather within the node", self._unit, self._stages.within_node) as its:
            all_gather(self._padded, self._part, group=its)  # fast link
        if self._padded is not self._flat:
            self._flat.copy_(self._padded[: self._flat.numel()])


@dataclass(eq=False)
class Bucket:
    """The gradients of whole units that share a message."""

    names: str
    gradients: list[Gradient]
    device: torch.device
    dtype: torch.dtype
    divisor: float
    group: dist.ProcessGroup | None  # None where there is one replica: nothing is sent
    flat: torch.Tensor | None = None  # from launch to landing
    pieces: list[torch.Tensor] = field(default_factory=list)  # of `flat`, one a gradient
    work: Sent | None = None

    @torch.no_grad()
    def launch(self, message: Message) -> None:
        """Take the gradients out and start the message. Collective over the replication group.

        Runs on the stream on which the gradients are ready: FSDP2's reduce-scatter stream from a
        hook, the default one after the backward. `flat` is held until it has landed.
        """
        values: list[torch.Tensor | None] = [gradient.take() for gradient in self.gradients]
        if self.group is None:  # nothing is sent, so nothing is put together
            places = zip(values, self.gradients, strict=True)
            self.pieces = [
                v if v is not None else torch.zeros_like(g.param.local) for v, g in places
            ]
            return
        self.flat = self._as_it_lies(values)
        if self.flat is not None:
            self.pieces = [value for value in values if value is not None]
        else:
            starts, end = self._places()
            sizes = [gradient.param.local.numel() for gradient in self.gradients]
            self.flat = torch.zeros(end, dtype=self.dtype, device=self.device)
            self.pieces = [self.flat[at : at + n] for at, n in zip(starts, sizes, strict=True)]
            for piece, value in zip(self.pieces, values, strict=True):
                if value is not None:
                    piece.copy_(value.reshape(-1))
        if self.dtype == torch.float16:
            self.flat.div_(self.divisor)  # before the sum, which could overflow
        self._send(self.flat, message)

    def launch_zeros(self, message: Message) -> None:
        """Start the message of a step that is lost, for replicas that sent theirs."""
        _, end = self._places()
        self.flat = torch.zeros(end, dtype=self.dtype, device=self.device)
        self._send(self.flat, message)

    def wait(self) -> None:
        """Until the sum is here (on CUDA: until the current stream may use it)."""
        if self.work is not None and self.group is not None:
            with stage("boundary: wait", self.names, self.group):
                self.work.wait()
            self.work = None

    @torch.no_grad()
    def land(self) -> None:
        """Scale, and give every gradient its piece."""
        if self.divisor != 1 and (self.flat is None or self.dtype != torch.float16):
            for whole in self.pieces if self.flat is None else [self.flat]:
                whole.div_(self.divisor)
        for gradient, piece in zip(self.gradients, self.pieces, strict=True):
            gradient.put(piece)
        self.flat, self.pieces = None, []

    def only(self, wanted: Sequence[bool]) -> None:
        """Keep the gradients that some replica has."""
        chosen = [keep for keep in range(len(wanted)) if wanted[keep]]
        self.gradients = [self.gradients[keep] for keep in chosen]
        self.pieces = [self.pieces[keep] for keep in chosen] if self.pieces else []

    def _send(self, flat: torch.Tensor, message: Message) -> None:
        if self.group is not None and flat.numel():
            with stage("boundary", self.names, self.group) as group:
                cuts = self._cuts(group.size())
                self.work = message.send(flat, group=group, cuts=cuts, unit=self.names)

    def _as_it_lies(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The flat storage that all values are views of, in order, padded; else None."""
        if not values or values[0] is None:
            return None
        first, (starts, end) = values[0], self._places()
        storage, offset = first.untyped_storage(), int(first.storage_offset())
        for value, start in zip(values, starts, strict=True):
            if (
                value is None
                or (value.dtype, value.device) != (self.dtype, self.device)
                or not value.is_contiguous()
                or value.untyped_storage().data_ptr() != storage.data_ptr()
                or value.storage_offset() != offset + start
            ):
                return None
        return torch.as_strided(first, (end,), (1,), offset)

    def _cuts(self, num_replicas: int) -> list[list[Range]]:
        """By replica, the ranges of the message that are its own; none where all is everyone's."""
        starts, _ = self._places()
        cuts: list[list[Range]] = [[] for _ in range(num_replicas)]
        for at, gradient in zip(starts, self.gradients, strict=True):
            if gradient.slice is None:
                return []
            for its, (start, end) in zip(cuts, gradient.slice.ranges, strict=True):
                its.append((at + start, at + end))
        return cuts

    def _places(self) -> tuple[list[int], int]:
        """Where each gradient starts in the message, and where the last ends.

        Padded as FSDP2 pads, also where the message is a copy: another replica may send it as it
        lies, and both must be of one size.
        """
        padded = [gradient.param.padded_numel for gradient in self.gradients]
        starts = list(accumulate(padded, initial=0))[: len(padded)]
        return starts, starts[-1] + self.gradients[-1].param.local.numel() if starts else 0
