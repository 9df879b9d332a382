"""The tiny Llama with one table for embedding and head, and heads that two ranks can share."""

from dataclasses import replace
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec
from train import tiny_llama

from mics_dtensor.plan.presets import Preset
from mics_dtensor.plan.shape import ModelShape, preset_of

TOKENS = 2048  # as many as the shipped tokenizer has

SHAPE = ModelShape(
    num_layers=tiny_llama.LAYERS,
    hidden=tiny_llama.DIM,
    attention_width=tiny_llama.DIM,
    key_value_width=tiny_llama.DIM,
    ffn=tiny_llama.HIDDEN,
    vocab=TOKENS,
    head_dim=tiny_llama.DIM // tiny_llama.HEADS,
    tied=True,
)


def shapes() -> Preset:
    """What the planner knows of it."""
    return preset_of(SHAPE, name="tiny_tied")


def model_registry(flavor: str, **options: Any) -> ModelSpec:
    """One flavor, whatever its name."""
    spec = tiny_llama.model_registry(flavor, num_kv_heads=tiny_llama.HEADS, **options)
    model: Any = spec.model
    model.enable_weight_tying, model.vocab_size = True, TOKENS
    model.tok_embeddings = replace(model.tok_embeddings, num_embeddings=TOKENS)
    model.lm_head = replace(model.lm_head, out_features=TOKENS)
    return spec
