"""The moment before a unit's parameters are gathered, by whatever road FSDP2 comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mics_dtensor.upstream.units import Unit


def before_unshard(unit: Unit, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` before FSDP2 gathers `unit`: in its forward, a prefetch, or unshard().

    Returns the undoing. A forward pre-hook would come too late for a prefetch. On CUDA `call` runs
    on the stream on which FSDP2 then copies the shards in, so that nothing else waits for it.
    """
    group = unit.group
    its = partial(_unshard, unit, group.unshard, call)
    group.unshard = its

    def undo() -> None:
        if vars(group).get("unshard") is its:
            del group.unshard

    return undo


def do_before_unshard(units: Iterable[Unit]) -> None:
    """Now, what was to be done before the next gather: somebody is to read the shards."""
    for unit in units:
        its = vars(unit.group).get("unshard")
        if isinstance(its, partial) and its.func is _unshard:
            its.args[2]()


def _unshard(
    unit: Unit, then: Callable[[bool], None], call: Callable[[], None], async_op: bool = False
) -> None:
    with _stream_of_gather(unit, async_op=async_op):
        call()
    then(async_op)


@contextmanager
def _stream_of_gather(unit: Unit, *, async_op: bool) -> Iterator[None]:
    group = unit.group
    if unit.device.type == "cpu" or unit.num_shards == 1:  # with one shard FSDP2 copies later, here
        yield
        return
    stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    with group.device_handle.stream(stream):
        yield


def set_post_optim_event(parts: Iterable[nn.Module], event: torch.Event | None) -> None:
    """What the gathers of the next forward wait for; None: for all that is queued by then."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_post_optim_event(event)  # type: ignore[arg-type]
