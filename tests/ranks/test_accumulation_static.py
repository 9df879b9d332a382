"""Static gradients: `.grad` keeps its address, for CUDA graphs (hazards 1.19)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.models import Sharding, Toy, shard_toy
from harness.ranks import ranks

from mics_dtensor.accumulate import gradient_accumulation
from mics_dtensor.errors import AccumulationError

UNITS = {"u": {"a": (5, 3), "b": (7,)}, "v": {"c": (2,)}}


def toy(sharding: Sharding, dtype: torch.dtype = torch.float32) -> Toy:
    model = Toy(UNITS, dtype)
    shard_toy(model, sharding)
    return model


def run(model: Toy, step: int, *, static: bool, size: int = 0) -> None:
    with gradient_accumulation(
        model,
        num_micro_steps=2,
        static_gradients=static,
        bucket_size_bytes=size,
    ) as accumulation:
        for k in range(2):
            with accumulation.micro_step():
                value = 8.0 * (1 + (dist.get_rank() + k + step) % 5)
                names = ("u.a", "v.c") if k else ("u.a", "u.b")
                model(dict.fromkeys(names, value)).backward()


def addresses(model: Toy) -> list[tuple[int, int]]:
    gradients = [p.grad for p in model.parameters()]
    return [(id(g), g.to_local().data_ptr()) for g in gradients if g is not None]


@pytest.mark.parametrize("factor", [None, 1, 4])
@ranks(4, timeout_s=120)
def test_the_address_is_kept_and_the_numbers_are_the_ordinary_ones(factor: float | None) -> None:
    for replicate, shard in ((2, 2), (4, 1)):
        for reduce_dtype, size in ((None, 1), (None, 2**20), (torch.bfloat16, 1)):
            sharding = Sharding(
                replicate,
                shard,
                divide_factor=factor,
                force_sum=factor is not None,
                reduce_dtype=reduce_dtype,
            )
            static, ordinary = toy(sharding), toy(sharding)
            run(static, 0, static=False, size=size)
            static.zero_grad(set_to_none=False)
            run(ordinary, 0, static=False, size=size)
            ordinary.zero_grad()
            before = addresses(static)
            assert len(before) == 3
            for step in range(1, 5):
                run(static, step, static=True, size=size)
                run(ordinary, step, static=False, size=size)
                assert addresses(static) == before
                for mine, theirs in zip(static.parameters(), ordinary.parameters(), strict=True):
                    whole, right = mine.grad.full_tensor(), theirs.grad.full_tensor()  # type: ignore[union-attr]
                    assert torch.equal(whole, right), (sharding, step)
                if step != 2:  # and once on top of what is there
                    static.zero_grad(set_to_none=False)
                    ordinary.zero_grad(set_to_none=False)


@ranks(4)
def test_the_second_hop_works_on_what_a_replay_has_written() -> None:
    """A replay runs no Python: gradients appear in `.grad` with no backward that we could see."""
    model = toy(Sharding())
    run(model, 0, static=False)
    model.zero_grad(set_to_none=False)
    before = addresses(model)
    opened = gradient_accumulation(model, num_micro_steps=1, static_gradients=True)
    with opened as accumulation, accumulation.micro_step():
        for parameter in model.parameters():
            parameter.grad.to_local().fill_(1.0 + dist.get_rank() // 2)  # type: ignore[union-attr]
    for parameter in model.parameters():
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert torch.equal(gradient, torch.full_like(gradient, 1.5))
    assert addresses(model) == before


@ranks(4)
def test_after_an_exception_the_gradients_are_zero_and_stay_where_they_are() -> None:
    model = toy(Sharding())
    run(model, 0, static=False)
    before = addresses(model)

    def fail() -> None:
        with gradient_accumulation(model, num_micro_steps=2, static_gradients=True) as accumulation:
            with accumulation.micro_step():
                model({"u.a": 8.0}).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert addresses(model) == before
    assert all(not p.grad.to_local().any() for p in model.parameters())  # type: ignore[union-attr]
    run(model, 3, static=True)
    clean = toy(Sharding())
    run(clean, 3, static=False)
    for mine, theirs in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())  # type: ignore[union-attr]


@ranks(4)
def test_narrow_parameters_are_refused() -> None:
    opened = gradient_accumulation(
        toy(Sharding(), torch.bfloat16), num_micro_steps=1, static_gradients=True
    )
    with pytest.raises(AccumulationError, match=r"fp32 sum of units\.u\.a"):
        opened.__enter__()
