"""Bytes of gradients that a rank holds between micro-steps: Accelerate's no_sync, and ours.

    torchrun --nproc-per-node 4 -m benchmarks.held_gradients

Needs accelerate. Counted, not timed: each tensor that holds a gradient, on rank 0, after the first
of several micro-steps. Accelerate's own code runs; its FSDP2 path is reached on CPU by saying that
the state is FSDP2, since Accelerate chooses it on GPUs only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import fully_shard

import mics_dtensor as mics
from mics_dtensor.upstream import local_of, units_of

NUM_BLOCKS, WIDTH = 8, 256


def build(partition_size: int) -> nn.Sequential:
    """Eight linear layers, a unit each, on a mesh (world / partition_size, partition_size)."""
    topology = mics.Topology.uniform(world_size=dist.get_world_size(), ranks_per_node=2)
    layout = mics.Layout(topology=topology, partition_size=partition_size)
    mesh = mics.init_mesh(layout, device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mics.apply_mics(model, topology=topology)
    return model


def held_bytes(model: nn.Module) -> int:
    """Sharded gradients in `.grad`, and those that FSDP2 keeps unsharded."""
    held = 0
    for unit in units_of(model):
        for param in unit.params:
            unsharded = getattr(param.fsdp, "_unsharded_param", None)
            kept = [param.parameter.grad, param.fsdp.unsharded_accumulated_grad]
            kept.append(None if unsharded is None else unsharded.grad)
            held += sum(local_of(its).nbytes for its in kept if its is not None)
    return held


def backward(model: nn.Module) -> None:
    """One micro-step, on data of this rank's own."""
    model(torch.full((4, WIDTH), 1.0 + dist.get_rank())).square().mean().backward()


def with_accelerate(partition_size: int) -> int:
    """After the first of two micro-steps in Accelerate's `accumulate`."""
    model = build(partition_size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if not accelerator.is_fsdp2:
        raise RuntimeError("Accelerate does not take its FSDP2 path")
    with accelerator.accumulate(model):
        backward(model)
    return held_bytes(model)


def with_mics(partition_size: int) -> int:
    """After the first of two micro-steps of ours."""
    model = build(partition_size)
    with mics.gradient_accumulation(model, num_micro_steps=2) as accumulation:
        with accumulation.micro_step():
            backward(model)
        held = held_bytes(model)
        with accumulation.micro_step():
            backward(model)
    return held


def main() -> None:
    """Print one line a partition size."""
    dist.init_process_group("gloo")
    parameters = NUM_BLOCKS * (WIDTH * WIDTH + WIDTH)
    for partition_size in (2, 4):
        theirs, ours = with_accelerate(partition_size), with_mics(partition_size)
        if dist.get_rank() == 0:
            print(
                f"{parameters:,} fp32 parameters, partition size {partition_size}: "
                f"Accelerate's no_sync holds {theirs:,} bytes of gradients, MiCS {ours:,} "
                f"({theirs / ours:.2f} x)",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
