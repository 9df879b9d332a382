"""The 175B by trace: `python -m benchmarks.planner.traced [--write]`. Wants torch alone.

Traces a plain GPT of 175B on FSDP2 in two depths, plans every partition size of 16,384 GPUs with
it, and prints CPU seconds and memory of this process, torch's import among them. With --write
also to benchmarks/planner/results, where `python -m benchmarks.planner` reads them.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from datetime import UTC, datetime

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.planner.checks import GPT_175B, TRACED
from mics_dtensor.layout import Layout, partition_sizes
from mics_dtensor.mesh import init_mesh
from mics_dtensor.plan.extrapolate import Depths, Trace, depths_for
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import ModelShape, preset_of
from mics_dtensor.plan.trace import traced_moments
from mics_dtensor.topology import Topology
from mics_dtensor.upstream import local_of
from mics_dtensor.upstream.tracing import fake_store

SEQ_LEN, SHARDS, WORLD = 2048, 64, 16384


class Block(nn.Module):
    """A block of GPT without biases, computed again in the backward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.attention_width // shape.head_dim
        self.attention_norm, self.ffn_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.wqkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.w1 = nn.Linear(hidden, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        qkv = self.wqkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        inner = self.w2(functional.gelu(self.w1(self.ffn_norm(x))))
        return x + inner  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embeddings, blocks, norm and head."""

    def __init__(self, shape: ModelShape, num_layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(num_layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


def trace(num_layers: int) -> Trace:
    """A step of so many blocks, over the fake world."""
    with torch.device("meta"):
        model = GPT(GPT_175B, num_layers)
    topology = Topology.uniform(world_size=SHARDS, ranks_per_node=SHARDS)
    mesh = init_mesh(Layout(topology=topology, partition_size=SHARDS), device_type="cpu")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (model.tok_embeddings, *model.layers):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens).flatten(0, 1).float()
        return functional.cross_entropy(logits, tokens.flatten())

    moments = traced_moments(
        model, lambda its: torch.optim.AdamW(its.parameters()), loss_of, [(1, SEQ_LEN)]
    )
    numel = sum(local_of(parameter).numel() for parameter in model.parameters())
    return Trace(num_layers, SHARDS, numel, moments)


def main() -> None:
    torch.distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=SHARDS)
    depths = Depths(*(trace(depth) for depth in depths_for(GPT_175B.num_layers)))
    torch.distributed.destroy_process_group()
    topology = Topology.uniform(world_size=WORLD, ranks_per_node=8)
    preset = preset_of(GPT_175B, name="175B")
    for size in partition_sizes(topology):
        layout = Layout(topology=topology, partition_size=size)
        units = traffic_units(preset, layout, Policy(chunked_loss=False))
        numel = sum(unit.count * unit.shard_numel() for unit in units)
        peak = depths.peak(GPT_175B.num_layers, size, numel)["Total"]
        print(f"partition size {size:>6}: {peak / 1e9:>8.1f} GB at the peak")
    seconds = time.process_time()  # of the whole process; other work on the machine is not in it
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"{seconds:.1f} CPU seconds, {megabytes:.0f} MB (to reach: 15 and 600)")
    if "--write" in sys.argv[1:]:
        told = {
            "schema": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "cpu_s": round(seconds, 2),
            "megabytes": round(megabytes),
        }
        TRACED.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
