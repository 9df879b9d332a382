"""Replicas start equal bit for bit, and a change of one number on one rank is named on all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import Stack, batch, equal_over, mesh_of, said_by_all, shard
from torch import nn
from torch.distributed.fsdp import fully_shard

from mics_dtensor import (
    ReplicaShardedOptimizer,
    apply_mics,
    explain,
    gradient_accumulation,
    synchronize_replicas,
)
from mics_dtensor.errors import ConfigError, ReplicaError
from mics_dtensor.replicas import check_replicas
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import local_of


class Buffered(Stack):
    """Buffers of several dtypes, a weight used twice, and a layer of width 3: uneven shards."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.layers[1].linear.weight = self.layers[0].linear.weight
        self.register_buffer("seen", torch.randint(0, 2, (5,)).bool())
        self.register_buffer("count", torch.randint(0, 99, ()))
        self.register_buffer("mean", torch.randn(2, 3).t())
        self.register_buffer("narrow", torch.randn(3).bfloat16(), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.outside = nn.Parameter(torch.randn(2))


def random_on_every_rank(*shape: int) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    mesh = mesh_of(*shape)
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.outside})


def held(model: nn.Module) -> list[torch.Tensor]:
    return [local_of(t.detach()) for t in (*model.parameters(), *model.buffers())]


@ranks(4)
def test_every_replica_takes_replica_0s_bits() -> None:
    for shape in ((2, 2), (4, 1)):
        model = random_on_every_rank(*shape)
        group = mesh_of(*shape)["replicate"].get_group()
        mine = [tensor.clone() for tensor in held(model)]
        assert not equal_over(mine, group)
        synchronize_replicas(model)
        assert equal_over(held(model), group)
        assert model.layers[1].linear.weight is model.layers[0].linear.weight
        if group.rank() == 0:
            assert all(torch.equal(was, now) for was, now in zip(mine, held(model), strict=True))
        check_replicas(model)


@ranks(4)
def test_a_forward_after_it_sees_the_new_weights() -> None:
    """The root keeps its unsharded weights after a forward without a backward."""
    torch.manual_seed(dist.get_rank())
    model = shard(Stack(5, 1), mesh_of(2, 2))
    with torch.no_grad():
        model(batch(0))
        synchronize_replicas(model)
        assert len({tuple(map(tuple, said)) for said in said_by_all(model(batch(0)).tolist())}) == 1


@ranks(4)
def test_a_change_of_one_number_is_named_on_every_rank() -> None:
    model = random_on_every_rank(2, 2)
    synchronize_replicas(model)
    check_replicas(model)
    changes = {
        "head.weight": lambda: local_of(model.head.weight).view(torch.int32)[0, 0].bitwise_xor_(1),
        "layers.1.norm.bias": lambda: local_of(model.layers[1].norm.bias).data.add_(1e-7),
        "seen": lambda: model.seen[4].logical_not_(),
        "count": lambda: model.count.add_(256),
        "narrow": lambda: model.narrow[2].mul_(-1),
        "outside": lambda: model.outside.data[1].add_(1),
    }
    for name, change in changes.items():
        if dist.get_rank() == 2:  # the first shard of the second replica
            with torch.no_grad():
                change()
        with pytest.raises(ReplicaError, match=rf"replicas differ in {name}: call sync"):
            check_replicas(model)
        synchronize_replicas(model)
        check_replicas(model)


@ranks(4)
def test_parts_are_named_apart() -> None:
    parts = [random_on_every_rank(2, 2), random_on_every_rank(2, 2)]
    synchronize_replicas(parts)
    check_replicas(parts)
    if dist.get_rank() == 3:
        with torch.no_grad():
            parts[1].count.add_(1)
    with pytest.raises(ReplicaError, match="replicas differ in part 1, count: "):
        check_replicas(parts)


@ranks(2)
def test_one_replica_or_none_has_nothing_to_send() -> None:
    for model in (random_on_every_rank(1, 2), random_on_every_rank(2)):
        mine = [tensor.clone() for tensor in held(model)]
        synchronize_replicas(model)
        check_replicas(model)
        assert all(torch.equal(was, now) for was, now in zip(mine, held(model), strict=True))


@ranks(2)
def test_a_model_without_units_is_refused() -> None:
    for act in (synchronize_replicas, check_replicas):
        with pytest.raises(ConfigError, match=r"no FSDP units, so no replicas: call .*fully_shard"):
            act(torch.nn.Linear(2, 2))


@ranks(2)
def test_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Stack(5, 1)
    shard(model, mesh_of(2, 1))
    with pytest.raises(ConfigError, match=r"head\.weight is on the meta device: call"):
        synchronize_replicas(model)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


@ranks(4)
def test_running_statistics_are_each_ranks_own() -> None:
    """As under FSDP2 alone: they start equal, part with the batches, and are not compared."""
    model = fully_shard(Normed(), mesh=mesh_of(2, 2))
    model.norm.running_mean.fill_(dist.get_rank())
    synchronize_replicas(model)
    assert equal_over([model.norm.running_mean], mesh_of(2, 2)["replicate"].get_group())
    model(torch.randn(3, 4) + dist.get_rank())
    assert not equal_over([model.norm.running_mean], mesh_of(2, 2)["replicate"].get_group())
    check_replicas(model)
    if dist.get_rank() == 3:
        local_of(model.norm.weight).data.add_(1e-3)
    with pytest.raises(ReplicaError, match=r"replicas differ in norm.weight: call"):
        check_replicas(model)


@ranks(2)
def test_what_is_no_model_is_told_by_every_call() -> None:
    model = random_on_every_rank(2, 1)
    topology = Topology.uniform(world_size=2, ranks_per_node=1)
    calls: list[Callable[[Any], object]] = [
        synchronize_replicas,
        check_replicas,
        lambda given: apply_mics(given, topology=topology),
        lambda given: explain(given, num_micro_steps=1, topology=topology),
        lambda given: gradient_accumulation(given, num_micro_steps=1).__enter__(),
        lambda given: ReplicaShardedOptimizer(given, torch.optim.AdamW),
    ]
    for call in calls:
        for given, name in ((model.head.weight, "DTensor"), ({"a": model}, "str"), (2, "int")):
            with pytest.raises(ConfigError, match=f"a {name} is no model: give the model"):
                call(given)
