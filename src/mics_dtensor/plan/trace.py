"""The memory of a real step, traced: FSDP2 on fake tensors in a fake world, without a GPU.

The caller starts the world with torch's "fake" backend, builds the model on meta and shards it
there, outside of the trace. One module a unit: torch's tracker counts a unit of two modules twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mics_dtensor.upstream.tracing import fake_tensors, memory_tracker

Kinds = Mapping[str, int]
"""Bytes by kind; "Total" is their sum."""


def traced_peak(
    model: nn.Module,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    loss_of: Callable[..., torch.Tensor],
    input_shapes: Sequence[tuple[int, ...]],
) -> Kinds:
    """Bytes by kind when this rank holds most in a step of one micro-step."""
    return traced_moments(model, optimizer_of, loss_of, input_shapes)["peak"]


def traced_moments(
    model: nn.Module,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    loss_of: Callable[..., torch.Tensor],
    input_shapes: Sequence[tuple[int, ...]],
    *,
    num_micro_steps: int = 1,
) -> dict[str, Kinds]:
    """Bytes by kind at every moment that the tracker knows of a step, and at its "peak".

    A moment is named "unit|state|number|micro-step", the unit as in `model`. `loss_of(*inputs)`
    runs the model on int64 inputs of `input_shapes`. A step outside of the trace goes first:
    without it DTensor's shadow operations are booked, at global shape, as states.
    """
    moments: dict[str, Kinds] = {}
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
            for micro_step in range(num_micro_steps):
                if micro_step:  # else it refuses a second forward; the peak is kept
                    tracker.reset_mod_stats()
                loss_of(*inputs).backward()  # type: ignore[no-untyped-call]
                for name, by_kind in _by_unit(tracker):
                    moments[f"{name}|{micro_step}"] = by_kind
            moments["peak"] = _kinds(tracker.get_tracker_snapshot("peak"))
    return moments


def _by_unit(tracker: Any) -> Iterator[tuple[str, Kinds]]:
    for its in tracker.memory_tracking.values():
        _, _, name = its.mod_fqn.partition(".")  # without the model's own name; empty: the root
        for state, snapshots in its.snapshots.items():
            for number, snapshot in enumerate(snapshots):
                yield f"{name}|{state.value}|{number}", _kinds(snapshot)


def _kinds(snapshot: Mapping[Any, Mapping[Any, int]]) -> Kinds:
    (by_kind,) = snapshot.values()
    return {str(getattr(kind, "value", kind)): size for kind, size in by_kind.items()}
