"""What a rank's device can do: matrix products, memory, and both beside messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from mics_dtensor.measure.clock import of_the_slowest, own_seconds, synchronize
from mics_dtensor.plan.calibrate import Product
from mics_dtensor.upstream import all_gather


@dataclass(frozen=True)
class Shape:
    """A product of the model: [rows, inner] x [inner, columns]."""

    name: str
    rows: int
    inner: int
    columns: int


def dtype_of(device: torch.device) -> torch.dtype:
    """What products run in: bf16, on CPU fp32."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def products(shapes: Sequence[Shape], device: torch.device, *, repetitions: int) -> list[Product]:
    """The rate of each product on the slowest rank. Collective over the world."""
    rates = []
    for shape in shapes:
        left = torch.randn(shape.rows, shape.inner, device=device, dtype=dtype_of(device))
        right = torch.randn(shape.inner, shape.columns, device=device, dtype=dtype_of(device))
        own = own_seconds(lambda a=left, b=right: a @ b, device, repetitions=repetitions)  # type: ignore[misc]
        seconds = of_the_slowest(own, device)
        flops = 2.0 * shape.rows * shape.inner * shape.columns
        rates.append(
            Product(
                name=shape.name,
                rows=shape.rows,
                inner=shape.inner,
                columns=shape.columns,
                flops_per_s=flops / seconds,
            )
        )
    return rates


def memory_bytes_per_s(device: torch.device, *, size_bytes: int, repetitions: int) -> float:
    """Bytes that a rank reads and writes in a second, all ranks at once. Collective."""
    source = torch.zeros(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    own = own_seconds(lambda: target.copy_(source), device, repetitions=repetitions)
    return 2.0 * source.numel() * 4 / of_the_slowest(own, device)


def memory_bytes(device: torch.device, *, local_ranks: int) -> int:
    """Of a rank: the GPU's, or its part of the host's."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def reserved_bytes(device: torch.device) -> int:
    """What a rank holds beside tensors, once all groups have communicated: the memory floor.

    On a GPU: what is not free, less what torch's allocator holds. On CPU: the process itself.
    """
    if device.type == "cpu":
        statm = Path("/proc/self/statm")
        pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        return pages * os.sysconf("SC_PAGE_SIZE")
    module = torch.get_device_module(device)
    synchronize(device)
    module.empty_cache()
    free, total = module.mem_get_info(device)
    return int(total - free - module.memory_reserved(device))


def overlap_slowdown(
    group: dist.ProcessGroup, shape: Shape, device: torch.device, *, size_bytes: int, rounds: int
) -> float:
    """Seconds that products lose for each second of an all-gather that runs beside them.

    Products long enough to cover the gather, alone and beside it. Collective over the world.
    """
    ranks = group.size()
    shard = torch.zeros(max(1, size_bytes // 4 // ranks), device=device)
    whole = torch.zeros(shard.numel() * ranks, device=device)
    left = torch.randn(shape.rows, shape.inner, device=device, dtype=dtype_of(device))
    right = torch.randn(shape.inner, shape.columns, device=device, dtype=dtype_of(device))

    def gather() -> None:
        all_gather(whole, shard, group=group)

    message_s = of_the_slowest(own_seconds(gather, device, repetitions=rounds), device)
    once_s = of_the_slowest(own_seconds(lambda: left @ right, device, repetitions=rounds), device)
    repeats = max(1, round(1.5 * message_s / once_s))

    def work() -> None:
        for _ in range(repeats):
            left @ right

    def both() -> None:
        sent = all_gather(whole, shard, group=group, async_op=True)
        work()
        if sent is not None:
            sent.wait()

    alone_s = of_the_slowest(own_seconds(work, device, repetitions=rounds), device)
    beside_s = of_the_slowest(own_seconds(both, device, repetitions=rounds), device)
    return max(0.0, (beside_s - alone_s) / message_s)


def seconds_by_host(seconds: float, host: str) -> dict[str, float]:
    """The slowest rank's seconds of each host, in the order of the ranks. Collective."""
    told: list[tuple[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (host, seconds))
    by_host: dict[str, float] = {}
    for each in told:
        if each is not None:
            by_host[each[0]] = max(each[1], by_host.get(each[0], 0.0))
    return by_host


def own_median(seconds: Sequence[float]) -> float:
    """Of this rank alone."""
    return median(seconds)
