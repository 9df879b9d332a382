"""A rank that raises or stops in a stage is an error on every rank, within the timeout."""

import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, said_by_all, shard, stack
from torch import nn

from mics_dtensor import apply_mics, gloo
from mics_dtensor import mesh as mesh_module
from mics_dtensor.errors import CommunicationError
from mics_dtensor.stage import ALL_UNITS, stage
from mics_dtensor.topology import Topology

TIMEOUT_S = 1.0
SLACK_S = 6.0  # this machine's other work


def one_step(model: nn.Module) -> None:
    model(batch(dist.get_rank())).sum().backward()


def gather_ahead(model: nn.Module) -> None:
    model.layers[1].unshard(async_op=True).wait()  # type: ignore[index, union-attr]
    one_step(model)  # the other node heard nothing yet: its part of the gather was done


def stop(*_: object, **__: object) -> None:
    time.sleep(TIMEOUT_S + 1)
    raise RuntimeError("stopped for too long")


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("the network is gone")


def at_call(number: int, act: Callable[..., None], real: Callable[..., object]) -> object:
    calls = iter(range(10_000))

    def collective(*args: object, **kwargs: object) -> object:
        return act() if next(calls) == number else real(*args, **kwargs)

    return collective


CASES = [
    # what goes wrong on rank 1, in which collective, at which of its calls, what runs
    ("stops in the first stage", stop, "all_gather", 0, one_step),
    ("raises in the first stage", fail, "all_gather", 0, one_step),
    ("raises in the second stage of the second unit", fail, "all_gather", 4, one_step),
    ("raises in a reduction", fail, "all_to_all_single", 0, one_step),
    ("stops in the second reduction", stop, "all_to_all_single", 2, one_step),
    ("stops while another gathers ahead", stop, "all_gather", 2, gather_ahead),
    ("raises while another gathers ahead", fail, "all_gather", 2, gather_ahead),
]


@ranks(4, timeout_s=100)
def test_every_rank_hears_of_it() -> None:
    rank = dist.get_rank()
    for what, act, name, call, run in CASES:
        short = timedelta(seconds=TIMEOUT_S)
        model = shard(stack(), mesh_of(1, 4))
        with mock.patch.object(mesh_module, "timeout_of", return_value=short):
            apply_mics(model, topology=Topology.uniform(world_size=4, ranks_per_node=2))
        home = dist if name == "all_to_all_single" else gloo
        real = getattr(home, name)
        act_here = at_call(call, act, real) if rank == 1 else real
        begin_s = time.monotonic()
        said = ""
        with mock.patch.object(home, name, act_here):
            try:
                run(model)
            except CommunicationError as error:
                said = str(error)
        took_s = time.monotonic() - begin_s
        assert said, f"{what}: not heard of"
        assert took_s < TIMEOUT_S + SLACK_S, (what, took_s)
        assert f"on rank {rank}" in said, (what, said)
        assert any(f"unit {unit}" in said for unit in ("layers.0", "layers.1", "(root)")), said
        assert any(its in said for its in ("between nodes", "within the node")), said
        assert "in the group of ranks [" in said, said
        said_by_all(said)
        torch.distributed.barrier()


@ranks(2)
def test_a_stage_that_is_for_all_units_says_so() -> None:
    world = dist.group.WORLD
    with (
        pytest.raises(CommunicationError, match="agreement failed for all units on rank"),
        stage("agreement", ALL_UNITS, world),
    ):
        raise RuntimeError("gone")
    with (
        pytest.raises(CommunicationError, match="gather failed for unit a on rank"),
        stage("gather", "a", world),
    ):
        raise RuntimeError("gone")
