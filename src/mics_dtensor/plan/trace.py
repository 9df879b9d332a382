"""The memory of a real step, traced: FSDP2 on fake tensors in a fake world, without a GPU.

The caller starts the world with torch's "fake" backend, builds the model on meta and shards it
there, outside of the trace. One module a unit: torch's tracker counts a unit of two modules twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mics_dtensor.upstream.tracing import fake_tensors, memory_tracker


def traced_peak(
    model: nn.Module,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    loss_of: Callable[..., torch.Tensor],
    input_shapes: Sequence[tuple[int, ...]],
) -> Mapping[str, int]:
    """Bytes by kind when this rank holds most in a step; "Total" is their sum.

    `loss_of(*inputs)` runs the model on int64 inputs of `input_shapes`. A step outside of the trace
    goes first: without it DTensor's shadow operations are booked, at global shape, as states.
    """
    with fake_tensors():
        model.to_empty(device="cpu")
        optimizer = optimizer_of(model)
        inputs = [torch.zeros(shape, dtype=torch.int64) for shape in input_shapes]

        loss_of(*inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        tracker = memory_tracker(model, optimizer)
        tracker.track_inputs(tuple(inputs))
        with tracker:
            loss_of(*inputs).backward()  # type: ignore[no-untyped-call]
            peak = tracker.get_tracker_snapshot("peak")
    (by_kind,) = peak.values()
    return {str(getattr(kind, "value", kind)): size for kind, size in by_kind.items()}
