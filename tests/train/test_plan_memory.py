"""The closed form of `plan/memory.py` against a traced step of torchtitan's model, sharded."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torchtitan")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from mics_dtensor.layout import Layout
from mics_dtensor.plan.memory import CPU, Holding, Memory, peak_memory
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import Checkpointing, preset_of, shape_of
from mics_dtensor.plan.step import Work
from mics_dtensor.plan.trace import traced_peak
from mics_dtensor.topology import Topology
from mics_dtensor.train import device_shim
from mics_dtensor.train.block_checkpointing import EveryNthBlockAC
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.model import model_spec

WORLD = 64
WORDS = 4096
POLICIES = {
    "full": FullAC.Config(),
    "op": SelectiveAC.Config(),
    "2": EveryNthBlockAC.Config(every=2),
}


@pytest.fixture
def fake_world() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def sharded(flavor: str, num_layers: int, partition_size: int, checkpointing: str) -> nn.Module:
    flavor, _, smaller = flavor.partition(", ")
    config = replace_at(RunConfig(), "model.flavor", flavor)
    spec = model_spec(replace_at(config, "model.n_layers", num_layers))
    if smaller:
        spec.model.vocab_size = WORDS
        spec.model.tok_embeddings.num_embeddings = WORDS
        spec.model.lm_head.out_features = WORDS
    device_shim.use_attention_of_cpu(spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    if checkpointing != "none":
        POLICIES[checkpointing].build().apply(model)
    shape = (WORLD // partition_size, partition_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (model.tok_embeddings, *model.layers.values()):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def positions(flavor: str) -> int:
    spec = model_spec(replace_at(RunConfig(), "model.flavor", flavor.partition(", ")[0]))
    return spec.model.max_seq_len


def closed_form(
    flavor: str, num_layers: int, partition_size: int, work: tuple[Checkpointing, int, int]
) -> Memory:
    checkpointing, micro_batch, seq_len = work
    name, _, smaller = flavor.partition(", ")
    model = preset("llama3", name).with_layers(num_layers)
    if smaller:  # so that the blocks decide, and not the logits
        model = preset_of(replace(shape_of(model), vocab=WORDS), name=name)
    topology = Topology.uniform(world_size=WORLD, ranks_per_node=8)
    layout = Layout(topology=topology, partition_size=partition_size)
    return peak_memory(
        traffic_units(model, layout, Policy(chunked_loss=False)),
        Work(
            shape=shape_of(model),
            seq_len=seq_len,
            micro_batch=micro_batch,
            checkpointing=checkpointing,
        ),
        Holding(hierarchical=False, max_seq_len=positions(flavor)),
        CPU,
    )


def traced(
    flavor: str, num_layers: int, partition_size: int, work: tuple[Checkpointing, int, int]
) -> int:
    checkpointing, micro_batch, seq_len = work
    model = sharded(flavor, num_layers, partition_size, checkpointing)

    def loss_of(tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, place).flatten(0, 1).float()
        return functional.cross_entropy(logits, tokens.flatten())

    batch = (micro_batch, seq_len)
    return traced_peak(model, lambda m: torch.optim.AdamW(m.parameters()), loss_of, [batch, batch])[
        "Total"
    ]


FEW = [
    ("8B", 2, 8, ("full", 1, 4096)),
    ("8B", 3, 64, ("none", 1, 2048)),
    ("8B, 4096 words", 3, 8, ("full", 1, 4096)),
]
GRID = [
    ("8B", 4, 8, ("none", 1, 8192)),
    ("8B", 4, 16, ("op", 2, 4096)),
    ("8B", 5, 8, ("2", 1, 4096)),
    ("8B", 8, 32, ("full", 1, 4096)),
    ("8B", 6, 64, ("op", 1, 2048)),
    ("8B", 4, 64, ("full", 4, 2048)),
    ("70B", 2, 32, ("full", 1, 1024)),
    ("70B", 4, 8, ("none", 1, 4096)),
    ("70B", 4, 64, ("op", 2, 4096)),
    ("70B", 6, 64, ("full", 2, 8192)),
    ("405B", 2, 64, ("full", 1, 4096)),
    ("8B, 4096 words", 4, 8, ("none", 1, 4096)),
    ("8B, 4096 words", 8, 16, ("full", 2, 4096)),
    ("8B, 4096 words", 4, 8, ("op", 1, 4096)),
    ("8B, 4096 words", 5, 64, ("2", 1, 2048)),
    ("70B, 4096 words", 3, 32, ("full", 1, 1024)),
    ("70B, 4096 words", 3, 64, ("op", 2, 4096)),
    ("debugmodel", 6, 4, ("none", 8, 2048)),
    ("debugmodel", 6, 16, ("full", 8, 2048)),
]


def check(case: tuple[str, int, int, tuple[Checkpointing, int, int]]) -> None:
    ours, true = closed_form(*case).traced, traced(*case)
    print(
        f"{case}: closed form {ours / 2**20:.0f} MiB, trace {true / 2**20:.0f} MiB, "
        f"{ours / true - 1:+.2%}"
    )
    assert abs(ours - true) <= 0.03 * true


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_closed_form_is_within_3_percent_of_the_trace(
    case: tuple[str, int, int, tuple[Checkpointing, int, int]],
) -> None:
    check(case)


@pytest.mark.matrix
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("case", GRID, ids=str)
def test_over_depth_width_partition_size_checkpointing_and_micro_batch(
    case: tuple[str, int, int, tuple[Checkpointing, int, int]],
) -> None:
    check(case)
