"""float8 all-gather (torchao's tensorwise linear): several tensors of a unit in a gather."""

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics_dtensor import (
    Layout,
    Topology,
    apply_mics,
    clip_grad_norm_,
    gradient_accumulation,
    init_mesh,
    synchronize_replicas,
)

pytest.importorskip("torchao", exc_type=ImportError)

TOPOLOGY = Topology.uniform(world_size=8, ranks_per_node=2)
WIDTH = 32
BLOCK_BYTES = WIDTH * WIDTH * 2 + WIDTH * 2  # two float8 weights, a bfloat16 bias


def float8_model() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
        for _ in range(3)
    ]
    # emulate: the products in high precision, since a CPU has none in float8.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = convert_to_float8_training(nn.Sequential(*blocks), config=config)
    mesh = init_mesh(Layout(topology=TOPOLOGY, partition_size=4), device_type="cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh["replicate", "shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["replicate", "shard"], mp_policy=policy)
    return model


# A float8 linear returns a view, of which FSDP2 warns; torchao has warnings of its own.
@pytest.mark.filterwarnings("default")
@ranks(8, timeout_s=100)
def test_float8_gathers_train_as_plain_fsdp2_does() -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    plain, ours = float8_model(), float8_model()
    apply_mics(ours, topology=TOPOLOGY)
    synchronize_replicas(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, ours)]
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        batches = [torch.randn(16, WIDTH, generator=data) for _ in range(3)]
        expected = []
        for batch in batches:
            loss = plain(batch).float().pow(2).mean() / 3
            loss.backward()
            expected.append(loss.item())
        got = []
        with (
            count_collectives() as counted,
            gradient_accumulation(ours, num_micro_steps=3) as accumulation,
        ):
            for batch in batches:
                with accumulation.micro_step():
                    loss = ours(batch).float().pow(2).mean() / 3
                    loss.backward()
                got.append(loss.item())
        assert got == expected
        for (name, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad.full_tensor(),
                theirs.grad.full_tensor(),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda said, name=name: f"{name}: {said}",
            )
        gathers = [call for call in counted.calls if call.kind == "all_gather"]
        # Within the node, the two shards of each local rank: one byte an element of a weight.
        assert {call.message_bytes for call in gathers} == {BLOCK_BYTES}
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            precompute_float8_dynamic_scale_for_fsdp(model)
