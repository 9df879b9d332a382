"""torch's fake tensors, its memory tracker, and whether it profiles: private all three."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this process (torch.profiler, emit_nvtx)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors without storage, in which a step of any size runs; meta tensors may enter."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_store() -> Any:
    """The store of a world of the backend "fake", which this import registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_layouts() -> None:
    """Empty DTensor's memory of how operators lay out results, which names groups by their world.

    A mesh of the next world is equal to one of the last, and its results would be of groups that
    are gone.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def memory_tracker(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The FSDPMemTracker of torch, a context: it books every live storage under a kind."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    return FSDPMemTracker(model, optimizer)
