"""node_local_backward: the same gradients, and no gather of a backward between nodes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mics_dtensor import Layout, Topology, apply_mics, explain, gradient_accumulation, init_mesh
from mics_dtensor.errors import ConfigError

NUM_LAYERS, NUM_MICRO_STEPS = 4, 2


def sharded(topology: Topology, partition_size: int, **options: bool) -> nn.Module:
    mesh = init_mesh(Layout(topology=topology, partition_size=partition_size), device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(NUM_LAYERS)))  # 7: shards are uneven
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    apply_mics(model, topology=topology, **options)
    apply_mics(model, topology=topology, **options)  # twice is the same as once
    return model


def accumulate(model: nn.Module, seed: int) -> list[torch.Tensor]:
    with gradient_accumulation(model, num_micro_steps=NUM_MICRO_STEPS) as accumulation:
        for number in range(NUM_MICRO_STEPS):
            noise = torch.Generator().manual_seed(100 * seed + 10 * number + dist.get_rank())
            with accumulation.micro_step():
                model(torch.randn(3, 7, generator=noise)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("partition_size", [4, 8])
@ranks(8)
def test_the_same_gradients_and_the_bytes_that_explain_tells(partition_size: int) -> None:
    topology = Topology.uniform(world_size=8, ranks_per_node=2)
    plain = sharded(topology, partition_size)
    local = sharded(topology, partition_size, node_local_backward=True)
    for seed in range(3):
        for expected, got in zip(accumulate(plain, seed), accumulate(local, seed), strict=True):
            assert torch.equal(got, expected)

    nodes = partition_size // 2
    across = [r for r in range(8) if r % 2 == dist.get_rank() % 2]
    first = dist.get_rank() // partition_size * nodes
    across = across[first : first + nodes]
    for model, gathers in ((plain, 2), (local, 1)):
        with (
            count_collectives() as counted,
            gradient_accumulation(model, num_micro_steps=NUM_MICRO_STEPS) as accumulation,
        ):
            for _ in range(NUM_MICRO_STEPS):
                with accumulation.micro_step():
                    model(torch.randn(3, 7)).sum().backward()
        each = NUM_LAYERS * NUM_MICRO_STEPS  # small: gathers and the reduction are exchanges
        assert counted.num("all_to_all", ranks=across) == (gathers + 1) * each
        assert counted.by_kind == explain(model, num_micro_steps=NUM_MICRO_STEPS).collectives
    # Of three units between nodes in a micro-step (two gathers, one reduction) two are left; what
    # is over is the boundary's, the same in both.
    told = [explain(m, num_micro_steps=NUM_MICRO_STEPS).traffic for m in (plain, local)]
    before, after = (traffic.inter_node_bytes_per_micro_step for traffic in told)
    assert 3 * after == 2 * before


@ranks(8)
def test_what_cannot_be_is_refused() -> None:
    topology = Topology.uniform(world_size=8, ranks_per_node=4)
    with pytest.raises(ConfigError, match="leave hierarchical on"):
        sharded(topology, 8, hierarchical=False, node_local_backward=True)
    layout = Layout(topology=topology, partition_size=4, tensor_parallel_size=2)
    mesh = init_mesh(layout, device_type="cpu")
    model = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model[0], mesh=mesh["replicate", "shard"])
    with pytest.raises(ConfigError, match="cannot reshard to a smaller group"):
        apply_mics(model, topology=topology, node_local_backward=True)
