"""What FSDP2 adds to a unit beside products and messages: its hooks, and copies around messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics_dtensor.collectives import FlatAllGather, FlatReduceScatter
from mics_dtensor.measure.clock import of_the_slowest, own_seconds
from mics_dtensor.measure.device import dtype_of
from mics_dtensor.mesh import mesh_over
from mics_dtensor.plan.calibrate import UnitTiming

NUM_UNITS = 4
ROWS = 4  # few: the unit, not its products, is timed
REDUCE_ITEMSIZE = 4  # fp32


class _SilentGather(FlatAllGather):
    """Sends nothing: what is left is what FSDP2 does around it."""

    def __call__(self, *_arguments: Any, **_named: Any) -> None:
        """Leave the output as it is."""


class _SilentReduce(FlatReduceScatter):
    """Sends nothing."""

    def __call__(self, *_arguments: Any, **_named: Any) -> None:
        """Leave the output as it is."""


def unit_timings(
    group: dist.ProcessGroup,
    widths: Sequence[int],
    device: torch.device,
    *,
    repetitions: int,
) -> list[UnitTiming]:
    """Seconds that sharding over `group` adds to forward and backward of a [width, width] unit.

    All ranks at once, nothing sent: a micro-step of the sharded units less one of the same modules
    alone. Collective over the world.
    """
    return [_timing(group, width, device, repetitions) for width in widths]


def _timing(
    group: dist.ProcessGroup, width: int, device: torch.device, repetitions: int
) -> UnitTiming:
    dtype = dtype_of(device)
    rows = torch.randn(ROWS, width, device=device, dtype=dtype)
    mesh = mesh_over(group, device_type=device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    seconds = []
    for sharded in (True, False):
        modules = [nn.Linear(width, width, bias=False, device=device) for _ in range(NUM_UNITS)]
        model = nn.Sequential(*modules)
        if sharded:
            for module in (*modules, model):
                unit = fully_shard(module, mesh=mesh, mp_policy=policy)
                unit.set_custom_all_gather(_SilentGather())
                unit.set_custom_reduce_scatter(_SilentReduce())
        else:
            model.to(dtype)

        def micro_step(model: nn.Module = model) -> None:
            model(rows).sum().backward()

        own = own_seconds(micro_step, device, repetitions=repetitions)
        seconds.append(of_the_slowest(own, device) / NUM_UNITS)
    sharded_s, alone_s = seconds
    numel = width * width
    gathered, reduced = numel * dtype.itemsize, numel * REDUCE_ITEMSIZE
    return UnitTiming(message_bytes=2 * gathered + reduced, seconds=sharded_s - alone_s)
