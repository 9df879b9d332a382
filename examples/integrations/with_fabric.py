"""Lightning Fabric: a parallelize_fn makes the mesh, shards, and applies MiCS.

    torchrun --nproc-per-node 4 examples/integrations/with_fabric.py

The model, the data and the losses are those of examples/01_add_to_fsdp2.py.
"""

from itertools import islice

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import mics_dtensor as mics

NUM_STEPS, NUM_MICRO_STEPS = 20, 4


def parallelize(model: nn.Sequential, lightning_mesh: DeviceMesh) -> nn.Sequential:
    topology = mics.Topology.uniform(world_size=lightning_mesh.size(), ranks_per_node=2)
    layout = mics.Layout(topology=topology, partition_size=2)
    mesh = mics.init_mesh(layout, device_type=lightning_mesh.device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mics.apply_mics(model, topology=topology)
    mics.synchronize_replicas(model)
    return model


strategy = ModelParallelStrategy(parallelize, data_parallel_size=4, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
fabric.launch()

tokens = torch.randint(0, 256, (10_240,), generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(tokens, (tokens * 7 + 3) % 256)
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=32))
batches = iter(loader)

torch.manual_seed(0)
model = fabric.setup(
    nn.Sequential(
        nn.Embedding(256, 64),
        *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)],
        nn.Linear(64, 256),
    )
)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))

for step in range(1, NUM_STEPS + 1):
    mean_loss = torch.zeros(())
    with mics.gradient_accumulation(model, num_micro_steps=NUM_MICRO_STEPS) as accumulation:
        for inputs, targets in islice(batches, NUM_MICRO_STEPS):
            with accumulation.micro_step():
                loss = nn.functional.cross_entropy(model(inputs), targets) / NUM_MICRO_STEPS
                fabric.backward(loss)
            mean_loss += loss.detach()
    mics.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean_loss = fabric.all_reduce(mean_loss, reduce_op="mean")
    if fabric.is_global_zero and step % 5 in (0, 1):
        print(f"step {step:2d}  loss {mean_loss:.6f}", flush=True)
