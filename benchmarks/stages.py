"""Collectives that count themselves: around FSDP2's, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.phases import Phases
from mics_dtensor.upstream import AllGather, ReduceScatter, units_of


class CountedAllGather(AllGather):
    """`inner`, with what it sends counted as the gather of the phase that runs."""

    def __init__(self, inner: AllGather, phases: Phases) -> None:
        self.inner = inner
        self.phases = phases

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.phases.mark(f"{self.phases.now} rest")
        work: dist.Work | None = self.inner(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()
        self.phases.mark(f"{self.phases.now} gather")
        return work


class CountedReduceScatter(ReduceScatter):
    """`inner`, with what it sends counted as reduction."""

    def __init__(self, inner: ReduceScatter, phases: Phases) -> None:
        self.inner = inner
        self.phases = phases

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.phases.mark(f"{self.phases.now} rest")
        work: dist.Work | None = self.inner(output_tensor, input_tensor, group, op, async_op)
        if work is not None:
            work.wait()
        self.phases.mark("reduction")
        return work


@contextmanager
def counted_stages(parts: Sequence[nn.Module], phases: Phases) -> Iterator[None]:
    """Within, every collective of FSDP2's units is counted by itself, between two barriers."""
    before = [(unit, unit.all_gather, unit.reduce_scatter) for unit in units_of(parts)]
    for unit, all_gather, reduce_scatter in before:
        unit.set_collectives(
            CountedAllGather(all_gather, phases), CountedReduceScatter(reduce_scatter, phases)
        )
    phases.counting = True
    try:
        yield
    finally:
        phases.counting = False
        for unit, all_gather, reduce_scatter in before:
            unit.set_collectives(all_gather, reduce_scatter)
