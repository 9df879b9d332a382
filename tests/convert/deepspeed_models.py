"""The models whose checkpoints are the fixtures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, tied weights, frozen parameters, buffers."""

    def __init__(self, *, frozen: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.old = nn.Linear(5, 3)
            self.old.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.embed(tokens)
        hidden = hidden + self.down(self.norm(torch.tanh(self.up(hidden)))) * self.scale
        return self.head(hidden)

    def groups(self) -> list[dict[str, Any]]:
        """Decay for matrices only, as most scripts have it."""
        of = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in of if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in of if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ]


class Attention(nn.Module):
    """The names and shapes of Hugging Face's Llama attention; what it computes is no attention."""

    def __init__(self, dim: int, kv_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kv = torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        return self.o_proj(torch.tanh(self.q_proj(x)) * kv)


class Feed(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim: int, kv_dim: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim, kv_dim)
        self.mlp = Feed(dim, hidden)
        self.input_layernorm = nn.RMSNorm(dim)
        self.post_attention_layernorm = nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaByName(nn.Module):
    """The names of a Hugging Face Llama: 2 blocks of width 16, 2 heads, 1 of keys, 96 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(96, 16)
        self.model.layers = nn.ModuleList([Block(16, 8, 24) for _ in range(2)])
        self.model.norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(16, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.model.embed_tokens(tokens % 96)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return self.lm_head(self.model.norm(hidden))
