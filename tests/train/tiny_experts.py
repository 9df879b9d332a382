"""Models of one's own, named by this module: torchtitan's with experts, with smaller experts.

Two blocks of a debug flavor: its first, and its last, which has experts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

FLAVORS = {
    "qwen3": ("qwen3", "debugmodel_moe"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
    "gpt_oss": ("gpt_oss", "debugmodel"),
}
NUM_EXPERTS, WIDTH = 8, 64


def model_registry(flavor: str, **options: Any) -> Any:
    """The ModelSpec of a debug flavor, at a fraction of its size."""
    model, name = FLAVORS[flavor]
    spec = import_module(f"torchtitan.models.{model}").model_registry(name, **options)
    del spec.model.layers[1:-1]
    for block in spec.model.layers:
        if block.moe is None:
            continue
        routed, router = block.moe.routed_experts, block.moe.router
        for each in (block.moe, routed.inner_experts, routed.token_dispatcher, router):
            each.num_experts = NUM_EXPERTS
        routed.inner_experts.hidden_dim = WIDTH
        router.gate.out_features = NUM_EXPERTS
        router.top_k = routed.token_dispatcher.top_k = 2
    return spec
