"""MicsAccelerator: short last steps, loops left early, models that are not sharded; layout_of."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ParallelismConfig
from harness.ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from mics_dtensor import Topology, init_mesh
from mics_dtensor.errors import AccumulationError, ConfigError
from mics_dtensor.integrations.accelerate import MicsAccelerator, layout_of

pytestmark = pytest.mark.filterwarnings("ignore")

TOPOLOGY = Topology.uniform(world_size=4, ranks_per_node=2)
NUM_MICRO_STEPS = 3


def data() -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * 2 * 8, 6, generator=draw)  # 8 batches of 2 on each of 4 ranks
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=2)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    accelerator: Accelerator, model: Any, num_epochs: int, leave_at: int = -1, *, clips: bool = True
) -> list[float]:
    """The loop of Accelerate's own examples, which clip or do not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    seen: list[float] = []
    for _ in range(num_epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(seen) == leave_at:
                return seen
    return seen


def alone(num_epochs: int, *, clips: bool = True) -> list[float]:
    """One process on whole batches; the last step of an epoch has 2 micro-steps."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    inputs, targets = data().dataset.tensors
    seen = []
    for _ in range(num_epochs):
        for batch, (x, y) in enumerate(zip(inputs.chunk(8), targets.chunk(8), strict=True)):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / NUM_MICRO_STEPS).backward()
            seen.append(loss.item())
            if batch in (2, 5, 7):
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return seen


def accelerator() -> MicsAccelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options = {"cpu": True, "gradient_accumulation_steps": NUM_MICRO_STEPS}
    return MicsAccelerator(topology=TOPOLOGY, **options)


def sharded() -> nn.Sequential:
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    mesh = init_mesh(layout_of(sizes, topology=TOPOLOGY), device_type="cpu")
    model = build()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("clips", [True, False])
@ranks(4, timeout_s=200, torchrun=True)
def test_losses_are_those_of_one_process_with_a_short_last_step(clips: bool) -> None:
    expected = pytest.approx(alone(2, clips=clips), rel=1e-5)
    assert train(accelerator(), sharded(), 2, clips=clips) == expected
    plain = accelerator()  # not sharded: Accelerate's DDP
    assert train(plain, build(), 2, clips=clips) == expected


@ranks(4, timeout_s=200, torchrun=True)
def test_a_loop_that_is_left_early_starts_clean_after_abandon() -> None:
    its, model = accelerator(), sharded()
    train(its, model, 1, leave_at=4)
    weights = [parameter.full_tensor().clone() for parameter in model.parameters()]
    its.abandon()
    assert all(parameter.grad is None for parameter in model.parameters())
    its.step = 0  # Accelerate's own count
    train(its, model, 1, leave_at=2)  # not yet a step
    with pytest.raises(AccumulationError, match="partial sum of one replica"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter.full_tensor(), weight)
    its.abandon()


@pytest.mark.parametrize(
    ("sizes", "partition_size", "tensor_parallel_size"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 8}, 8, 1),
        ({"dp_shard_size": 16}, 16, 1),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, 4, 2),
    ],
)
def test_the_layout_of_a_parallelism_config(
    sizes: dict[str, int], partition_size: int, tensor_parallel_size: int
) -> None:
    topology = Topology.uniform(world_size=16, ranks_per_node=8)
    layout = layout_of(ParallelismConfig(**sizes), topology=topology)
    assert layout.partition_size == partition_size
    assert layout.tensor_parallel_size == tensor_parallel_size
    assert layout.num_replicas == sizes.get("dp_replicate_size", 1)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp_shard_size": 8}, "multiply to 8, and the world has 16 ranks"),
        ({"dp_shard_size": 8, "sp_size": 2}, "sp_size is 2, DeepSpeed's sequence parallelism"),
        ({"dp_replicate_size": 16}, None),
    ],
)
def test_what_a_layout_cannot_be(sizes: dict[str, int], said: str | None) -> None:
    topology = Topology.uniform(world_size=16, ranks_per_node=8)
    config = ParallelismConfig(**sizes)
    if said is None:
        assert layout_of(config, topology=topology).partition_size == 1
        return
    with pytest.raises(ConfigError, match=said):
        layout_of(config, topology=topology)
