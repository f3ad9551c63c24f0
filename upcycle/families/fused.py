"""q, k and v in one tensor."""

from upcycle.attention import QkNorm
from upcycle.families.cached import Windows
from upcycle.families.family import Family
from upcycle.families.projections import Fused
from upcycle.families.qk_norms import NormTensors

FAMILIES = (
    Family("phi3", projections=Fused(), windows=Windows()),
    Family(
        "sarvam_moe",
        aliases={"attention_bias": "use_qkv_bias"},
        projections=Fused("query_key_value", "dense"),
        qkv_bias="attention_bias",
        qk_norm=NormTensors(
            QkNorm("rms", "shared"),
            when="use_qk_norm",
            query="query_layernorm",
            key="key_layernorm",
        ),
        attention_module="model.layers.{layer}.attention",
    ),
    Family(
        "gpt_bigcode",
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
        projections=Fused("c_attn", "c_proj", per_head=True),
        qkv_bias=True,
        output_bias=True,
        rope_pairing="none",
        attention_module="transformer.h.{layer}.attn",
        multi_query_key="multi_query",
        refused={"add_cross_attention": "its cross-attention has keys of its own"},
    ),
    Family(
        "falcon",
        projections=Fused("query_key_value", "dense", per_head=True),
        qkv_bias="bias",
        output_bias="bias",
        rope_when=("alibi", False),
        alibi="alibi",
        attention_module="transformer.h.{layer}.self_attention",
        multi_query_key="multi_query",
    ),
)
