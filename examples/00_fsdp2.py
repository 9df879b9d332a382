"""A plain FSDP2 script with replicas (HSDP): what 01_add_to_fsdp2.py starts from.

    torchrun --nproc-per-node 4 examples/00_fsdp2.py

Each of the four micro-steps ends with an all-reduce over the replicas.
"""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_STEPS, NUM_MICRO_STEPS = 20, 4

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

tokens = torch.randint(0, 256, (10_240,), generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(tokens, (tokens * 7 + 3) % 256)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, shuffle=False))

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

batches = iter(loader)
for step in range(1, NUM_STEPS + 1):
    mean_loss = torch.zeros(())
    for inputs, targets in islice(batches, NUM_MICRO_STEPS):
        loss = nn.functional.cross_entropy(model(inputs), targets) / NUM_MICRO_STEPS
        loss.backward()
        mean_loss += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0 and step % 5 in (0, 1):
        print(f"step {step:2d}  loss {mean_loss:.6f}", flush=True)

dist.destroy_process_group()
