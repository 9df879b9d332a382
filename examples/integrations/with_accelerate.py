"""Accelerate: MicsAccelerator in place of Accelerator; the loop stays as it is.

    torchrun --nproc-per-node 4 examples/integrations/with_accelerate.py

The model, the data and the losses are those of examples/01_add_to_fsdp2.py.
"""

import torch
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from mics_dtensor import Topology, init_mesh
from mics_dtensor.integrations.accelerate import MicsAccelerator, layout_of

NUM_STEPS, NUM_MICRO_STEPS = 20, 4

topology = Topology.uniform(world_size=4, ranks_per_node=2)
accelerator = MicsAccelerator(
    cpu=True, gradient_accumulation_steps=NUM_MICRO_STEPS, topology=topology
)
sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
mesh = init_mesh(layout_of(sizes, topology=topology), device_type="cpu")

tokens = torch.randint(0, 256, (10_240,), generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(tokens, (tokens * 7 + 3) % 256)
loader = DataLoader(dataset, batch_size=32)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 64),
    *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)],
    nn.Linear(64, 256),
)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, losses = 0, list[torch.Tensor]()
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.detach())
    if accelerator.sync_gradients:
        step += 1
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        losses.clear()
        if step % 5 in (0, 1):
            accelerator.print(f"step {step:2d}  loss {mean_loss:.6f}", flush=True)

accelerator.end_training()
