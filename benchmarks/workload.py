"""What is trained: the same model, data and optimizer for every system."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Linears:
    """A stack of square linear layers without bias, each an FSDP unit; the loss is a mean square.

    `sleep_ms` stands in for the compute of an accelerator: each layer sleeps that long in the
    forward and twice that long in the backward.
    """

    dim: int = 1024
    num_layers: int = 4
    batch_size: int = 4
    micro_steps: int = 4
    sleep_ms: float = 0.0

    def model(self) -> nn.Sequential:
        """The model, equal on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(_Layer(self.dim, self.sleep_ms) for _ in range(self.num_layers)))

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered and reduced each in a message of its own."""
        return list(model.children())

    def batches(self, rank: int) -> Iterator[torch.Tensor]:
        """One a micro-step; other data on every rank and in every micro-step."""
        random = torch.Generator().manual_seed(1 + rank)
        for _ in range(self.micro_steps):
            yield torch.randn(self.batch_size, self.dim, generator=random)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Divided by the micro-steps, so that gradients are those of the mean over all of them."""
        loss: torch.Tensor = model(batch).square().mean() / self.micro_steps
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD: the step is communication, not the optimizer's arithmetic."""
        return torch.optim.SGD(model.parameters(), **self.optimizer_options)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Of SGD."""
        return {"lr": 1e-3}


class _Layer(nn.Linear):
    def __init__(self, dim: int, sleep_ms: float) -> None:
        super().__init__(dim, dim, bias=False)
        self.sleep_s = sleep_ms / 1e3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return _Sleep.apply(y, self.sleep_s) if self.sleep_s else y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep_s: float) -> torch.Tensor:
        ctx.sleep_s = sleep_s
        time.sleep(sleep_s)
        return x.clone()  # a view would drop FSDP2's hook in silence

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.sleep_s)
        return grad, None
