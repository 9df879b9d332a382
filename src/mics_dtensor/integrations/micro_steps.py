"""MicroSteps: gradient_accumulation for a training loop that is not ours, held open between calls.

The loops of Lightning, Accelerate and transformers run one micro-step after another, without a
block around all of an optimizer step that could be a `with`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypedDict

import torch
from torch import nn

from mics_dtensor.accumulate import Accumulation, gradient_accumulation
from mics_dtensor.errors import AccumulationError


class BoundaryOptions(TypedDict, total=False):
    """Those of gradient_accumulation that a framework's user may choose."""

    second_hop_dtype: torch.dtype | None
    bucket_size_bytes: int
    overlap_boundary: bool


class MicroSteps:
    """The micro-steps of one model: the first opens a gradient_accumulation, the last closes it.

    Collective as gradient_accumulation is: every rank that holds the model runs the same number.
    """

    def __init__(
        self, model: nn.Module | Iterable[nn.Module], options: BoundaryOptions | None = None
    ) -> None:
        self._parts = [model] if isinstance(model, nn.Module) else list(model)
        self._options = options or BoundaryOptions()
        self._accumulation: Accumulation | None = None
        self._step = ExitStack()  # the gradient_accumulation that is open
        self._micro_step = ExitStack()  # the micro_step that is open
        self._is_last = False

    @property
    def is_open(self) -> bool:
        """Whether an optimizer step has begun and its last micro-step has not ended."""
        return self._accumulation is not None

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """One micro-step; the second hop is complete when the `last` one has ended.

        After an exception the optimizer step is abandoned: gradients are what they were before it.
        """
        self.begin(last=last)
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise
        self.end()

    def begin(self, *, last: bool) -> None:
        """The micro-step begins, before its forward."""
        if self._accumulation is None:
            opened = gradient_accumulation(self._parts, num_micro_steps=None, **self._options)
            self._accumulation = self._step.enter_context(opened)
        self._is_last = last
        self._micro_step.enter_context(self._accumulation.micro_step(last=last))

    def end(self) -> None:
        """The micro-step ends, after its backward. Where none is open there is nothing to do."""
        try:
            self._micro_step.close()
            if self._is_last:
                self._step.close()
        except BaseException:
            self._forget()
            raise
        if self._is_last:
            self._forget()

    def abandon(self, error: BaseException | None = None) -> None:
        """The loop ends in the middle of an optimizer step, for instance by an exception."""
        if self._accumulation is None:
            return
        error = error or AccumulationError("the loop ended before the last micro-step")
        try:
            for opened in (self._micro_step, self._step):
                try:
                    opened.__exit__(type(error), error, error.__traceback__)
                except BaseException as said:
                    if said is not error:
                        raise
        finally:
            self._forget()

    def _forget(self) -> None:
        self._accumulation, self._is_last = None, False
        self._step, self._micro_step = ExitStack(), ExitStack()
