"""Everything that the planner wants to know of a cluster, measured on its ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mics_dtensor.measure import device as on
from mics_dtensor.measure.clock import own_seconds
from mics_dtensor.measure.collectives import hierarchical_timings, timings
from mics_dtensor.measure.device import Shape
from mics_dtensor.measure.groups import Candidate, candidates
from mics_dtensor.measure.unit import unit_timings
from mics_dtensor.plan.calibrate import Measured, UnitTiming
from mics_dtensor.plan.timing import Timing
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import all_gather

BESIDE_BYTES = 64 << 20
"""The gather that products run beside; a smaller one where no larger message is measured."""

WIDTHS = ((1024, 2048, 4096, 8192), (128, 256, 512, 1024))
"""Of the units that are timed, on a GPU and on CPU."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is measured. `sizes` in bytes; `partition_sizes` None: every one that divides."""

    name: str
    sizes: Sequence[int]
    shapes: Sequence[Shape]
    """The model's products; the last is a large square one, for the peak."""
    peak_flops_per_s: float | None
    """Of the device, where it is known; None: the fastest product."""
    partition_sizes: Sequence[int] | None
    repetitions: int


@dataclass(frozen=True)
class Found:
    """What was measured; `hierarchical` are our own collectives, for comparison."""

    measured: Measured
    hierarchical: tuple[Timing, ...]


def survey(
    wanted: Survey, topology: Topology, device: torch.device, say: Callable[[str], None]
) -> Found:
    """Measure all of it. Collective: every rank of the world calls it, and finds the same.

    `say` is told what is being done. Raises ConfigError before anything is measured.
    """
    groups = candidates(topology, wanted.partition_sizes, device_type=device.type)
    plain: list[Timing] = []
    ours: list[Timing] = []
    for candidate in groups:
        say(f"groups of {candidate.num_nodes} x {candidate.ranks_per_node} ranks")
        rounds = {"repetitions": wanted.repetitions}
        plain += timings(candidate, wanted.sizes, device, **rounds)
        ours += hierarchical_timings(candidate, wanted.sizes, device, **rounds)
    say("products, memory, and products beside messages")
    products = on.products(wanted.shapes, device, repetitions=wanted.repetitions)
    of_model = products[:-1]
    largest = max(each.flops_per_s for each in products)
    beside = min(BESIDE_BYTES, wanted.sizes[-1])
    slowdown = 0.0
    if groups:
        slowdown = on.overlap_slowdown(
            groups[-1].group,
            wanted.shapes[0],
            device,
            size_bytes=beside,
            rounds=wanted.repetitions,
        )
    units: list[UnitTiming] = []
    if groups:
        say("what FSDP2 adds to a unit")
        smallest = groups[0].group
        widths = WIDTHS[device.type == "cpu"]
        units = unit_timings(smallest, widths, device, repetitions=wanted.repetitions)
    reserved = torch.tensor(on.reserved_bytes(device), device=device)
    dist.all_reduce(reserved, dist.ReduceOp.MAX)
    measured = Measured(
        name=wanted.name,
        device=device_name(device),
        hosts=topology.names,
        ranks_per_node=topology.ranks_per_node,
        backend=dist.get_backend(),
        timings=tuple(plain),
        products=tuple(of_model),
        peak_flops_per_s=wanted.peak_flops_per_s or largest,
        memory_bytes=on.memory_bytes(device, local_ranks=topology.ranks_per_node),
        memory_bytes_per_s=on.memory_bytes_per_s(
            device, size_bytes=beside, repetitions=wanted.repetitions
        ),
        overlap_slowdown=slowdown,
        units=tuple(units),
        reserved_bytes=int(reserved.item()),
        node_seconds=_node_seconds(wanted, topology, groups, device),
    )
    return Found(measured, tuple(ours))


def device_name(device: torch.device) -> str:
    """The name under which a cluster is measured: the GPU's own, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def _node_seconds(
    wanted: Survey, topology: Topology, groups: Sequence[Candidate], device: torch.device
) -> dict[str, float]:
    """How long each node takes for a product, and for a gather inside it where it has peers."""
    shape = wanted.shapes[0]
    left = torch.randn(shape.rows, shape.inner, device=device, dtype=on.dtype_of(device))
    right = torch.randn(shape.inner, shape.columns, device=device, dtype=on.dtype_of(device))
    seconds = on.own_median(
        own_seconds(lambda: left @ right, device, repetitions=wanted.repetitions)
    )
    inside = [each for each in groups if each.num_nodes == 1]
    if inside:
        group, size = inside[-1].group, min(wanted.sizes[-1], 8 << 20)
        shard = torch.zeros(size // 4 // group.size(), device=device)
        whole = torch.zeros(shard.numel() * group.size(), device=device)
        seconds += on.own_median(
            own_seconds(
                lambda: all_gather(whole, shard, group=group),
                device,
                repetitions=wanted.repetitions,
            )
        )
    host = topology.names[topology.node_of(dist.get_rank())]
    return on.seconds_by_host(seconds, host)


def name_of_this(topology: Topology) -> str:
    """A name for the measured cluster: its size, its first host and the day."""
    day = time.strftime("%Y-%m-%d")
    return f"{topology.num_nodes} x {topology.ranks_per_node} ({socket.gethostname()}, {day})"
