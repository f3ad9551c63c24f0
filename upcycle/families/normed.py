"""Separate projections whose queries and keys are normalised."""

from upcycle.attention import QkNorm
from upcycle.families.family import COMMON, Family
from upcycle.families.projections import Separate
from upcycle.families.qk_norms import NormTensors

_BIAS = "attention_bias"
_RMS_PER_HEAD = NormTensors(QkNorm("rms", "shared"))
_RMS_OVER_HEADS = NormTensors(QkNorm("rms", "all"))
_AFTER_ROPE = QkNorm("rms", "shared", after_rope=True)

FAMILIES = (
    # One RMS weight of head_dim for all heads.
    Family(
        "qwen3",
        {**COMMON, "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "qwen3_moe",
        {
            **COMMON, "hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "gemma3_text",
        {
            **COMMON, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("rms", "shared", offset=1.0)),
    ),
    *(
        Family(
            model_type,
            {**COMMON, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
            qk_norm=_RMS_PER_HEAD,
        )
        for model_type in ("exaone4", "exaone_moe")
    ),
    Family(
        "apertus",
        {**COMMON, "rms_norm_eps": 1e-5},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "glm4_moe",
        {
            **COMMON, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        qkv_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("rms", "shared"), when="use_qk_norm"),
    ),
    Family(
        "dots1",
        {
            **COMMON, "hidden_size": 4608, "num_hidden_layers": 62, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "mellum",
        {
            **COMMON, "hidden_size": 2304, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "head_dim": 128, "rms_norm_eps": 1e-6,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "hy_v3",
        {
            **COMMON, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "initializer_range": 0.006,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "kolibri1",
        {
            **COMMON, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48,
            "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
        },
        qk_norm=_RMS_PER_HEAD,
    ),
    Family(
        "afmoe",
        {
            **COMMON, "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
        gate="gate_proj.weight",
    ),
    # The same after the rotation.
    *(
        Family(
            model_type,
            {**COMMON, "rms_norm_eps": 1e-5},
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            qk_norm=NormTensors(_AFTER_ROPE, query="query_layernorm", key="key_layernorm"),
        )
        for model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    ),
    Family(
        "nanochat",
        {
            **COMMON, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 6,
            "rms_norm_eps": 1e-6,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(_AFTER_ROPE, query=None, key=None),
        rope_clockwise=True,
    ),
    Family(
        "llama4_text",
        {
            **COMMON, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "use_qk_norm": True,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(_AFTER_ROPE, when="use_qk_norm", query=None, key=None),
        rope_pairing="interleaved",
    ),
    # The RMS is taken over the channels of all heads together.
    *(
        Family(
            model_type,
            {**COMMON, "rms_norm_eps": eps},
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            qk_norm=_RMS_OVER_HEADS,
        )
        for model_type, eps in (("olmo2", 1e-5), ("olmo3", 1e-5), ("flex_olmo", 1e-6))
    ),
    Family(
        "olmoe",
        {
            **COMMON, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "rms_norm_eps": 1e-5,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_OVER_HEADS,
    ),
    Family(
        "minimax_m2",
        {
            **COMMON, "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        },
        qk_norm=_RMS_OVER_HEADS,
    ),
    # LayerNorms, if the configuration asks for them.
    Family(
        "cohere",
        {
            **COMMON, "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
            "layer_norm_eps": 1e-5,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("layer", "head"), "layer_norm_eps", when="use_qk_norm"),
        rope_pairing="interleaved",
    ),
    Family(
        "stablelm",
        {
            **COMMON, "hidden_size": 2560, "num_key_value_heads": 32, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        qkv_bias="use_qkv_bias",
        qk_norm=NormTensors(
            QkNorm("layer", "head"),
            "layer_norm_eps",
            when="qk_layernorm",
            query="q_layernorm",
            key="k_layernorm",
            each_head=True,
        ),
    ),
    Family(
        "phi",
        {
            **COMMON, "hidden_size": 2048, "num_hidden_layers": 24, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        projections=Separate(output="dense"),
        qkv_bias=True,
        output_bias=True,
        qk_norm=NormTensors(
            QkNorm("layer", "shared"),
            "layer_norm_eps",
            when="qk_layernorm",
            query="q_layernorm",
            key="k_layernorm",
            bias=True,
        ),
    ),
)  # fmt: skip
