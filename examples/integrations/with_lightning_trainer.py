"""Lightning's Trainer: MicsStrategy, accumulate_grad_batches and gradient_clip_val as ever.

    torchrun --nproc-per-node 4 examples/integrations/with_lightning_trainer.py

The model, the data and the losses are those of examples/01_add_to_fsdp2.py.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mics_dtensor import Topology
from mics_dtensor.integrations.lightning import MicsStrategy

NUM_STEPS, NUM_MICRO_STEPS = 20, 4


class Tokens(LightningModule):
    def configure_model(self) -> None:
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(256, 64),
            *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)],
            nn.Linear(64, 256),
        )
        mesh = self.trainer.strategy.mics_mesh["replicate", "shard"]
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 256, (10_240,), generator=draw)
        dataset = TensorDataset(tokens, (tokens * 7 + 3) % 256)
        sampler = DistributedSampler(dataset, shuffle=False)  # Lightning would shuffle
        return DataLoader(dataset, batch_size=32, sampler=sampler)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        if len(self.losses) == NUM_MICRO_STEPS:
            mean_loss = self.trainer.strategy.reduce(torch.stack(self.losses).mean())
            self.losses.clear()
            step = self.trainer.global_step
            if self.trainer.is_global_zero and step % 5 in (0, 1):
                print(f"step {step:2d}  loss {mean_loss:.6f}", flush=True)


topology = Topology.uniform(world_size=4, ranks_per_node=2)
trainer = Trainer(
    accelerator="cpu",
    devices=4,
    strategy=MicsStrategy(partition_size=2, topology=topology),
    accumulate_grad_batches=NUM_MICRO_STEPS,
    gradient_clip_val=1.0,
    max_steps=NUM_STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Tokens())
