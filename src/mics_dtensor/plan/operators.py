"""What a block's operators move beside its products, and which kernel is its attention. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["as products", "flash-1", "flash-2"]
"""FlashAttention of 2022, which Triton's of 2023 is like, and of 2023; or at the products' rate."""


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Bytes that each moves for an element, read and written, in the forward in bf16 (F6, F7).

    `norm` and `sum` are of one of the block's two, `rotation` of an element of queries or keys,
    `gate` (silu and product) or `gelu` of one of the feed-forward, `score` of a score of attention,
    where its kernel writes them. `loss_bytes` are of a logit, forward and backward. Products of
    blocks are `product_gain` times as fast as in bf16 (T2).
    """

    norm_bytes: float = 4
    sum_bytes: float = 6
    rotation_bytes: float = 20
    gate_bytes: float = 10
    gelu_bytes: float = 4
    score_bytes: float = 0
    loss_bytes: float = 26
    attention: Attention = "flash-2"
    product_gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Share of the peak that the forward of a kernel reaches, attention counted in full (T10).

    Its backward takes `backward` times as long as its forward.
    """

    kernel: Attention
    share: float
    backward: float
    source: str = ""


EAGER = Operators()
"""torch 2.13, one kernel an operator: norms fused, the rotation in fp32 (read 2, written 4,
multiplied 8, read 4, written 2), silu (4) and product (6). The loss: logits written, cast, read
twice for the softmax; its gradient written in fp32 and cast back."""

FLOAT8_GAIN = 1.50
"""Products in float8, with one scale a tensor, over those in bf16, casts included: fitted by
`python -m benchmarks.planner --fit` on one run of 8 H100."""

COMPILED = Operators(norm_bytes=2, rotation_bytes=4, gate_bytes=6, loss_bytes=10)
"""torch.compile: a norm takes its input from the sum before it; rotation, gate and loss read their
inputs once (the loss twice) and write once."""
