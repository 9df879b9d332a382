"""The sizes of a dense transformer, and what one token costs in FLOPs and in bytes moved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.operators import EAGER, Operators
from mics_dtensor.plan.presets import Preset, UnitShapes

Checkpointing = Literal["none", "op", "2", "full", "early"]
"""What is computed again: nothing, by operator (torchtitan), every second block, every block.

"early" is every block with torch's early stop, which leaves out the last product, w2; torchtitan
0.3 does not stop early.
"""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense transformer. Widths in elements; `tied`: one table for embeddings and head."""

    num_layers: int
    hidden: int
    attention_width: int
    key_value_width: int
    ffn: int
    vocab: int
    head_dim: int = 128
    gated: bool = True
    tied: bool = False
    head_norms: bool = False
    """Queries and keys are normed head by head, as in qwen3."""

    @property
    def num_heads(self) -> int:
        """Of the queries."""
        return self.attention_width // self.head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Of the keys (or values)."""
        return self.key_value_width // self.head_dim

    @property
    def product_params(self) -> int:
        """Elements of a block that take part in matrix products."""
        qkv = self.hidden * (self.attention_width + 2 * self.key_value_width)
        return qkv + self.attention_width * self.hidden + self.ffn_products * self.hidden * self.ffn

    @property
    def ffn_products(self) -> int:
        """Matrices of the feed-forward: three where it is gated."""
        return 3 if self.gated else 2

    def block_flops(self, seq_len: int) -> float:
        """FLOPs of a block's forward for one token; attention in full, as Megatron counts (F1)."""
        return 2.0 * self.product_params + self.attention_flops(seq_len)

    def attention_flops(self, seq_len: int) -> float:
        """Those of attention among them, in full."""
        return 4.0 * seq_len * self.attention_width

    def attention_again(self, checkpointing: Checkpointing) -> float:
        """Share of a block's attention that is computed again, mean over the blocks."""
        some = {"none": 0.0, "op": 0.0, "2": self.num_layers // 2 / self.num_layers}
        return some.get(checkpointing, 1.0)

    @property
    def head_flops(self) -> float:
        """FLOPs of the head's forward for one token (F2)."""
        return 2.0 * self.hidden * self.vocab

    def model_flops(self, seq_len: int) -> float:
        """FLOPs of forward and backward for one token: what MFU counts (F3)."""
        return 3.0 * (self.num_layers * self.block_flops(seq_len) + self.head_flops)

    def hardware_flops(self, seq_len: int, checkpointing: Checkpointing) -> float:
        """The same with what is computed again: what HFU counts (F4)."""
        again = self.num_layers * self.recomputed_flops(seq_len, checkpointing)
        return self.model_flops(seq_len) + again

    def recomputed_flops(self, seq_len: int, checkpointing: Checkpointing) -> float:
        """FLOPs of a block's second forward for one token, mean over the blocks (F5).

        By operator torchtitan computes every second product again: wo and one of the feed-forward.
        """
        match checkpointing:
            case "none":
                return 0.0
            case "op":
                return 2.0 * self.hidden * (self.attention_width + self.ffn)
            case "2":
                return self.block_flops(seq_len) * (self.num_layers // 2) / self.num_layers
            case "full":
                return self.block_flops(seq_len)
            case "early":
                return self.block_flops(seq_len) - 2.0 * self.ffn * self.hidden

    def block_bytes(
        self, operators: Operators = EAGER, *, seq_len: int = 0, sequence_parts: int = 1
    ) -> float:
        """Bytes that a block's forward moves for one token outside of products, in bf16 (F6).

        Two norms, two residual sums, the rotation of queries and keys (and their norms), and the
        activation; and a score a head and token, of kernels that write them. Norms and sums of a
        rank are those of one of `sequence_parts` parts of the sequence.
        """
        its = operators
        rotated = self.attention_width + self.key_value_width
        heads = (its.rotation_bytes + its.norm_bytes * self.head_norms) * rotated
        activated = (its.gate_bytes if self.gated else its.gelu_bytes) * self.ffn
        summed = 2 * (its.norm_bytes + its.sum_bytes) * self.hidden / sequence_parts
        scores = its.score_bytes * self.num_heads * seq_len
        return summed + heads + activated + scores

    def head_bytes(self, operators: Operators = EAGER) -> float:
        """Bytes that the loss moves for one token, forward and backward (F7)."""
        return self.vocab * operators.loss_bytes

    @property
    def cut_head_bytes(self) -> float:
        """The same where the vocabulary is cut: torchtitan's own loss, operator by operator (F8).

        Forward: logits in bf16, cast to fp32, their maximum, less it, exponential, sum, less its
        logarithm. Backward: zeros, exponential, sum of both, times the loss's gradient, cast.
        """
        forward = 2.0 + (2 + 4) + 4 + (4 + 4) + (4 + 4) + 4 + (4 + 4)
        return self.vocab * (forward + 4 + (4 + 4) + (8 + 4) + (4 + 4) + (4 + 2))


def shape_of(preset: Preset) -> ModelShape:
    """The sizes behind a preset's parameters. Raises PlanError for what is not dense."""
    blocks = [unit for unit in preset.units if unit.name == "layers.*"]
    shapes = {
        name.removesuffix(".weight"): shape for unit in blocks for name, shape in unit.parameters
    }
    normed = shapes.get("attention.q_norm")
    dense = len(blocks) == 1 and "feed_forward.w1" in shapes and "attention.wo" in shapes
    if not dense or (preset.num_heads is None and normed is None):
        raise PlanError(
            f"memory and time are planned for the dense blocks of llama3 and qwen3, not yet for "
            f"{preset.model} {preset.flavor} (`mics explain` tells its messages)"
        )
    width = shapes["attention.wo"][1]
    tables = dict(each for unit in preset.units for each in unit.parameters)
    return ModelShape(
        num_layers=blocks[0].count,
        hidden=shapes["attention.wo"][0],
        attention_width=width,
        key_value_width=_key_value_width(shapes, width),
        ffn=shapes["feed_forward.w1"][0],
        vocab=tables["tok_embeddings.weight"][0],
        head_dim=normed[0] if preset.num_heads is None and normed else width // _heads(preset),
        tied="lm_head.weight" not in tables,
        head_norms=normed is not None,
    )


def _heads(preset: Preset) -> int:
    return preset.num_heads or 1


def _key_value_width(shapes: Mapping[str, tuple[int, ...]], width: int) -> int:
    """Of the keys: one product for queries, keys and values, or three."""
    if "attention.qkv_linear.wqkv" in shapes:
        return (shapes["attention.qkv_linear.wqkv"][0] - width) // 2
    return shapes["attention.qkv_linear.wk"][0]


def preset_of(shape: ModelShape, *, name: str) -> Preset:
    """FSDP units of a shape that no preset holds, one a block, tied table in the root."""
    hidden = shape.hidden
    qkv = shape.attention_width + 2 * shape.key_value_width
    block = [
        ("attention.qkv_linear.wqkv.weight", (qkv, hidden)),
        ("attention.wo.weight", (hidden, shape.attention_width)),
        ("feed_forward.w1.weight", (shape.ffn, hidden)),
        ("feed_forward.w2.weight", (hidden, shape.ffn)),
        ("attention_norm.weight", (hidden,)),
        ("ffn_norm.weight", (hidden,)),
    ]
    if shape.gated:
        block.append(("feed_forward.w3.weight", (shape.ffn, hidden)))
    table = ("tok_embeddings.weight", (shape.vocab, hidden))
    norm, head = ("norm.weight", (hidden,)), ("lm_head.weight", (shape.vocab, hidden))
    blocks = UnitShapes("layers.*", shape.num_layers, tuple(block))
    units: tuple[UnitShapes, ...]
    if shape.tied:
        units = (UnitShapes("tok_embeddings, norm, lm_head", 1, (table, norm)), blocks)
    else:
        first = UnitShapes("tok_embeddings", 1, (table,))
        units = (first, blocks, UnitShapes("norm, lm_head", 1, (norm, head)))
    num_heads = shape.attention_width // shape.head_dim
    return Preset(model=name, flavor="", units=units, num_heads=num_heads)
