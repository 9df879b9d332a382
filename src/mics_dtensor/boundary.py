"""The second hop: at the boundary of an optimizer step, gradients cross the replicas.

Which gradients take part is agreed by all replicas, in an order fixed beforehand; zeros stand in
for what a replica lacks. After FSDP2's first reduction the gradients of a unit lie in one flat
storage, which is sent as it lies; only buckets of several units, or of another dtype, are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from logging import getLogger

import torch
import torch.distributed as dist

from mics_dtensor.agreement import Ballot, agree
from mics_dtensor.gradient import Gradient
from mics_dtensor.mesh import ranks_of
from mics_dtensor.plan.traffic import buckets
from mics_dtensor.stage import stage
from mics_dtensor.upstream import Unit

logger = getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """What a bucket is while it crosses the replicas: one asynchronous all-reduce, a sum.

    `dtype` None is the unit's reduce dtype: what plain HSDP would send.
    """

    dtype: torch.dtype | None = None

    def dtype_for(self, unit: Unit) -> torch.dtype:
        """The dtype on the wire."""
        return self.dtype or unit.reduce_dtype

    def send(self, flat: torch.Tensor, *, group: dist.ProcessGroup) -> dist.Work:
        """Start; `flat` holds the sum when the work is done. Collective over `group`."""
        work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
        return work


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
    work: dist.Work | None = None

    @torch.no_grad()
    def launch(self, message: Message) -> None:
        """Take the gradients out and start the message. Collective over the replication group.

        Runs on the stream on which the gradients are ready: FSDP2's reduce-scatter stream from a
        hook, the default one after the backward. `flat` is held until it has landed.
        """
        values: list[torch.Tensor | None] = [gradient.take() for gradient in self.gradients]
        self.flat = self._as_it_lies(values)
        if self.flat is not None:
            self.pieces = [value for value in values if value is not None]
        else:
            sizes = [gradient.param.local.numel() for gradient in self.gradients]
            self.flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
            self.pieces = list(torch.split(self.flat, sizes))
            for piece, value in zip(self.pieces, values, strict=True):
                piece.zero_() if value is None else piece.copy_(value.reshape(-1))
        if self.dtype == torch.float16:
            self.flat.div_(self.divisor)  # before the sum, which could overflow
        if self.group is not None and self.flat.numel():
            with stage("second hop", self.names, self.group) as group:
                self.work = message.send(self.flat, group=group)

    def wait(self) -> None:
        """Until the sum is here (on CUDA: until the current stream may use it)."""
        if self.work is not None and self.group is not None:
            with stage("second hop", self.names, self.group):
                self.work.wait()
            self.work = None

    @torch.no_grad()
    def land(self) -> None:
        """Scale, and give every gradient its piece."""
        if self.flat is None:
            return
        if self.divisor != 1 and self.dtype != torch.float16:
            self.flat.div_(self.divisor)
        for gradient, piece in zip(self.gradients, self.pieces, strict=True):
            gradient.put(piece)
        self.flat, self.pieces = None, []

    def only(self, wanted: Sequence[bool]) -> None:
        """Keep the gradients that some replica has."""
        chosen = [keep for keep in range(len(wanted)) if wanted[keep]]
        self.gradients = [self.gradients[keep] for keep in chosen]
        self.pieces = [self.pieces[keep] for keep in chosen] if self.pieces else []

    def _as_it_lies(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The flat storage that all values are views of, in order, padded; else None."""
        if not values or values[0] is None:
            return None
        first, end = values[0], 0
        storage, offset = first.untyped_storage(), int(first.storage_offset())
        padded = (gradient.param.padded_numel for gradient in self.gradients)
        starts: Iterator[int] = accumulate(padded, initial=offset)
        for value, start in zip(values, starts, strict=False):
            if (
                value is None
                or (value.dtype, value.device) != (self.dtype, self.device)
                or not value.is_contiguous()
                or value.untyped_storage().data_ptr() != storage.data_ptr()
                or value.storage_offset() != start
            ):
                return None
            end = start + value.numel()
        return torch.as_strided(first, (end - offset,), (1,), offset)


