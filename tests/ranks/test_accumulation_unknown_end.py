"""The number of micro-steps is not known beforehand: `last=True`, or `synchronize()` after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from harness.counting import count_collectives
from harness.models import Sharding, Toy, assert_gradients, right_gradients, shard_toy
from harness.ranks import ranks

from mics_dtensor.accumulate import gradient_accumulation
from mics_dtensor.errors import AccumulationError

SHAPES = {"u.a": (5, 3), "u.b": (7,)}
WAYS: tuple[dict[str, Any], ...] = ({}, {"overlap_boundary": True}, {"static_gradients": True})


def toy() -> Toy:
    model = Toy({"u": {"a": (5, 3), "b": (7,)}})
    shard_toy(model, Sharding())
    return model


def use(rank: int, micro_step: int) -> dict[str, float]:
    return {"u.a" if micro_step % 2 else "u.b": 8.0 * (1 + rank + micro_step)}


def check(model: Toy, num_micro_steps: int) -> None:
    right = right_gradients(SHAPES, use, num_micro_steps=num_micro_steps, divisor=4)
    assert_gradients(model.named(), right)
    model.zero_grad()


@ranks(4)
def test_last_and_synchronize_give_the_same() -> None:
    for options in WAYS:
        model = toy()
        for count in (1, 2, 5):
            for how in ("last", "synchronize", "both", "on some ranks"):
                marked = how in ("last", "both") or (how == "on some ranks" and dist.get_rank() > 1)
                opened = gradient_accumulation(model, num_micro_steps=None, **options)
                with opened as accumulation:
                    for k in range(count):
                        with accumulation.micro_step(last=marked and k == count - 1):
                            model(use(dist.get_rank(), k)).backward()
                        assert accumulation.num_run == k + 1
                    if how != "last":
                        accumulation.synchronize()
                        accumulation.synchronize()
                check(model, count)


@ranks(4)
def test_micro_steps_without_a_backward_count() -> None:
    """Data that ends on one replica only: the others still run, and all agree on the number."""
    model = toy()
    with gradient_accumulation(model, num_micro_steps=None) as accumulation:
        for k in range(3):
            with accumulation.micro_step():
                if k < 2 or dist.get_rank() > 1:
                    model(use(dist.get_rank(), k)).backward()
        accumulation.synchronize()
    right = right_gradients(
        SHAPES,
        lambda rank, k: use(rank, k) if k < 2 or rank > 1 else {},
        num_micro_steps=3,
        divisor=4,
    )
    assert_gradients(model.named(), right)


@ranks(4)
def test_what_does_not_add_up_is_refused() -> None:
    model = toy()

    def run(announced: int | None, then: Any, *lasts: bool | None) -> None:
        with gradient_accumulation(model, num_micro_steps=announced) as accumulation:
            for k, last in enumerate(lasts):
                with accumulation.micro_step(last=last):
                    model(use(dist.get_rank(), k)).backward()
            then(accumulation)

    def nothing(_: Any) -> None: ...
    def inside(accumulation: Any) -> None:
        with accumulation.micro_step():
            accumulation.synchronize()

    def nested(accumulation: Any) -> None:
        with accumulation.micro_step(), accumulation.micro_step():
            pass

    for match, announced, then, lasts in (
        (
            "2 micro-steps ran and their gradients were not",
            None,
            nothing,
            (None, None),
        ),
        ("the gradients are synchronised", None, nothing, (True, None)),
        ("3 micro-steps were announced, and the last", 3, lambda a: a.synchronize(), (None,)),
        ("synchronize.. inside a micro_step", None, inside, (None,)),
        ("micro_step.. inside a micro_step", None, nested, ()),
        (r"last=False.* is number 2 of 2", 2, nothing, (None, False)),
    ):
        with pytest.raises(AccumulationError, match=match):
            run(announced, then, *lasts)
        model.zero_grad()
        run(2, nothing, None, None)
        check(model, 2)


@ranks(4)
def test_synchronize_after_nothing_is_a_step_without_gradients() -> None:
    model = toy()
    opened = gradient_accumulation(model, num_micro_steps=None)
    with count_collectives() as count, opened as accumulation:
        accumulation.synchronize()
    assert count.by_kind == {"all_reduce": 2}
    assert all(p.grad is None for p in model.parameters())
