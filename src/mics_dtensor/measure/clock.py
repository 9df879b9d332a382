"""Seconds of a call on all ranks: the slowest rank decides, the median of repetitions counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

SMALL_BYTES = 8 << 20
"""Calls below this are repeated until they have moved as much: one alone is noise."""


def synchronize(device: torch.device) -> None:
    """Until the device has done what was enqueued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def calls_at_once(size_bytes: int) -> int:
    """How many calls are timed together."""
    return max(1, min(20, SMALL_BYTES // max(size_bytes, 1)))


def own_seconds(
    call: Callable[[], object], device: torch.device, *, repetitions: int, calls: int = 1
) -> list[float]:
    """Seconds of a call on this rank, in each repetition; one call goes before.

    Every rank of the world starts a repetition together. Collective over the world.
    """
    call()
    seconds = []
    for _ in range(repetitions):
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def of_the_slowest(seconds: list[float], device: torch.device) -> float:
    """The median over the repetitions of the slowest rank's seconds. Collective over the world."""
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(median(most.tolist()))
