"""Attention by plain products of matrices, for devices that have no kernel of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common.attention import FlexAttention

from mics_dtensor.errors import ConfigError

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DenseAttention(FlexAttention):
    """The function of torchtitan's FlexAttention, and its gradient, with the mask written out.

    FlexAttention and VarlenAttention have no backward on CPU. This one takes the same BlockMask
    (documents, sliding windows, parts of a sequence under context parallel), so that a model is the
    same on CPU as it is on a GPU. Time and memory grow with the square of the sequence.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """torchtitan's; block sizes and options of a kernel have no effect."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """[batch, length, heads, size of a head], as q is; the keys may be of more tokens."""
        if options.get("score_mod") is not None:
            raise ConfigError("attention with a score_mod has no form on CPU yet; use a GPU")
        q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))  # [b, n, l, h]
        mask = _written_out(attention_masks, q.size(2), k.size(2), q.device)
        groups = q.size(1) // k.size(1)
        if groups > 1:
            k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        if out_transform is None:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            return out.transpose(1, 2)
        return out_transform(*_with_log_sum_exp(q, k, v, mask=mask, scale=scale))


def _written_out(
    mask: BlockMask, num_queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """[batch, heads or 1, queries, keys]: True where a query sees a key."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    return create_mask(mask.mask_mod, batch, heads, num_queries, num_keys, device=device)


def _with_log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is attended to [b, l, n, h], and the log-sum-exp of the scores [b, l, n] in fp32."""
    scores = (q @ k.transpose(-1, -2)).float() * (q.size(-1) ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    log_sum_exp = scores.logsumexp(-1)
    out = (scores - log_sum_exp.unsqueeze(-1)).exp().to(v.dtype) @ v
    return out.transpose(1, 2), log_sum_exp.transpose(1, 2)
