"""An FSDP2 script, and the three lines that make it train with MiCS (marked).

    torchrun --nproc-per-node 4 examples/01_add_to_fsdp2.py

Four CPU ranks as two nodes of two; on a cluster, Topology.detect() reads the nodes from the hosts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import mics_dtensor as mics

NUM_MICRO_STEPS = 4

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())

topology = mics.Topology.uniform(world_size=dist.get_world_size(), ranks_per_node=2)
mesh = mics.init_mesh(mics.Layout(topology=topology, partition_size=2), device_type="cpu")

model = nn.Sequential(
    nn.Embedding(256, 64),
    *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)],
    nn.Linear(64, 256),
)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
mics.apply_mics(model, topology=topology)  # 1: a group that spans nodes gathers in two stages
mics.synchronize_replicas(model)  # 2: every replica starts from replica 0's parameters

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.Generator().manual_seed(dist.get_rank())
if dist.get_rank() == 0:
    print(mics.explain(model, num_micro_steps=NUM_MICRO_STEPS))

for step in range(1, 21):
    loss_of_step = 0.0
    with mics.gradient_accumulation(model, num_micro_steps=NUM_MICRO_STEPS) as accumulation:  # 3
        for _ in range(NUM_MICRO_STEPS):
            tokens = torch.randint(0, 256, (32,), generator=data)
            with accumulation.micro_step():  # gradients cross the replicas in the last one
                loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 256)
                (loss / NUM_MICRO_STEPS).backward()
            loss_of_step += loss.item() / NUM_MICRO_STEPS
    mics.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 in (0, 1):
        print(f"step {step:2d}  loss {loss_of_step:.3f}", flush=True)

dist.destroy_process_group()