class Boundary:
    """All buckets of a model, and the agreement about them. One per optimizer step."""

    def __init__(
        self,
        units: Sequence[Unit],
        message: Message,
        *,
        bucket_size_bytes: int,
        early: bool = False,
        static: bool = False,
    ) -> None:
        self.units = units
        self.message = message
        self.early = early
        # In the order of the backward, last unit first, so that early buckets can leave early.
        self.gradients: dict[Unit, list[Gradient]] = {
            unit: [Gradient(p, static) for p in unit.params if p.parameter.requires_grad]
            for unit in reversed(units)
        }
        self.buckets = self._fill(bucket_size_bytes)
        self.left: dict[Gradient, bool] = {}  # by gradients of launched buckets: was it there

    def __iter__(self) -> Iterator[Gradient]:
        for gradients in self.gradients.values():
            yield from gradients

    def set_aside(self) -> None:
        """At entry: gradients that are there count as already reduced."""
        for unit, gradients in self.gradients.items():
            scale = divisor_of(unit) / unit.num_replicas
            for gradient in gradients:
                gradient.set_aside(static_scale=scale)

    def begin_micro_step(self) -> None:
        """Count arrivals anew."""
        for gradient in self:
            gradient.expected, gradient.arrivals = max(1, gradient.arrivals), 0

    def arrive(self, gradient: Gradient, *, last: bool) -> None:
        """A reduced gradient is in `.grad`. In the last micro-step, send every bucket that is
        complete and whose turn it is: as many arrivals as in the micro-step before.

        Correctness does not wait for this: what is not sent here is sent by `finish`, and what
        arrives in a bucket that has left is a delta, with a message of its own.
        """
        gradient.arrive()
        while last and self.early and (bucket := self._next_bucket()) is not None:
            if any(g.arrivals < g.expected for g in bucket.gradients):
                break
            self._launch(bucket)

    def finish(self, *, num_micro_steps: int, problem: str | None) -> None:
        """Agree, send what has not left, and give every gradient its sum.

        Collective over the partition and replication groups of all units. Raises AccumulationError
        on every rank if one has a `problem`, and CommunicationError if a message fails; in both
        cases no `.grad` holds anything of this step.
        """
        had, more = self._agree(num_micro_steps=num_micro_steps, problem=problem)
        deltas = []
        for bucket in self.buckets:
            wanted = [had[gradient] for gradient in bucket.gradients]
            if bucket.gradients[0] in self.left:
                late = [gradient for gradient in bucket.gradients if more[gradient]]
                if late:
                    deltas.append(replace(bucket, gradients=late, flat=None, pieces=[], work=None))
                bucket.only(wanted)
            else:
                bucket.only(wanted)
                bucket.launch(self.message)
        for delta in deltas:
            delta.launch(self.message)
        for bucket in (*self.buckets, *deltas):
            bucket.wait()
        for bucket in (*self.buckets, *deltas):
            bucket.land()
        for gradient in self:
            gradient.settle()

    def abandon(self) -> None:
        """After an exception: wait for what is in flight, then forget the step."""
        for bucket in self.buckets:
            if bucket.work is not None:
                try:
                    bucket.work.wait()
                except RuntimeError as error:  # the first error is the one to raise
                    logger.warning("abandoned second hop of %s: %s", bucket.names, error)
        for gradient in self:
            gradient.abandon()

    def _next_bucket(self) -> Bucket | None:
        return next((b for b in self.buckets if b.gradients[0] not in self.left), None)

    def _launch(self, bucket: Bucket) -> None:
        self.left |= {gradient: gradient.is_present for gradient in bucket.gradients}
        bucket.launch(self.message)

    def _agree(
        self, *, num_micro_steps: int, problem: str | None
    ) -> tuple[dict[Gradient, bool], dict[Gradient, bool]]:
        """Which gradients some replica has; and which of those that left came in again."""
        had = {g: self.left.get(g, g.is_present) for g in self}
        more = {g: g in self.left and g.is_present for g in self}
        meshes: dict[object, list[Unit]] = {}
        for unit in self.gradients:
            key = (ranks_of(unit.shard_group), ranks_of(unit.replicate_group))
            meshes.setdefault(key, []).append(unit)
        if not any(unit.num_replicas > 1 for unit in self.units):
            meshes = {}  # nothing will be sent; a problem of this rank is raised all the same
        of_mesh = [[g for unit in its for g in self.gradients[unit]] for its in meshes.values()]
        ballots = [
            Ballot(
                shard_group=its[0].shard_group,
                replicate_group=its[0].replicate_group,
                device=its[0].device,
                present=(*(had[g] for g in gs), *(more[g] for g in gs if self.early)),
            )
            for its, gs in zip(meshes.values(), of_mesh, strict=True)
        ]
        agreed = agree(ballots, num_micro_steps=num_micro_steps, problem=problem)
        for gradients, present in zip(of_mesh, agreed, strict=True):
            had |= zip(gradients, present, strict=False)
            more |= zip(gradients, present[len(gradients) :], strict=False)
        return had, more

    def _fill(self, bucket_size_bytes: int) -> list[Bucket]:
        """Whole units in order, by group, dtype, scale and root: the same plan on all replicas."""
        alike: dict[object, list[Unit]] = {}
        for unit, gradients in self.gradients.items():
            if gradients:
                dtype = self.message.dtype_for(unit)
                root = unit.root_id if self.early else unit.part
                key = (ranks_of(unit.replicate_group), dtype, divisor_of(unit), root, unit.device)
                alike.setdefault(key, []).append(unit)
        filled: list[Bucket] = []
        for units in alike.values():
            dtype = self.message.dtype_for(units[0])
            sizes = [dtype.itemsize * sum(p.padded_numel for p in u.params) for u in units]
            for positions in buckets(sizes, bucket_size_bytes):
                mine = [units[position] for position in positions]
                filled.append(
                    Bucket(
                        names=", ".join(unit.name for unit in mine),
                        gradients=[g for unit in mine for g in self.gradients[unit]],
                        device=mine[0].device,
                        dtype=dtype,
                        divisor=divisor_of(mine[0]),
                        group=mine[0].replicate_group if mine[0].num_replicas > 1 else None,
                    )
                )
        return filled


def divisor_of(unit: Unit) -> float:
    """What the sum over the replicas is divided by, after FSDP2's reduction in the partition group.

    Without a gradient_divide_factor FSDP2 makes the mean over the shards, and the second hop the
    mean over the replicas; with one, FSDP2 has divided, and the hop is a sum. With one shard FSDP2
    may divide twice (force-sum, fp16), so there the factor is ours.
    """
    if unit.divide_factor is None:
        return unit.num_replicas
    shards = 1 if unit.shard_group is None else unit.shard_group.size()
    return unit.divide_factor if shards == 1 else 1
