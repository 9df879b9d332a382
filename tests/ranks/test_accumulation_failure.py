"""After a failure `.grad` is as before, and the next step is clean (hazards 1.7, 1.9, 1.16)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import Sharding, mesh_of, shard_toy
from harness.ranks import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from mics_dtensor.accumulate import Accumulation, gradient_accumulation
from mics_dtensor.errors import AccumulationError, MicsError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer

WIDTH = 6
WAYS: tuple[dict[str, Any], ...] = ({}, {"overlap_boundary": True, "bucket_size_bytes": 1})
PLACES = ("before a unit", "inside a unit", "after a unit", "in the backward", "after the backward")


class Failure(Exception):
    """What a test raises."""


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
        raise Failure


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.fails:
            raise Failure
        return self.second(x)


class Chain(nn.Module):
    """Three blocks; fails at a place of the middle one when told to."""

    def __init__(self, *, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.place = ""
        self.use_reentrant = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, layer in enumerate(self.layers):
            here = self.place if position == 1 else ""
            if here == "before a unit":
                raise Failure
            layer.fails = here == "inside a unit"
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
            if here == "after a unit":
                raise Failure
            if here == "in the backward":
                x = _FailingBackward.apply(x)
        return self.head(x)


def chain(*, dtype: torch.dtype = torch.float32, checkpointing: bool | None = None) -> Chain:
    torch.manual_seed(7)
    model = Chain(checkpointing=checkpointing).to(dtype)
    mesh, sharding = mesh_of(2, 2), Sharding(reduce_dtype=torch.float32)
    for layer in model.layers:
        shard_toy(layer, sharding, mesh)
    shard_toy(model, sharding, mesh)
    return model


def data(seed: int) -> torch.Tensor:
    """Other data on every rank and in every micro-step; the input needs a gradient in half."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).requires_grad_(bool(seed % 2))


def micro_step(accumulation: Accumulation, model: Chain, seed: int, place: str = "") -> None:
    model.place = place
    with accumulation.micro_step():
        x = data(seed).to(next(model.parameters()).dtype)
        if model.use_reentrant:  # it needs one input that requires a gradient
            x.requires_grad_()
        loss = model(x).square().sum()
        loss.backward()
        if place == "after the backward":
            raise Failure


def step(model: Chain, *, fail_in: int | None = None, place: str = "", **options: Any) -> None:
    with gradient_accumulation(model, num_micro_steps=3, **options) as accumulation:
        for seed in range(3):
            micro_step(accumulation, model, seed, place if seed == fail_in else "")


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    local = [None if p.grad is None else p.grad.to_local() for p in model.parameters()]
    return [None if gradient is None else gradient.clone() for gradient in local]


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def every_failure_leaves_no_trace(**how: Any) -> None:
    for options in WAYS:
        clean = chain(**how)
        step(clean, **options)
        wanted = gradients(clean)
        model = chain(**how)
        for fail_in in (0, 1, 2):
            for place in PLACES:
                with pytest.raises(Failure):
                    step(model, fail_in=fail_in, place=place, **options)
                assert same(gradients(model), [None] * len(wanted)), (fail_in, place)
                if fail_in != 1:
                    continue  # several failures in a row, too
                step(model, **options)
                assert same(gradients(model), wanted), (options, fail_in, place)
                model.zero_grad()
        step(model, **options)
        assert same(gradients(model), wanted), options


@ranks(4, timeout_s=120)
def test_an_exception_anywhere_leaves_no_trace() -> None:
    every_failure_leaves_no_trace()


@ranks(4, timeout_s=120)
def test_an_exception_with_narrow_parameters_leaves_no_trace() -> None:
    every_failure_leaves_no_trace(dtype=torch.bfloat16)


@pytest.mark.parametrize("use_reentrant", [True, False])
@ranks(4, timeout_s=120)
def test_an_exception_under_checkpointing_leaves_no_trace(use_reentrant: bool) -> None:
    every_failure_leaves_no_trace(checkpointing=use_reentrant)


