"""Tensor parallel, then FSDP2, then MiCS: 8 ranks as (replicate, shard, tp) = (2, 2, 2).

    torchrun --nproc-per-node 8 examples/02_with_tensor_parallel.py

Tensor parallel lies innermost, inside a node: two nodes of four ranks, one partition group a node.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mics_dtensor as mics

dist.init_process_group("gloo")
torch.manual_seed(0)  # what the plan leaves out must start equal on the ranks of an axis tp

topology = mics.Topology.uniform(world_size=8, ranks_per_node=4)
layout = mics.Layout(topology=topology, partition_size=2, tensor_parallel_size=2)
mesh = mics.init_mesh(layout, device_type="cpu")

mlps = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
model = nn.Sequential(nn.Embedding(256, 64), *mlps, nn.Linear(64, 256))
for mlp in mlps:
    mlp.append(nn.LayerNorm(64))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # "3", the LayerNorm, stays outside
    parallelize_module(mlp, mesh["tp"], plan)
for layer in model:
    fully_shard(layer, mesh=mesh["replicate", "shard"])
fully_shard(model, mesh=mesh["replicate", "shard"])
mics.apply_mics(model, topology=topology)
mics.synchronize_replicas(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.Generator().manual_seed(dist.get_rank() // 2)  # an axis tp reads the same text
if dist.get_rank() == 0:
    print(mics.explain(model, num_micro_steps=2))

for step in range(1, 21):
    loss_of_step = torch.zeros(())
    with mics.gradient_accumulation(model, num_micro_steps=2) as accumulation:
        for _ in range(2):
            tokens = torch.randint(0, 256, (32,), generator=data)
            with accumulation.micro_step():
                loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 256) / 2
                loss.backward()
            loss_of_step += loss.detach() / dist.get_world_size()
    mics.clip_grad_norm_(model.parameters(), max_norm=0.5)  # torch's refuses two kinds of mesh
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss_of_step)
    if dist.get_rank() == 0:
        print(f"step {step:2d}  loss {loss_of_step.item():.7f}", flush=True)

dist.destroy_process_group()
