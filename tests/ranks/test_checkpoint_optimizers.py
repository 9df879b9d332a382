"""Saving changes no training, and what no step has used has no states after loading either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.checkpointed import same, states_of, stored, train, values
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, shard, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mics_dtensor import ReplicaShardedOptimizer, gradient_accumulation
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
from mics_dtensor.errors import CheckpointError

Made = tuple[nn.Module, Any]
SGD_OPTIONS = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), **SGD_OPTIONS),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, t0=1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "sharded AdamW": lambda m: ReplicaShardedOptimizer(m, torch.optim.AdamW, lr=1e-2),
    "sharded SGD": lambda m: ReplicaShardedOptimizer(m, torch.optim.SGD, **SGD_OPTIONS),
}


class Branches(nn.Module):
    """Three layers, of which a step uses the first and those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.used = (1,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for index in self.used:
            x = x + torch.tanh(self.layers[index](x))
        return x


def branches(kind: str, *layout: int, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    model = shard(Branches(), mesh_of(*(layout or (2, 2))))
    return model, OPTIMIZERS[kind](model)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    """As `train`, of a model in which not every unit takes part."""
    train(model, optimizer, *numbers)


@ranks(4, timeout_s=110)
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_save_or_a_load_before_the_first_step_changes_no_training(
    tmp_path: Path, kind: str
) -> None:
    def trained(before: Callable[[Made], object]) -> tuple[Any, Any]:
        model, optimizer = its = branches(kind)
        before(its)
        steps(model, optimizer, 0, 1)
        return values(model), states_of(optimizer)

    def checkpoints(its: Made, **options: Any) -> Checkpoints:
        folder = tmp_path / str(options)
        model, optimizer = its
        given = CheckpointOptions(**options)
        return Checkpoints(folder, model=model, optimizer=optimizer, options=given)

    def save_after_backward(its: Made) -> None:
        model, _ = its
        with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
            model(batch(9, dist.get_rank())).sum().backward()
        before = [p.grad for p in model.parameters()]
        checkpoints(its).save(0)
        assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
        model.zero_grad()

    def load(its: Made) -> None:
        checkpoints(its).load(0)

    def save_asynchronously(its: Made) -> None:
        with checkpoints(its, asynchronous=True) as saving:
            saving.save(0)

    straight = trained(lambda _: None)
    for before in (lambda its: checkpoints(its).save(0), load, save_asynchronously):
        found = trained(before)
        assert same(found[0], straight[0])
        assert same(found[1], straight[1])
    assert same(trained(save_after_backward)[0], straight[0])
    again = branches(kind, seed=4)  # with states that were not there when it was saved
    steps(*again, 0)
    load(again)
    steps(*again, 0, 1)
    assert same(values(again[0]), straight[0])


@ranks(4, timeout_s=110)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "sharded AdamW"])
def test_a_parameter_that_no_step_has_used_stays_without_states(tmp_path: Path, kind: str) -> None:
    def go_on(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        model.used = (1, 2)
        steps(model, optimizer, 7, 8)
        return values(model)

    model, optimizer = branches(kind)
    steps(model, optimizer, 0, 1)
    unused = {f"layers.2.{name}" for name in ("weight", "bias")}
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p] for p in optimizer.state} == set(names.values()) - unused
    checkpoints = Checkpoints(tmp_path, model=model, optimizer=optimizer)
    checkpoints.save(1)
    kept, right = values(model), None
    for layout in ((2, 2), (4, 1), (1, 4)):
        other, others = branches(kind, *layout, seed=3)
        Checkpoints(tmp_path, model=other, optimizer=others).resume()
        assert same(values(other), kept)
        its_names = {p: name for name, p in other.named_parameters()}
        assert {its_names[p] for p in others.state} == set(names.values()) - unused
        if layout == (2, 2):
            Checkpoints(tmp_path / "again", model=other, optimizer=others).save(1)
            right = go_on(other, others)
    # The run itself goes on, all parameters with states, and returns to where it was.
    assert right is not None
    assert same(go_on(model, optimizer), right)
    checkpoints.save(2)
    for step in (1, 2):
        Checkpoints(tmp_path, model=model, optimizer=optimizer).load(step)
        assert (step == 2) == all(p in optimizer.state for p in model.parameters())
    Checkpoints(tmp_path, model=model, optimizer=optimizer).load(1)
    Checkpoints(tmp_path, model=model, optimizer=optimizer).load(2)  # into fewer than were saved
    assert same(values(model), right)


@ranks(4, timeout_s=110)
def test_a_load_that_is_refused_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    for kind in ("SGD", "NAdam", "sharded AdamW"):
        model, optimizer = branches(kind)
        steps(model, optimizer, 0)
        before, states = values(model), states_of(optimizer)
        gradients = []
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            gradients.append(parameter.grad)
        other = torch.optim.Adagrad if kind != "NAdam" else torch.optim.AdamW
        foreign = other(model.parameters(), lr=1e-2)
        folder = tmp_path / kind
        Checkpoints(folder, model=model, optimizer=foreign).save(1)
        loading = Checkpoints(folder, model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match="is of another optimizer"):
            loading.resume()
        assert same(values(model), before)
        assert same(states_of(optimizer), states)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@ranks(4, timeout_s=110)