class Skipping(nn.Module):
    """Three units, of which a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.left_out: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, layer in enumerate(self.layers):
            x = x if position == self.left_out else layer(x)
        return x


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("sliced", [False, True])
@ranks(4)
def test_replicas_that_had_sent_other_messages_meet_again(num_shards: int, sliced: bool) -> None:
    """Of messages that leave early; and none waits for the others before the next step."""
    mesh, is_first = mesh_of(4 // num_shards, num_shards), dist.get_rank() < num_shards

    def made() -> Skipping:
        torch.manual_seed(3)
        model = Skipping()
        for layer in model.layers:
            shard_toy(layer, Sharding(), mesh)
        if sliced:
            optimizers.append(ReplicaShardedOptimizer(model, torch.optim.SGD, lr=0.1))
        return model

    def step(model: Skipping, left_out: int | None = None, fails: str = "") -> None:
        opened = gradient_accumulation(model, num_micro_steps=1, **WAYS[1])
        with opened as accumulation, accumulation.micro_step():
            if fails == "before":
                raise Failure
            model.left_out = left_out
            model(data(2)).square().sum().backward()
            if fails:
                raise Failure

    optimizers: list[ReplicaShardedOptimizer] = []
    clean, model = made(), made()
    step(clean)
    for left_out, fails in ((0, "after"), (1, "after"), (2, "after"), (None, "before")):
        with pytest.raises(Failure):
            step(model, *((None, "after") if is_first else (left_out, fails)))
        dist.barrier()
        assert same(gradients(model), [None] * 6)
        step(model)
        assert same(gradients(model), gradients(clean)), (left_out, fails)
        model.zero_grad()


@ranks(4)
def test_gradients_at_entry_come_back_after_an_exception() -> None:
    for options in WAYS:
        model = chain()
        step(model)
        before = gradients(model)
        for place in PLACES:
            with pytest.raises(Failure):
                step(model, fail_in=1, place=place, **options)
            assert same(gradients(model), before), place


@ranks(4)
def test_an_exception_caught_inside_ends_the_step() -> None:
    """The context then refuses to go on, and to end well; what follows is clean."""
    model, clean = chain(), chain()
    step(clean)

    def caught_inside(go_on: Callable[[Accumulation], None]) -> None:
        with gradient_accumulation(model, num_micro_steps=3) as accumulation:
            micro_step(accumulation, model, 0)
            with pytest.raises(Failure):
                micro_step(accumulation, model, 1, "in the backward")
            go_on(accumulation)

    for go_on in (lambda _: None, lambda accumulation: micro_step(accumulation, model, 1)):
        with pytest.raises(AccumulationError, match="micro-step 2 failed"):
            caught_inside(go_on)
        step(model)
        assert same(gradients(model), gradients(clean))
        model.zero_grad()


@ranks(4)
def test_the_optimizer_is_refused_after_a_failure_inside() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body() -> None:
        with gradient_accumulation(model, num_micro_steps=2) as accumulation:
            with pytest.raises(Failure):
                micro_step(accumulation, model, 0, "after a unit")
            optimizer.step()

    with pytest.raises(AccumulationError, match="optimizer step"):
        body()
    optimizer.step()


@ranks(4)
def test_a_wrong_number_of_micro_steps_names_both() -> None:
    """1.9: two of three, four of three, none; `last` that contradicts; nothing is corrupted."""
    model, clean = chain(), chain()
    step(clean)

    def run(announced: int, ran: int, **last: bool) -> None:
        with gradient_accumulation(model, num_micro_steps=announced) as accumulation:
            for seed in range(ran):
                with accumulation.micro_step(**last):
                    model(data(seed)).square().sum().backward()

    for ran in (0, 2):
        with pytest.raises(AccumulationError, match=f"3 micro-steps were announced, but {ran} ran"):
            run(3, ran)
        assert same(gradients(model), [None] * len(gradients(model)))
    with pytest.raises(AccumulationError, match=r"last=True.*number 1 of 3"):
        run(3, 1, last=True)
    with pytest.raises(AccumulationError, match="micro-step 4 after the last: 3 micro-steps"):
        run(3, 4)
    assert same(gradients(model), gradients(clean))  # those of the three are synchronised
    model.zero_grad()
    step(model)
    assert same(gradients(model), gradients(clean))


@ranks(4)
def test_ranks_that_disagree_are_all_refused() -> None:
    """Other numbers of micro-steps by replica; sync off on one rank. No rank hangs."""

    def uneven(num_micro_steps: int) -> None:
        with gradient_accumulation(
            model, num_micro_steps=num_micro_steps, **options
        ) as accumulation:
            for seed in range(num_micro_steps):
                micro_step(accumulation, model, seed)

    def sync_off() -> None:
        opened = gradient_accumulation(model, num_micro_steps=1, **options)
        with opened as accumulation, accumulation.micro_step():
            model(data(0)).square().sum().backward()
            if dist.get_rank() == 3:
                model.set_requires_gradient_sync(False)

    clean = chain()
    step(clean)
    for options in WAYS:
        model = chain()
        start_s = time.monotonic()
        with pytest.raises(AccumulationError, match="from 2 to 3"):
            uneven(2 + dist.get_rank() // 2)
        match = "gradient sync of unit" if dist.get_rank() == 3 else "another rank cannot"
        with pytest.raises(MicsError, match=match):
            sync_off()
        model.set_requires_gradient_sync(True)
        assert same(gradients(model), [None] * len(gradients(model)))
        assert time.monotonic() - start_s < 30
        step(model, **options)
        assert same(gradients(model), gradients(clean))
