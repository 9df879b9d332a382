"""gradient_accumulation: micro-steps reduce inside the partition group, the boundary crosses it.

MiCS, arXiv 2205.00119, section 3.3 (2-hop gradient synchronisation). While the context is open
each FSDP2 unit's mesh is exchanged for one without replicas, so that FSDP2 itself adds every
reduced gradient to that parameter's own `.grad`. At the boundary the second hop is ours
(boundary.py). Outside the context the model is plain HSDP, so nobody can forget the second hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from logging import getLogger
from typing import Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mics_dtensor.accumulation_arguments import refuse_arguments
from mics_dtensor.audit import audit_gradients, lost_at_boundary, unheld_parameter
from mics_dtensor.boundary import Boundary
from mics_dtensor.bucket import Message
from mics_dtensor.errors import AccumulationError
from mics_dtensor.mesh import hop_stages_of
from mics_dtensor.parts import parts_of
from mics_dtensor.plan.options import BUCKET_SIZE_BYTES
from mics_dtensor.stage import named_range
from mics_dtensor.upstream import (
    Unit,
    first_hop_only,
    owed,
    reset_after_exception,
    show_shards,
    units_of,
    whole_units,
)

logger = getLogger(__name__)

State = Literal["open", "partial", "synchronized", "failed"]


@contextmanager
def gradient_accumulation(
    model: nn.Module | Iterable[nn.Module],
    *,
    num_micro_steps: int | None,
    second_hop_dtype: torch.dtype | None = None,
    bucket_size_bytes: int = BUCKET_SIZE_BYTES,
    overlap_boundary: bool = False,
    static_gradients: bool = False,
) -> Iterator[Accumulation]:
    """One optimizer step of `num_micro_steps` micro-steps; None where that is not known beforehand.

    Each micro-step runs in `accumulation.micro_step()`. When the last one exits, every `.grad` is
    what a single process would have: None only where no replica used the parameter. `model` may be
    a list of model parts; units without replicas are summed all the same.

    `second_hop_dtype`: what gradients cross the replicas in; by default each unit's reduce dtype.
    Sums over micro-steps are fp32 either way: in `.grad`, or, for bf16 parameters, in one fp32
    shard more per rank. `bucket_size_bytes`: smaller units share a message; 1 MiB if not given.
    `overlap_boundary`: messages leave during the last backward. `static_gradients`: `.grad` is
    never bound anew, for CUDA graphs; after an exception gradients are zero, not restored.

    Gradients that are there when the first micro-step begins count as synchronised, and are added
    to: zero_grad() belongs before it, or behind the context. set_requires_all_reduce has no say
    inside. Collective: every rank that holds the model calls it. Raises AccumulationError for
    micro-steps that do not add up, for what would corrupt a sum (hooks, a deferral of FSDP2's), and
    for an optimizer step or `clip_grad_norm_` before the last micro-step has ended;
    CommunicationError where a message fails. After any exception `.grad` is what it was before,
    and the next step starts clean.
    """
    parts = parts_of(model)
    units = units_of(parts)
    refuse_arguments(
        num_micro_steps=num_micro_steps,
        second_hop_dtype=second_hop_dtype,
        bucket_size_bytes=bucket_size_bytes,
        overlap_boundary=overlap_boundary,
        static_gradients=static_gradients,
    )
    _refuse(parts, units, static=static_gradients)
    boundary = Boundary(
        units,
        Message(second_hop_dtype, hop_stages_of(parts)),
        bucket_size_bytes=bucket_size_bytes,
        early=overlap_boundary,
        static=static_gradients,
    )
    accumulation = Accumulation(units, boundary, num_micro_steps)
    for pay in owed(units):
        pay()
    with ExitStack() as stack:
        accumulation.enter(stack)
        try:
            yield accumulation
            accumulation.leave()
        except BaseException:
            accumulation.fail()
            raise


class Accumulation:
    """The micro-steps of one optimizer step. Made by gradient_accumulation."""

    def __init__(self, units: list[Unit], boundary: Boundary, announced: int | None) -> None:
        self._units = units
        self._boundary = boundary
        self._announced = announced
        self._num_run = 0
        self._inside = False
        self._is_last = False
        self._state: State = "open"
        self._exchange = ExitStack()
        self._frozen = [
            (param, param.parameter.grad)
            for unit in units
            for param in unit.params
            if not param.parameter.requires_grad
        ]

    @property
    def num_run(self) -> int:
        """Micro-steps that have ended."""
        return self._num_run

    @contextmanager
    def micro_step(self, last: bool | None = None) -> Iterator[None]:
        """One micro-step: any number of forwards and backwards. `last` where it is not announced.

        The last one ends with the second hop, which is collective over the replicas.
        """
        self._begin(last)
        of = "" if self._announced is None else f" of {self._announced}"
        with named_range("micro-step", f"{self._num_run + 1}{of}"):
            try:
                yield
            except BaseException:
                self.fail()
                raise
            self._inside = False
            self._num_run += 1
            if self._is_last:
                self._second_hop()

    def synchronize(self) -> None:
        """The second hop, where one learns only afterwards that the last micro-step was the last.

        Collective; for num_micro_steps=None. After micro_step(last=True) there is nothing to do.
        """
        if self._announced is not None:
            raise AccumulationError(
                f"{self._announced} micro-steps were announced, and the last of them synchronises; "
                "pass num_micro_steps=None to decide with synchronize()"
            )
        if self._inside:
            raise AccumulationError("synchronize() inside a micro_step: call it after the block")
        self._refuse_failed()
        if self._state != "synchronized":
            self._second_hop()

    def enter(self, stack: ExitStack) -> None:
        """Exchange the meshes, place the hooks; all is undone by `stack`."""
        stack.callback(self._exchange.close)
        self._exchange.enter_context(first_hop_only(self._units))
        self._exchange.enter_context(whole_units(self._units, self._boundary.foresee))
        for gradient in self._boundary:
            remove = gradient.param.on_arrival(partial(self._boundary.arrive, gradient))
            self._exchange.callback(remove)
        self._exchange.callback(register_optimizer_step_pre_hook(self._refuse_optimizer).remove)
        _OPEN.set((*_OPEN.get(), self))
        self._exchange.callback(self._close)

    def leave(self) -> None:
        """The context ends without an exception: all micro-steps must have run."""
        if self._state == "synchronized":
            return
        self._refuse_failed()
        if self._announced is None:
            raise AccumulationError(
                f"{self._num_run} micro-steps ran and their gradients were not synchronised: mark "
                "the last with micro_step(last=True), or call synchronize() after it"
            )
        raise AccumulationError(
            f"{self._announced} micro-steps were announced, but {self._num_run} ran; announce the "
            "number that runs, or pass num_micro_steps=None and mark the last"
        )

    def fail(self) -> None:
        """Forget the step: gradients as before it, FSDP2 ready for a forward. Safe to call twice.

        Gradients that are synchronised already stay: what failed after them is not ours.
        """
        if self._state in ("open", "partial"):
            self._state = "failed"
            try:
                reset_after_exception(self._units)
            except RuntimeError as error:  # the one that brought us here is the one to raise
                logger.warning("FSDP2 could not be reset after an exception: %s", error)
            self._boundary.abandon()

    def holds(self, units: Iterable[Unit]) -> bool:
        """Whether one of `units` is accumulated here."""
        mine = {id(unit.group) for unit in self._units}
        return any(id(unit.group) in mine for unit in units)

    def holds_partial_sum_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the gradient of one of `parameters` is that of one replica so far."""
        if self._state == "synchronized" or not self._boundary.has_begun:
            return False
        mine = {id(gradient.param.parameter) for gradient in self._boundary}
        return any(id(parameter) in mine for parameter in parameters)

    def _begin(self, last: bool | None) -> None:
        self._refuse_failed()
        if self._inside:
            raise AccumulationError("micro_step() inside a micro_step(): end the first one before")
        if self._state == "synchronized":
            raise AccumulationError(
                f"micro-step {self._num_run + 1} after the last: "
                + (
                    f"{self._announced} micro-steps were announced"
                    if self._announced is not None
                    else "the gradients are synchronised"
                )
                + "; open a new gradient_accumulation for the next optimizer step"
            )
        announced_last = self._num_run + 1 == self._announced
        if self._announced is not None and last is not None and last != announced_last:
            raise AccumulationError(
                f"micro_step(last={last}) is number {self._num_run + 1} of {self._announced} "
                "announced; leave `last` out, or pass num_micro_steps=None"
            )
        self._is_last = bool(last) or announced_last
        self._inside, self._state = True, "partial"
        self._boundary.begin_micro_step(last=self._is_last)

    def _second_hop(self) -> None:
        try:
            self._boundary.finish(
                num_micro_steps=self._num_run, problem=lost_at_boundary(self._units, self._frozen)
            )
        except BaseException:
            self.fail()
            raise
        show_shards(self._units)  # a replica may have gathered what it did not use
        self._state = "synchronized"
        self._exchange.close()  # from here on the model is plain HSDP again

    def _close(self) -> None:
        _OPEN.set(tuple(other for other in _OPEN.get() if other is not self))

    def _refuse_failed(self) -> None:
        if self._state == "failed":
            raise AccumulationError(
                f"micro-step {self._num_run + 1} failed and the step was abandoned: leave the "
                "context, and run the whole optimizer step again"
            )

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if self.holds_partial_sum_of(stepped):
            raise AccumulationError(_TOO_EARLY.format("an optimizer step"))


_OPEN: ContextVar[tuple[Accumulation, ...]] = ContextVar("open accumulations", default=())
_TOO_EARLY = (
    "{} before the last micro-step has ended would act on the partial sum of one replica: "
    "move it behind the last micro_step()"
)


def refuse_partial_sums(parameters: Iterable[torch.Tensor], *, what: str) -> None:
    """Raise AccumulationError if a gradient of `parameters` is still that of one replica."""
    parameters = list(parameters)
    if any(accumulation.holds_partial_sum_of(parameters) for accumulation in _OPEN.get()):
        raise AccumulationError(_TOO_EARLY.format(what))


def _refuse(parts: list[nn.Module], units: list[Unit], *, static: bool) -> None:
    """Refuse at entry, with nothing changed, what would lose or corrupt a sum."""
    if not units:
        raise AccumulationError(
            "the model has no FSDP units: call torch.distributed.fsdp.fully_shard on it first"
        )
    if any(a.holds(units) for a in _OPEN.get()):
        raise AccumulationError(
            "gradient_accumulation is already open for this model: leave it before opening another"
        )
    if (why := unheld_parameter(parts, units)) is not None:
        raise AccumulationError(why)
    audit_gradients(units, static=static)
