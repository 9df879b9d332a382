"""Groups of init_mesh give up at the user's timeout, not after the backend's half hour."""

from datetime import timedelta

import pytest
import torch
from harness.ranks import ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mics_dtensor import Layout, Topology, gradient_accumulation, init_mesh
from mics_dtensor.upstream import set_timeout, timeout_of

SHORT = timedelta(seconds=4)


@ranks(4)
def test_ranks_of_one_group_that_run_different_micro_steps_do_not_wait_for_ever() -> None:
    set_timeout(SHORT, None)
    topology = Topology.uniform(world_size=4, ranks_per_node=2)
    mesh = init_mesh(Layout(topology=topology, partition_size=2), device_type="cpu")
    assert {timeout_of(mesh.get_group(axis), "cpu") for axis in mesh.mesh_dim_names} == {SHORT}
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # FSDP2's collectives and ours meet: a RuntimeError of torch, or our CommunicationError.
    with pytest.raises(RuntimeError):
        run(model, num_micro_steps=2 + dist.get_rank() % 2)


def run(model: nn.Module, *, num_micro_steps: int) -> None:
    with gradient_accumulation(model, num_micro_steps=num_micro_steps) as accumulation:
        for _ in range(num_micro_steps):
            with accumulation.micro_step():
                model(torch.randn(2, 16)).sum().backward()
