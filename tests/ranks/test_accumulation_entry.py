"""What is there when the context opens, and what is found again when it closes (hazards 1.4, 1.6,
1.8, 1.12 to 1.15, 1.17, 1.20).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.models import Sharding, Toy, assert_gradients, mesh_of, pattern, shard_toy
from harness.ranks import ranks
from torch.distributed.fsdp import FSDPModule

from mics_dtensor.accumulate import gradient_accumulation
from mics_dtensor.clip import clip_grad_norm_
from mics_dtensor.errors import AccumulationError
from mics_dtensor.upstream import local_of

UNITS = {"u": {"a": (5, 3), "b": (7,)}, "v": {"c": (2,)}}
WAYS: tuple[dict[str, Any], ...] = ({}, {"overlap_boundary": True, "bucket_size_bytes": 1})


def toy(sharding: Sharding | None = None) -> Toy:
    model = Toy(UNITS)
    shard_toy(model, sharding or Sharding())
    return model


def use(value: float) -> dict[str, float]:
    """Other values on every rank; their sum over four ranks is 4 * value + 48."""
    return {"u.a": value + 8 * dist.get_rank(), "v.c": value + 8 * dist.get_rank()}


def expect(model: Toy, value: float | None, untouched: float | None = None) -> None:
    """`value` times the pattern in a and c, `untouched` in b."""
    wanted = {"u.a": value, "u.b": untouched, "v.c": value}
    shapes = {"u.a": (5, 3), "u.b": (7,), "v.c": (2,)}
    right = {n: None if v is None else pattern(shapes[n]).double() * v for n, v in wanted.items()}
    assert_gradients(model.named(), right)


def run(model: Toy, *values: float, backwards: int = 1, **options: Any) -> None:
    with gradient_accumulation(model, num_micro_steps=len(values), **options) as accumulation:
        for value in values:
            with accumulation.micro_step():
                for _ in range(backwards):
                    model(use(value)).backward()


@ranks(4)
def test_zero_grad_clears_everything() -> None:
    """1.4: a step that was synchronised and zeroed has no part in the next one."""
    model = toy()
    for options in WAYS:
        run(model, 100, 100, **options)
        model.zero_grad()
        run(model, 8, **options)
        expect(model, 8 + 12)
        model.zero_grad(set_to_none=False)
        run(model, 16, 16, **options)
        expect(model, 2 * (16 + 12))
        model.zero_grad()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(4)
def test_zero_grad_may_stand_inside_before_the_first_micro_step(
    dtype: torch.dtype, to_none: bool
) -> None:
    """1.4: where a loop has it in front of its micro-steps. Nothing of the step before is left."""
    for options in (*WAYS, {"static_gradients": True}):
        if options.get("static_gradients") and dtype != torch.float32:
            continue
        model = toy().to(dtype)
        for value in (100, 8, 16):
            with gradient_accumulation(model, num_micro_steps=2, **options) as accumulation:
                model.zero_grad(set_to_none=to_none)
                for _ in range(2):
                    with accumulation.micro_step():
                        model(use(value)).backward()
            expect(model, 2 * (value + 12))
        with pytest.raises(KeyError), gradient_accumulation(model, num_micro_steps=1):
            raise KeyError("before anything")
        expect(model, 2 * (16 + 12))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_gradients_at_entry_are_added_exactly(num_replicas: int) -> None:
    """1.12: mean and sum; what was there counts as synchronised, and is not averaged again."""

    @ranks(2 * num_replicas)
    def body() -> None:
        for factor in (None, 1):
            for options in WAYS:
                sharding = Sharding(num_replicas, 2, divide_factor=factor, force_sum=True)
                model = toy(sharding)
                everyone = sum(use(0)["u.a"] + 8 * (r - dist.get_rank()) for r in range(_world()))
                once = (everyone + _world() * 12) / sharding.divisor
                model.named()["u.b"].grad = torch.ones_like(model.named()["u.b"]) * 4
                for count in (1, 2):
                    run(model, 12, **options)
                    for name in ("u.a", "v.c"):
                        whole = model.named()[name].grad.full_tensor()  # type: ignore[union-attr]
                        right = pattern(tuple(whole.shape)) * once * count
                        torch.testing.assert_close(whole, right, rtol=1e-6, atol=0)
                    found = model.named()["u.b"].grad.full_tensor()  # type: ignore[union-attr]
                    assert torch.equal(found, torch.full((7,), 4.0))

    body()


@ranks(4)
def test_two_backwards_in_the_last_micro_step() -> None:
    """1.13: the second one reaches the buckets that have left, as a message of its own."""
    for options in WAYS:
        for entry in (False, True):
            model = toy()
            if entry:
                run(model, 4)
            run(model, 8, backwards=2, **options)
            expect(model, 2 * (8 + 12) + (4 + 12) * entry)
            model.zero_grad()
            run(model, 8, 8, backwards=3, **options)
            expect(model, 6 * (8 + 12))


@ranks(4)
def test_others_may_switch_the_sync_on() -> None:
    """1.6: no all-reduce before the boundary, whoever calls set_requires_gradient_sync(True)."""
    model, counts = toy(), []
    with gradient_accumulation(model, num_micro_steps=3) as accumulation:
        for value in (8, 16, 24):
            with count_collectives() as count, accumulation.micro_step():
                model.units["u"].set_requires_gradient_sync(False)
                loss = model(use(value))
                model.units["u"].set_requires_gradient_sync(True)
                model.set_requires_all_reduce(True)
                loss.backward()
            counts.append(count.num("all_reduce"))
    assert counts == [0, 0, 2 + 1]
    expect(model, 48 + 3 * 12)


@ranks(4)
def test_gradient_sync_off_in_some_micro_steps() -> None:
    """Gradients then wait unreduced, also beside parameters that are used later only."""
    for sharding in (Sharding(), Sharding(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        for options in WAYS:
            model = toy(sharding)
            with gradient_accumulation(model, num_micro_steps=2, **options) as accumulation:
                with accumulation.micro_step():
                    model.set_requires_gradient_sync(False)
                    model(use(8)).backward()
                with accumulation.micro_step():
                    model.set_requires_gradient_sync(True)
                    model({"u.b": 16.0}).backward()
            expect(model, 8 + 12, untouched=16)


@ranks(4)
def test_gradient_sync_off_in_all_micro_steps_but_the_last() -> None:
    """What waits is summed, also in the reduce dtype beside narrower gradients."""
    for sharding in (Sharding(), Sharding(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        for options in WAYS:
            model = toy(sharding)
            with gradient_accumulation(model, num_micro_steps=3, **options) as accumulation:
                for value in (8, 16, 24):
                    with accumulation.micro_step():
                        model.set_requires_gradient_sync(value == 24)
                        model(use(value)).backward()
            expect(model, 48 + 3 * 12)


@ranks(4)
def test_a_unit_that_one_replica_gathered_in_vain_shows_its_gradient() -> None:
    """By an evaluation: a backward that leaves the unit out does not reshard it."""
    for options in WAYS:
        model = Toy(UNITS)
        for unit in model.units.values():
            shard_toy(unit, Sharding(reshard=False), mesh_of(2, 2))
        with torch.no_grad():
            model(use(1))
        only_u = dist.get_rank() // 2 == 1
        used = {"u.a": 8.0} if only_u else {"u.a": 8.0, "v.c": 16.0}
        opened = gradient_accumulation(model, num_micro_steps=1, **options)
        with opened as accumulation, accumulation.micro_step():
            model(used).backward()
        wanted = {"u.a": pattern((5, 3)).double() * 8, "v.c": pattern((2,)).double() * 8}
        assert_gradients(model.named(), wanted | {"u.b": None})
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


@ranks(4)
def test_flags_of_the_user_are_found_again() -> None:
    """1.8: a unit with its all-reduce off, in and after the context, also after an exception."""
    model = toy()
    unit = model.units["u"]
    assert isinstance(unit, FSDPModule)
    unit.set_requires_all_reduce(False)
    group = unit._get_fsdp_state()._fsdp_param_group
    before = (group.mesh_info, group.post_forward_mesh_info)
    run(model, 8, 16)
    expect(model, 24 + 2 * 12)
    assert not group.all_reduce_grads
    with pytest.raises(ZeroDivisionError):
        run_and_fail(model)
    assert not group.all_reduce_grads
    assert (group.mesh_info, group.post_forward_mesh_info) == before
    assert group.mesh_info is before[0]
    assert "post_backward" not in vars(group)
    assert not getattr(model.named()["u.a"], "_post_accumulate_grad_hooks", None)
    expect(model, 24 + 2 * 12)


@pytest.mark.parametrize("reshard", [None, True, 2])
@ranks(4)
def test_as_many_gathers_as_without(reshard: bool | int | None) -> None:
    """1.14: the first forward inside the context (lazy init there), the root owning parameters."""
    counts, mesh = [], mesh_of(1, 4)
    for inside in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        for layer in model[:2]:
            shard_toy(layer, Sharding(), mesh)
        shard_toy(model, Sharding(reshard=reshard), mesh)
        for _ in range(2):
            with count_collectives() as count, ExitStack() as stack:
                if inside:
                    opened = gradient_accumulation(model, num_micro_steps=1)
                    stack.enter_context(stack.enter_context(opened).micro_step())
                model(torch.ones(1, 4)).sum().backward()
            counts.append((count.all_gathers, count.reduce_scatters))
    assert len(set(counts)) == 1, counts


@ranks(4)
def test_settings_made_inside_stay() -> None:
    """1.14, 1.15: set_reshard_after_forward and set_separate_reduce_scatter_group."""
    model = toy()
    unit = model.units["u"]
    assert isinstance(unit, FSDPModule)
    group = unit._get_fsdp_state()._fsdp_param_group
    original = group.mesh_info
    separate = hasattr(model, "set_separate_reduce_scatter_group")
    with gradient_accumulation(model, num_micro_steps=2) as accumulation:
        with accumulation.micro_step():
            model(use(8)).backward()
        unit.set_reshard_after_forward(False)
        if separate:
            model.set_separate_reduce_scatter_group(True)
        with accumulation.micro_step():
            model(use(16)).backward()
    assert group.post_forward_mesh_info is None
    assert group.mesh_info is original
    expect(model, 24 + 2 * 12)
    with gradient_accumulation(model, num_micro_steps=1) as accumulation:
        unit.set_reshard_after_forward(True)
        with accumulation.micro_step():
            model(use(8)).backward()
    assert group.post_forward_mesh_info is original
    if not separate:
        pytest.skip("torch 2.11 has no set_separate_reduce_scatter_group")
    theirs = group.mesh_info.reduce_scatter_process_group
    assert theirs is not None
    with count_collectives(), gradient_accumulation(model, num_micro_steps=1) as accumulation:
        assert group.mesh_info.reduce_scatter_process_group is theirs
        with accumulation.micro_step():
            model(use(8)).backward()
    assert group.mesh_info.reduce_scatter_process_group is theirs


@ranks(4)
def test_what_would_corrupt_a_sum_is_refused_at_entry() -> None:
    """1.17, and contexts inside contexts; each refusal leaves the model as it was."""
    model = toy()

    def refused(match: str, target: Any = model, **options: Any) -> None:
        opened = gradient_accumulation(target, **({"num_micro_steps": 1} | options))
        with pytest.raises(AccumulationError, match=match):
            opened.__enter__()

    for number in (0, 2.5, True, "2"):
        refused("give a whole number, 1 or more", num_micro_steps=number)
    refused("no FSDP units", target=torch.nn.Linear(2, 2))
    refused("choose one", overlap_boundary=True, static_gradients=True)
    unit = model.units["u"]
    assert isinstance(unit, FSDPModule)
    unit.set_requires_all_reduce(False)
    model(use(8)).backward()
    refused("unit units.u: FSDP2 holds a partial sum")
    unit.set_requires_all_reduce(True)
    model(use(8)).backward()
    model.zero_grad()
    unit.set_all_reduce_hook(lambda _: None)
    refused("all-reduce hook")
    unit._get_fsdp_state()._fsdp_param_group._all_reduce_hook = None
    hook = model.named()["u.b"].register_post_accumulate_grad_hook(lambda _: None)
    refused("units.u.b has a post-accumulate-grad hook")
    hook.remove()
    model.set_requires_gradient_sync(False)
    model(use(8)).backward()
    model.set_requires_gradient_sync(True)
    refused("has left unreduced")
    model(use(8)).backward()
    model.zero_grad()
    with gradient_accumulation(model, num_micro_steps=1) as accumulation:
        refused("already open")
        refused("already open", target=[model])
        with accumulation.micro_step():
            model(use(8)).backward()
    expect(model, 8 + 12)


@ranks(4)
def test_an_early_optimizer_step_or_clip_is_refused() -> None:
    """1.20; after the last micro-step both are welcome, inside the context too."""
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
    with gradient_accumulation(model, num_micro_steps=2) as accumulation:
        optimizer.step()
        with accumulation.micro_step():
            model(use(8)).backward()
            with pytest.raises(AccumulationError, match="an optimizer step"):
                optimizer.step()
        other.step()
        with pytest.raises(AccumulationError, match="an optimizer step"):
            optimizer.step()
        with pytest.raises(AccumulationError, match="clip_grad_norm_"):
            clip_grad_norm_(model.parameters(), 1.0)
        with accumulation.micro_step():
            model(use(8)).backward()
        clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    expect(model, 16 + 2 * 12)
    optimizer.step()


def run_and_fail(model: Toy) -> None:
    opened = gradient_accumulation(model, num_micro_steps=1)
    with opened as accumulation, accumulation.micro_step():
        model(use(8)).backward()
        raise ZeroDivisionError


def _world() -> int:
    return dist.get_world_size()


@ranks(4)
def test_arguments_that_mean_nothing_are_refused_at_entry() -> None:
    model = toy()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"second_hop_dtype": "bfloat16"}, "second_hop_dtype is 'bfloat16'; give one of torch."),
        ({"second_hop_dtype": torch.int32}, "second_hop_dtype is torch.int32; give one of"),
        ({"second_hop_dtype": torch.complex64}, "second_hop_dtype is torch.complex64"),
        ({"bucket_size_bytes": "1MB"}, "bucket_size_bytes is '1MB'; give a whole number"),
        ({"bucket_size_bytes": None}, "bucket_size_bytes is None"),
        ({"bucket_size_bytes": float("nan")}, "bucket_size_bytes is nan"),
        ({"bucket_size_bytes": -1}, "bucket_size_bytes is -1"),
        ({"num_micro_steps": True}, "num_micro_steps is True; give a whole number"),
    ]
    for options, said in wrong:
        with pytest.raises(AccumulationError, match=said):
            gradient_accumulation(model, **{"num_micro_steps": 1, **options}).__enter__()
    run(model, 8)
    expect(model, 8 + 12)


@ranks(4)
def test_a_step_without_any_micro_step_is_refused_too() -> None:
    """Backwards in the context but outside of micro_step(): their sum is that of one replica."""
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [whole.clone() for whole in map(local_of, model.parameters())]
    context = gradient_accumulation(model, num_micro_steps=2)
    context.__enter__()
    optimizer.step()  # nothing has arrived: there is nothing to spoil
    model(use(8)).backward()
    with pytest.raises(AccumulationError, match="an optimizer step before the last micro-step"):
        optimizer.step()
    with pytest.raises(AccumulationError, match="clip_grad_norm_ before the last"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(AccumulationError, match="announced, but 0 ran"):
        context.__exit__(None, None, None)
    after = map(local_of, model.parameters())
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    run(model, 8)
    expect(model, 8 + 12)
