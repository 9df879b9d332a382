"""The second hop: at the boundary of an optimizer step, gradients cross the replicas.

Which gradients take part is agreed by all replicas, in an order fixed beforehand; zeros stand in
for what a replica lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from logging import getLogger

from mics_dtensor.agreement import Ballot, agree
from mics_dtensor.bucket import Bucket, Message
from mics_dtensor.gradient import Gradient
from mics_dtensor.mesh import ranks_of
from mics_dtensor.plan.second_hop import buckets
from mics_dtensor.slices import slice_of
from mics_dtensor.upstream import Unit, owe

logger = getLogger(__name__)

IN_FLIGHT = 2
"""Messages at a time: more would hold more buffers, and the link carries one after the other."""


AHEAD = 1
"""Messages that leave before the agreement, which then takes no time of its own: gloo works on two
at a time, and one of them is the agreement."""


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
            unit: [
                Gradient(p, static, slice_of(p.parameter))
                for p in unit.params
                if p.parameter.requires_grad
            ]
            for unit in reversed(units)
        }
        self.buckets = self._fill(bucket_size_bytes)
        self.left: dict[Gradient, bool] = {}  # by gradients of launched buckets: was it there
        self.may_leave = False  # early, and in the last micro-step
        self.has_begun = False  # something arrives: gradients found before are set aside

    def __iter__(self) -> Iterator[Gradient]:
        for gradients in self.gradients.values():
            yield from gradients

    def set_aside(self) -> None:
        """Once, before anything arrives: gradients that are there count as already reduced."""
        if self.has_begun:
            return
        self.has_begun = True
        for bucket in self.buckets:
            num_replicas = 1 if bucket.group is None else bucket.group.size()
            for gradient in bucket.gradients:
                gradient.set_aside(static_scale=bucket.divisor / num_replicas)

    def begin_micro_step(self, *, last: bool) -> None:
        """Count arrivals anew; in the last micro-step buckets may leave early."""
        self.set_aside()
        for gradient in self:
            gradient.expected, gradient.arrivals = max(1, gradient.arrivals), 0
        self.may_leave = self.early and last

    def foresee(self, unit: Unit) -> None:
        """FSDP2 is about to reduce the gradients of `unit`, or to find that it has none."""
        self.set_aside()  # a backward outside of any micro-step
        for gradient in self.gradients[unit]:
            gradient.foresee(counts_unused=unit.reduces_unused_parameters)

    def arrive(self, gradient: Gradient) -> None:
        """A reduced gradient is in `.grad`. In the last micro-step, send every bucket that is
        complete and whose turn it is: as many arrivals as in the micro-step before.

        Correctness does not wait for this: what is not sent here is sent by `finish`, and what
        arrives in a bucket that has left is a delta, with a message of its own.
        """
        gradient.arrive()
        for bucket in self._unsent() if self.may_leave else ():
            if any(g.arrivals < g.expected for g in bucket.gradients):
                break
            self._launch(bucket)

    def finish(self, *, num_micro_steps: int, problem: str | None) -> None:
        """Agree, send what has not left, and give every gradient its sum.

        Collective over the partition and replication groups of all units. Raises AccumulationError
        on every rank if one has a `problem`, and CommunicationError if a message fails; in both
        cases no `.grad` holds anything of this step.
        """
        for bucket in self._before_agreement():
            self._launch(bucket)
        self.may_leave = False
        had = {g: self.left.get(g, g.is_present) for g in self}
        more = {g: g.is_present for g in self.left} if self.early else {}
        self._agree([had, more], num_micro_steps=num_micro_steps, problem=problem)
        for gradient in self:
            gradient.param.remember(sent=had[gradient])
        deltas: list[Bucket] = []
        for position, bucket in enumerate(self.buckets):
            wanted = [had[gradient] for gradient in bucket.gradients]
            if bucket.gradients[0] in self.left:
                late = [gradient for gradient in bucket.gradients if more.get(gradient)]
                if late:
                    deltas.append(replace(bucket, gradients=late, flat=None, pieces=[], work=None))
                bucket.only(wanted)
            else:
                bucket.only(wanted)
                bucket.launch(self.message)
            if position >= IN_FLIGHT:
                self.buckets[position - IN_FLIGHT].wait()
        for delta in deltas:
            delta.launch(self.message)
        self.buckets += deltas  # in flight like the others, should one fail
        for bucket in self.buckets:
            bucket.wait()
        for bucket in self.buckets:
            bucket.land()
        for gradient in self:
            gradient.settle(present=had[gradient])

    def abandon(self) -> None:
        """After an exception: wait for what is in flight, then forget the step.

        In a micro-step whose messages leave early, replicas have sent more or fewer of them. Zeros
        are sent for the others, or a later message would meet one of this step; but one replica
        may not even have failed: nothing is waited for before the next step begins.
        """
        if self.may_leave:
            self._send_zeros(staged=False)
            owe(self.units, self.even_out)
        else:
            self._wait_for_lost()
        for gradient in self if self.has_begun else ():
            gradient.abandon()

    def even_out(self) -> None:
        """Finish what `abandon` has left to do. Collective over the replicas."""
        if not self.may_leave:
            return
        self._send_zeros(staged=True)
        self.may_leave = False
        self._wait_for_lost()

    def _send_zeros(self, *, staged: bool) -> None:
        """For what has not left; what goes in stages waits for others as it starts."""
        try:
            for bucket in list(self._unsent()):
                if staged or not self.message.is_staged(bucket.group):
                    bucket.launch_zeros(self.message)
                    self.left |= dict.fromkeys(bucket.gradients, False)
        except RuntimeError as error:  # the first error is the one to raise
            logger.warning("zeros for an abandoned second hop: %s", error)

    def _wait_for_lost(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                try:
                    bucket.work.wait()
                except RuntimeError as error:  # the first error is the one to raise
                    logger.warning("abandoned second hop of %s: %s", bucket.names, error)

    def _before_agreement(self) -> list[Bucket]:
        """The same on every replica: all that have not left, if early; else the first, if the last
        step sent it whole, so that no zeros are sent for what nobody uses.
        """
        if self.early:
            return list(self._unsent())
        first = islice(self._unsent(), AHEAD)
        return [bucket for bucket in first if all(g.param.was_sent for g in bucket.gradients)]

    def _unsent(self) -> Iterator[Bucket]:
        sent = (bucket for bucket in self.buckets if bucket.group is not None)
        return (bucket for bucket in sent if bucket.gradients[0] not in self.left)

    def _launch(self, bucket: Bucket) -> None:
        self.left |= {gradient: gradient.is_present for gradient in bucket.gradients}
        bucket.launch(self.message)

    def _agree(
        self, told: Sequence[dict[Gradient, bool]], *, num_micro_steps: int, problem: str | None
    ) -> None:
        """On the number of micro-steps; and each flag of `told` is set where one rank has it so."""
        meshes: dict[object, list[Unit]] = {}
        for unit in self.gradients:
            key = (ranks_of(unit.shard_group), ranks_of(unit.replicate_group))
            meshes.setdefault(key, []).append(unit)
        of_mesh = [[g for unit in its for g in self.gradients[unit]] for its in meshes.values()]
        asked = [[(flags, g) for flags in told for g in gs if g in flags] for gs in of_mesh]
        ballots = [
            Ballot(
                shard_group=its[0].shard_group,
                replicate_group=its[0].replicate_group,
                device=its[0].device,
                present=tuple(flags[gradient] for flags, gradient in its_flags),
            )
            for its, its_flags in zip(meshes.values(), asked, strict=True)
        ]
        agreed = agree(ballots, num_micro_steps=num_micro_steps, problem=problem)
        for its_flags, answers in zip(asked, agreed, strict=True):
            for (flags, gradient), answer in zip(its_flags, answers, strict=True):
                flags[gradient] = answer

    def _fill(self, bucket_size_bytes: int) -> list[Bucket]:
        """Whole units in order, by group, dtype, scale and root: the same plan on all replicas."""
        alike: dict[object, list[Unit]] = {}
        for unit, gradients in self.gradients.items():
            if gradients:
                dtype = self.message.dtype_for(unit)
                root = unit.root_id if self.early else unit.part
                key = (ranks_of(unit.replicate_group), dtype, divisor_of(unit), root, unit.device)
                sliced = gradients[0].slice is not None
                alike.setdefault((*key, sliced), []).append(unit)
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
    return unit.divide_factor if unit.num_shards == 1 else 1
