"""gradient_accumulation beside the other things people do with an FSDP2 model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import Sharding, mesh_of, shard_toy
from harness.ranks import ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from mics_dtensor.accumulate import gradient_accumulation

WIDTH, NUM_MICRO_STEPS = 6, 3
WAYS: tuple[dict[str, Any], ...] = ({}, {"overlap_boundary": True, "bucket_size_bytes": 1})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Net(nn.Module):
    """Blocks one behind the other, checkpointed if asked."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def net(use_reentrant: bool | None = None) -> Net:
    torch.manual_seed(3)
    return Net(use_reentrant)


def sharded(model: Net, sharding: Sharding | None = None, **options: Any) -> Net:
    mesh, sharding = mesh_of(2, 2), sharding or Sharding()
    if options:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return model
    for layer in model.layers:
        shard_toy(layer, sharding, mesh)
    shard_toy(model, sharding, mesh)
    return model


def data(rank: int, micro_step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_step)
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()


Backward = Callable[[nn.Module, torch.Tensor], None]


def plain_backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def check(
    model: Net,
    backward: Backward = plain_backward,
    *,
    between: Callable[[Net, int], None] | None = None,
    prepare: Callable[[Net], None] | None = None,
) -> None:
    """Two steps in every way of opening the context equal one process."""
    single = net(model.use_reentrant)
    if prepare is not None:
        prepare(single)
        prepare(model)
    for rank in range(4):
        for k in range(NUM_MICRO_STEPS):
            backward(single, data(rank, k))
    for options in WAYS:
        for _ in range(2):
            with gradient_accumulation(
                model, num_micro_steps=NUM_MICRO_STEPS, **options
            ) as accumulation:
                for k in range(NUM_MICRO_STEPS):
                    with accumulation.micro_step():
                        backward(model, data(dist.get_rank(), k))
                    if between is not None:
                        between(model, k)
            for mine, right in zip(model.parameters(), single.parameters(), strict=True):
                assert (mine.grad is None) == (right.grad is None)
                if right.grad is not None:
                    whole = mine.grad.full_tensor()  # type: ignore[union-attr]
                    torch.testing.assert_close(whole, right.grad / 4, rtol=1e-5, atol=1e-6)
            model.zero_grad()


@ranks(4)
def test_several_pairs_and_repeated_backwards_in_a_micro_step() -> None:
    def two_pairs(model: nn.Module, x: torch.Tensor) -> None:
        plain_backward(model, x)
        (model(2 * x).sum() * 3).backward()

    def twice(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def two_forwards(model: nn.Module, x: torch.Tensor) -> None:
        (model(x).square().sum() + model(-x).sum()).backward()

    for backward in (two_pairs, two_forwards):
        check(sharded(net()), backward)
    check(sharded(net(), Sharding(reshard=False)), twice)


@ranks(4)
def test_frozen_units_and_parameters() -> None:
    def freeze(model: Net) -> None:
        model.layers[1].requires_grad_(False)
        model.layers[2].first.bias.requires_grad_(False)
        model.head.weight.requires_grad_(False)

    check(sharded(net()), prepare=freeze)


@ranks(4)
def test_a_gradient_left_on_a_frozen_parameter_is_left_alone() -> None:
    model = sharded(net())
    plain_backward(model, data(0, 0))
    model.layers[1].requires_grad_(False)
    kept = model.layers[1].first.weight.grad
    before = kept.to_local().clone()
    model.layers[0].zero_grad()
    opened = gradient_accumulation(model, num_micro_steps=1)
    with opened as accumulation, accumulation.micro_step():
        plain_backward(model, data(dist.get_rank(), 0))
    assert model.layers[1].first.weight.grad is kept
    assert torch.equal(kept.to_local(), before)


@pytest.mark.parametrize("use_reentrant", [True, False])
@ranks(4)
def test_activation_checkpointing(use_reentrant: bool) -> None:
    for reshard in (True, False):
        check(sharded(net(use_reentrant), Sharding(reshard=reshard)))


# 2026-11: dynamo asks the input of a block for its gradient, torch 2.13.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@ranks(4, timeout_s=110)
def test_compiled_blocks_are_not_compiled_again_at_the_boundary() -> None:
    model, compiled = net(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        compiled.append(graph)
        return aot_eager(graph, inputs)  # type: ignore[no-any-return]

    for layer in model.layers:
        layer.compile(backend=backend)
    sharded(model)
    after_each: list[int] = []
    check(model, between=lambda _, __: after_each.append(len(compiled)))
    assert after_each[0] > 0
    assert set(after_each) == {after_each[0]}


@ranks(4)
def test_integer_reshard_and_changes_between_micro_steps() -> None:
    mesh = mesh_of(1, 4)
    model = net()
    for layer in model.layers:
        shard_toy(layer, Sharding(reshard=2), mesh)
    shard_toy(model, Sharding(reshard=2), mesh)
    check(model)

    def flip(model: Net, micro_step: int) -> None:
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_forward(bool(micro_step % 2))
        for layer in model.layers:
            layer.set_reshard_after_backward(bool(micro_step % 2))

    check(sharded(net()), between=flip)


@ranks(4)
def test_explicit_prefetch_and_asynchronous_unshard() -> None:
    model = sharded(net())
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])

    def unshard_first(model: nn.Module, x: torch.Tensor) -> None:
        handles = (
            [layer.unshard(async_op=True) for layer in model.layers]
            if isinstance(model, FSDPModule)
            else []
        )
        for handle in handles[:1]:
            handle.wait()
        plain_backward(model, x)

    check(model, unshard_first)


@ranks(4)
def test_offload_to_the_cpu() -> None:
    check(sharded(net(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


@ranks(4)
def test_evaluation_and_state_dict_between_micro_steps() -> None:
    def look(model: Net, micro_step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(data(0, micro_step))
        model.train()
        state = model.state_dict()
        assert all(value.device_mesh.ndim == 2 for value in state.values())
        if micro_step == 1:
            model.load_state_dict(state)

    check(sharded(net()), between=look)


@ranks(4)
def test_parts_of_a_model_may_be_given_as_a_list() -> None:
    model = net()
    mesh = mesh_of(2, 2)
    parts = [*model.layers, model.head]
    for part in parts:
        shard_toy(part, Sharding(), mesh)
    single = net()
    for rank in range(4):
        plain_backward(single, data(rank, 0))
    for options in WAYS:
        opened = gradient_accumulation(parts, num_micro_steps=1, **options)
        with opened as accumulation, accumulation.micro_step():
            plain_backward(model, data(dist.get_rank(), 0))
        for mine, right in zip(model.parameters(), single.parameters(), strict=True):
            whole = mine.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(whole, right.grad / 4, rtol=1e-5, atol=1e-6)  # type: ignore[operator]
        model.zero_grad()
