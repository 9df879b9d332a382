"""Between the boundary and the step: each replica has a summand of the gradient, its own slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, said_by_all, shard, stack, whole
from torch import nn

from mics_dtensor import clip_grad_norm_, gradient_accumulation
from mics_dtensor.errors import AccumulationError, ConfigError
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.slices import cut, slice_of
from mics_dtensor.upstream import local_of


def backwards(model: nn.Module, *, scale: float = 1.0) -> None:
    with gradient_accumulation(model, num_micro_steps=2) as accumulation:
        for micro in range(2):
            with accumulation.micro_step():
                (model(batch(micro, dist.get_rank())).square().sum() * scale).backward()


def sliced(model: nn.Module, **options: Any) -> ReplicaShardedOptimizer:
    return ReplicaShardedOptimizer(model, torch.optim.SGD, lr=0.1, **options)


def expect_gradients(model: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.placements[0].is_partial()
        its, local = slice_of(mine), local_of(mine.grad).view(-1)
        assert its is not None
        outside = local.clone()
        its.of(outside).zero_()
        assert not outside.any()
        assert torch.equal(its.of(local), its.of(local_of(theirs.grad)))
        assert torch.equal(whole(mine.grad), whole(theirs.grad))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@ranks(4)
def test_gradients_are_zeroed_in_place_by_every_kind_of_optimizer(options: dict[str, bool]) -> None:
    mesh = mesh_of(2, 2)
    model, plain = shard(stack(), mesh), shard(stack(), mesh)
    optimizer = sliced(model, **options)
    backwards(model, scale=3.0)
    kept = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(
        grad is parameter.grad for grad, parameter in zip(kept, model.parameters(), strict=True)
    )
    assert not any(local_of(grad).any() for grad in kept)
    backwards(model)
    backwards(plain)
    expect_gradients(model, plain)


@ranks(4)
def test_the_gradient_is_partial_and_its_sum_that_of_plain_mics() -> None:
    mesh = mesh_of(2, 2)
    model, plain = shard(stack(), mesh), shard(stack(), mesh)
    optimizer = sliced(model)
    for _ in range(2):  # the second beside what the first has left
        backwards(model)
        backwards(plain)
        expect_gradients(model, plain)
    for each in (model, plain):  # a backward outside of the context: plain HSDP
        each(batch(7, dist.get_rank())).sum().backward()
    expect_gradients(model, plain)
    optimizer.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    for each in (model, plain):
        each(batch(8, dist.get_rank())).sum().backward()
        backwards(each)
    expect_gradients(model, plain)
    optimizer.zero_grad()
    plain.zero_grad()
    for each in (model, plain):  # whole gradients found at entry
        each(batch(9, dist.get_rank())).sum().backward()
        backwards(each)
    expect_gradients(model, plain)


@ranks(4)
def test_norms_are_those_of_the_whole_gradient_and_ours_sends_scalars() -> None:
    mesh = mesh_of(4, 1)
    model, plain = shard(stack(), mesh), shard(stack(), mesh)
    _optimizer = sliced(model)
    for norm_type in (2.0, 1.0, float("inf")):
        for each in (model, plain):
            each.zero_grad()
            backwards(each)
        right = whole(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type))
        if norm_type != float("inf"):  # torch 2.14 raises for it on a rank with an empty part
            theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type)
            assert torch.allclose(whole(theirs), right), (norm_type, theirs, right)
        with count_collectives() as counted:
            norm = clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        # A maximum may lose a nan: for inf, whether there is one goes beside the number.
        sent = 8 if norm_type == float("inf") else 4
        assert {call.message_bytes for call in counted.calls} == {sent}
        assert torch.allclose(norm, right), (norm_type, norm, right)
        clip_grad_norm_(plain.parameters(), 0.5, norm_type=norm_type)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(whole(mine.grad), whole(theirs.grad), rtol=1e-5)


@ranks(4)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    model = shard(stack(), mesh_of(2, 2))
    optimizer = sliced(model, skip_nonfinite=True, momentum=0.9)
    backwards(model)
    optimizer.step()
    assert not optimizer.skipped
    before = [whole(p.detach()).clone() for p in model.parameters()]
    if dist.get_rank() == 3:
        its = next(p for p in model.parameters() if slice_of(p).of(local_of(p.grad)).numel())
        slice_of(its).of(local_of(its.grad))[0] = float("nan")
    optimizer.step()
    assert said_by_all(optimizer.skipped) == [True] * 4
    for was, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, whole(now.detach()))
    optimizer.zero_grad()
    backwards(model)
    optimizer.step()
    assert not optimizer.skipped


@ranks(2)
def test_what_it_refuses() -> None:
    mesh = mesh_of(2, 1)
    model = shard(stack(), mesh)
    for unfit in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ConfigError, match="more than one element"):
            ReplicaShardedOptimizer(model, unfit, elementwise=True)
    with pytest.raises(ConfigError, match="elementwise=True"):
        ReplicaShardedOptimizer(model, torch.optim.RMSprop)
    with pytest.raises(ConfigError, match="in no FSDP unit"):
        sliced(model, param_groups=[{"params": [nn.Parameter(torch.ones(2))]}])
    with pytest.raises(ConfigError, match='"fp32" or "sharded"'):
        sliced(model, master_weights="bf16")
    model.head.bias.requires_grad_(False)
    optimizer = ReplicaShardedOptimizer(model, torch.optim.RMSprop, elementwise=True)
    with pytest.raises(ConfigError, match="already"):
        sliced(model)
    with pytest.raises(ConfigError, match="param_groups="):
        optimizer.add_param_group({"params": []})
    static = gradient_accumulation(model, num_micro_steps=1, static_gradients=True)
    with pytest.raises(AccumulationError, match="static_gradients"), static:
        pass
    model.head.bias.requires_grad_(True)
    with pytest.raises(AccumulationError, match="did not when ReplicaShardedOptimizer was made"):
        backwards(model)
    model.head.bias.requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ConfigError, match="another object"):
        optimizer.step()
    del optimizer  # and with it the slices: the second hop is an all-reduce again
    model = shard(stack(), mesh)
    optimizer = sliced(model)
    del optimizer
    backwards(model)
    assert all(p.grad.placements[0].is_replicate() for p in model.parameters())


def test_a_cut_is_even_and_loses_nothing() -> None:
    for sizes in ([9, 0, 1, 25], [1], [0], [3, 3, 2], [17, 5, 4]):
        for num_replicas in (1, 2, 3, 4, 7):
            ranges = cut(sizes, num_replicas)
            held = [sum(its[r][1] - its[r][0] for its in ranges) for r in range(num_replicas)]
            assert sum(held) == sum(sizes)
            assert max(held) - min(held) < num_replicas
            for size, its in zip(sizes, ranges, strict=True):
                edges = [0, *(end for _, end in its)]
                assert [start for start, _ in its] == edges[:-1]
                assert edges[-1] == size
