"""torchtitan's Llama in the sizes of the fixture zero3_llama_2: a [model] name of one's own."""

from typing import Any

from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

DIM, HEADS, KV_HEADS, HIDDEN, TOKENS, LAYERS = 16, 2, 1, 24, 96, 2


def model_registry(
    flavor: str, attn_backend: str = "flex", num_kv_heads: int = KV_HEADS, **_: Any
) -> ModelSpec:
    """One flavor, whatever its name."""
    norm = {"weight": llama3._NORM_INIT["weight"]}
    model = llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=TOKENS,
        tok_embeddings=Embedding.Config(
            num_embeddings=TOKENS, embedding_dim=DIM, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=norm),
        lm_head=Linear.Config(
            in_features=DIM, out_features=TOKENS, param_init=llama3._output_linear_init(DIM)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=LAYERS,
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=num_kv_heads,
            hidden_dim=HIDDEN,
            rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64),
            attn_backend=attn_backend,
        ),
    )
    return ModelSpec(
        name="tiny_llama",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )
