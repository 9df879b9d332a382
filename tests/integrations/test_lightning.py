"""MicsStrategy: resuming, stopping, clipping, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mics_dtensor import Topology
from mics_dtensor.errors import ConfigError
from mics_dtensor.integrations.lightning import MicsStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_MICRO_STEPS = 3


class Regression(LightningModule):
    """Two layers, a unit each; counts what crosses the replicas in every batch."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.seen: list[float] = []
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        torch.manual_seed(self.trainer.global_rank // 2)  # replicas must be made equal
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        mesh = self.trainer.strategy.mics_mesh["replicate", "shard"]
        for layer in self.layers[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.layers.parameters(), lr=0.03)

    def train_dataloader(self) -> DataLoader:
        its = self.trainer.strategy.distributed_sampler_kwargs
        assert its == {"num_replicas": 4, "rank": dist.get_rank()}
        sampler = DistributedSampler(data(), shuffle=False, **its)  # Lightning would shuffle
        return DataLoader(data(), batch_size=2, sampler=sampler)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.seen.append(self.trainer.strategy.reduce(loss.detach()).item())
        return loss


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * 2 * 8, 6, generator=draw)  # 8 batches of 2 on each of 4 ranks
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def trainer(**options: Any) -> Trainer:
    strategy = MicsStrategy(
        partition_size=2, topology=Topology.uniform(world_size=4, ranks_per_node=2)
    )
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": 2, "enable_checkpointing": False} | options
    return Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        accumulate_grad_batches=NUM_MICRO_STEPS,
        **quiet,
        **options,
    )


def alone(num_epochs: int, max_norm: float = 0.0) -> list[float]:
    """One process on whole batches; an epoch's last step has 2 micro-steps of 8, as Lightning's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    inputs, targets = data().tensors
    seen = []
    for _ in range(num_epochs):
        for batch, (x, y) in enumerate(zip(inputs.chunk(8), targets.chunk(8), strict=True)):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / NUM_MICRO_STEPS).backward()
            seen.append(loss.item())
            if batch in (2, 5, 7):
                if max_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@ranks(4, timeout_s=200, torchrun=True)
def test_losses_are_those_of_one_process_with_a_short_last_step(max_norm: float) -> None:
    module = Regression()
    trainer(gradient_clip_val=max_norm or None).fit(module)
    assert module.seen == pytest.approx(alone(2, max_norm), rel=1e-5)


class Counting(Callback):
    """All-reduces over the replicas, batch by batch."""

    def __init__(self) -> None:
        self.per_batch: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.replicas = (0, 2) if dist.get_rank() % 2 == 0 else (1, 3)
        self.context = count_collectives()
        self.count = self.context.__enter__()

    def on_train_batch_end(self, *_: object) -> None:
        self.context.__exit__(None, None, None)
        self.per_batch.append(self.count.num("all_reduce", ranks=self.replicas))


@ranks(4, timeout_s=200, torchrun=True)
def test_batches_that_accumulate_send_nothing_between_replicas() -> None:
    counting = Counting()
    trainer(callbacks=[counting], max_epochs=1).fit(Regression())
    hop = 2  # one message of gradients, one of what takes part
    assert counting.per_batch == [0, 0, hop, 0, 0, hop, 0, hop]


@ranks(4, timeout_s=240, torchrun=True)
def test_a_distributed_checkpoint_resumes_where_it_was_written(folder: Path) -> None:
    whole = Regression()
    trainer(max_epochs=3).fit(whole)
    first = trainer(max_epochs=1)
    first.fit(Regression())
    first.save_checkpoint(folder / "step.ckpt")  # a folder: every rank writes its shards
    assert (folder / "step.ckpt" / ".metadata").exists()
    resumed = Regression()
    trainer(max_epochs=3).fit(resumed, ckpt_path=folder / "step.ckpt", weights_only=False)
    assert resumed.seen == whole.seen[8:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Stops(Callback):
    """Stops after the first batch of an optimizer step."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        trainer.should_stop = len(module.seen) == 4


class Breaks(Callback):
    """Raises between two micro-steps."""

    def on_train_batch_start(self, _: Trainer, module: LightningModule, *__: object) -> None:
        if len(module.seen) == 4:
            raise KeyError("between two micro-steps")


@pytest.mark.parametrize("ends", [Stops, Breaks])
@ranks(4, timeout_s=200, torchrun=True)
def test_a_step_that_is_cut_short_leaves_nothing_behind(ends: type[Callback]) -> None:
    module = Regression()
    stopped = trainer(callbacks=[ends()], max_epochs=1)
    if ends is Breaks:
        with pytest.raises(KeyError, match="between two micro-steps"):
            stopped.fit(module)
    else:
        stopped.fit(module)
    assert len(module.seen) == 4
    module.seen.clear()
    trainer(max_epochs=1).fit(module)  # the same module, in a new trainer
    assert len(module.seen) == 8


@ranks(4, timeout_s=200, torchrun=True)
def test_an_optimizer_that_runs_its_closure_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS runs its closure several times a step"):
        trainer().fit(Regression(torch.optim.LBFGS))