def test_saving_while_an_average_is_swapped_in_leaves_the_masters_alone(tmp_path: Path) -> None:
    """The fp32 masters are trained on as if nobody had looked; what is saved is the average."""

    def made_here(seed: int = 0) -> Made:
        torch.manual_seed(seed)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = shard(Branches(), mesh_of(2, 2), mp_policy=policy)
        model.used = (1, 2)
        options: Any = {"master_weights": "sharded", "lr": 1e-3}
        return model, ReplicaShardedOptimizer(model, torch.optim.AdamW, **options)

    straight, its = made_here()
    steps(straight, its, 0, 1, 2)
    model, optimizer = made_here()
    steps(model, optimizer, 0, 1)
    saving = Checkpoints(tmp_path, model=model, optimizer=optimizer)
    with torch.no_grad():
        averages = [p.detach() * 0.5 for p in model.parameters()]
        back = [p.detach().clone() for p in model.parameters()]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.copy_(average)
        saving.save(1)
        for parameter, before in zip(model.parameters(), back, strict=True):
            parameter.copy_(before)
    other, others = made_here(3)
    Checkpoints(tmp_path, model=other, optimizer=others).resume()
    for mine, average in zip(other.parameters(), averages, strict=True):
        assert torch.equal(whole(mine), whole(average))
    steps(model, optimizer, 2)
    assert same(values(model), values(straight))
    saving.save(2)  # and the masters themselves, which the shards are rounded from
    Checkpoints(tmp_path / "straight", model=straight, optimizer=its).save(2)
    assert same(stored(tmp_path / "step-2"), stored(tmp_path / "straight" / "step-2"))


@ranks(4, timeout_s=110)
def test_several_optimizers_of_one_model_are_saved_and_go_on(tmp_path: Path) -> None:
    def several(sharded: bool, *layout: int, seed: int = 0) -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(seed)
        model: Any = shard(Branches(), mesh_of(*layout))
        last = [p for _, p in model.layers[1].named_parameters()]
        last += [p for _, p in model.layers[2].named_parameters()]
        first = list(model.layers[0].parameters())
        options: Any = {"lr": 1e-2, "momentum": 0.9}
        if sharded:
            groups: Any = [{"params": last}]
            return model, [
                torch.optim.SGD(first, **options),
                ReplicaShardedOptimizer(model, torch.optim.AdamW, param_groups=groups, lr=1e-2),
            ]
        return model, [torch.optim.SGD(first, **options), torch.optim.AdamW(last, lr=1e-2)]

    def go_on(model: nn.Module, optimizers: list[Any], *numbers: int) -> None:
        for number in numbers:
            with gradient_accumulation(model, num_micro_steps=1) as a, a.micro_step():
                model(batch(number, dist.get_rank())).square().mean().backward()
            for its in optimizers:
                its.step()
                its.zero_grad()

    for sharded in (False, True):
        folder = tmp_path / str(sharded)
        straight, its = several(sharded, 2, 2)
        go_on(straight, its, 0, 1, 2)
        model, its = several(sharded, 2, 2)
        saving = Checkpoints(folder, model=model, optimizer=its)
        saving.save(0)
        go_on(model, its, 0, 1)
        saving.save(2)
        for layout in ((2, 2), (4, 1)):
            other, others = several(sharded, *layout, seed=5)
            Checkpoints(folder, model=other, optimizer=tuple(others)).resume()
            assert same(values(other), values(model))
            go_on(other, others, 2)
            if layout == (2, 2):
                assert same(values(other), values(straight))
        with pytest.raises(CheckpointError, match=r"another optimizer, .*: it also has optimizer"):
            Checkpoints(folder, model=model, optimizer=its[:1]).load(2)


@ranks(2, timeout_s=110)
def test_what_is_no_model_and_no_optimizer_is_refused_when_it_is_given(tmp_path: Path) -> None:
    model, optimizer = branches("AdamW", 1, 2)
    for given, words in (
        ({"model": [model]}, r"model is a list, and Checkpoints saves one module: give it torch"),
        ({"optimizer": []}, r"optimizer is a list of 0; give a torch\.optim\.Optimizer, a list"),
        ({"optimizer": [optimizer, model]}, r"optimizer is a list of AdamW, \w*Branches; give"),
        ({"optimizer": model.parameters}, r"optimizer is a method; give a torch"),
        ({"optimizer": [optimizer, optimizer]}, r"6 parameters are in several of the 2 optimizers"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Checkpoints(tmp_path, **({"model": model} | given))  # type: ignore[arg-type]
