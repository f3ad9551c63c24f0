"""Separate projections without norms: Llama and everything that is stored like it."""

from upcycle.families.family import COMMON, Family
from upcycle.families.projections import Separate

_BIAS = "attention_bias"

FAMILIES = (
    Family("llama", {**COMMON}, qkv_bias=_BIAS, output_bias=_BIAS),
    Family("arcee", {**COMMON, "hidden_size": 2560}, qkv_bias=_BIAS, output_bias=_BIAS),
    Family("aria_text", {**COMMON}, qkv_bias=_BIAS, output_bias=_BIAS),
    *(
        Family(
            model_type,
            {
                **COMMON, "hidden_size": 8192, "num_hidden_layers": 40,
                "num_attention_heads": 64, **head_dim,
            },
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            rope_pairing="interleaved",
        )
        for model_type, head_dim in (("cohere2", {}), ("cohere2_moe", {"head_dim": 128}))
    ),
    Family(
        "cwm",
        {
            **COMMON, "hidden_size": 6144, "num_hidden_layers": 64, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
    Family(
        "ernie4_5",
        {
            **COMMON, "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 128,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        rope_pairing="interleaved",
    ),
    Family(
        "ernie4_5_moe",
        {
            **COMMON, "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
            "num_key_value_heads": 4,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        rope_pairing="interleaved",
    ),
    Family(
        "exaone",
        {**COMMON, "num_key_value_heads": 8},
        aliases={"num_hidden_layers": "num_layers"},
        projections=Separate(output="out_proj"),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        attention_module="transformer.h.{layer}.attn.attention",
    ),
    Family(
        "gemma",
        {
            **COMMON, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 256,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    *(
        Family(
            model_type,
            {
                **COMMON, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": 256,
            },
            qkv_bias=_BIAS,
            output_bias=_BIAS,
        )
        for model_type in ("gemma2", "vaultgemma")
    ),
    *(
        Family(
            model_type,
            {
                **COMMON, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128,
                "partial_rotary_factor": 0.5, _BIAS: True,
            },
            qkv_bias=_BIAS,
            rope_pairing="interleaved",
        )
        for model_type in ("glm", "glm4")
    ),
    *(
        Family(model_type, {**COMMON}, qkv_bias=_BIAS, output_bias=_BIAS)
        for model_type in ("granite", "granitemoe", "granitemoeshared", "hyperclovax")
    ),
    Family(
        "helium",
        {
            **COMMON, "hidden_size": 2560, "num_hidden_layers": 24, "num_attention_heads": 20,
            "num_key_value_heads": 20, "head_dim": 128,
        },
        qkv_bias=_BIAS,
        rope_pairing="interleaved",
    ),
    Family(
        "internlm3",
        {
            **COMMON, "num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 128,
        },
        aliases={_BIAS: "qkv_bias"},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    Family(
        "iquestcoder",
        {
            **COMMON, "hidden_size": 5120, "num_hidden_layers": 80, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    Family(
        "jais2",
        {
            **COMMON, "hidden_size": 3328, "num_attention_heads": 26, _BIAS: True,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    *(
        Family(model_type, {**COMMON, "num_key_value_heads": 8})
        for model_type in ("mistral", "mixtral", "ministral")
    ),
    Family(
        "ministral3",
        {**COMMON, "num_hidden_layers": 34, "num_key_value_heads": 8, "head_dim": 128},
    ),
    Family(
        "nemotron",
        {
            **COMMON, "hidden_size": 6144, "num_attention_heads": 48,
            "partial_rotary_factor": 0.5, "initializer_range": 0.0134,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    Family("olmo", {**COMMON}, qkv_bias=_BIAS, output_bias=_BIAS),
    Family("phimoe", {**COMMON, "num_key_value_heads": 8}, qkv_bias=_BIAS, output_bias=_BIAS),
    Family("qwen2", {**COMMON, "num_key_value_heads": 32}, qkv_bias=True),
    Family(
        "qwen2_moe",
        {
            **COMMON, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
    ),
    Family(
        "seed_oss",
        {
            **COMMON, "num_hidden_layers": 64, "num_attention_heads": 80,
            "num_key_value_heads": 8, "head_dim": 128, _BIAS: True,
        },
        qkv_bias=_BIAS,
        output_bias="attention_out_bias",
    ),
    Family(
        "smollm3",
        {
            **COMMON, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
    ),
    Family(
        "solar_open",
        {
            **COMMON, "num_hidden_layers": 48, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128,
        },
        qkv_bias=_BIAS,
    ),
    Family(
        "starcoder2",
        {
            **COMMON, "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24,
            "num_key_value_heads": 2, "use_bias": True, "initializer_range": 0.018042,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
    ),
    # Attention sinks: a logit per query head that joins the softmax.
    Family(
        "gpt_oss",
        {
            **COMMON, "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, _BIAS: True,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        sinks="sinks",
    ),
    Family(
        "granite_swa",
        {
            **COMMON, "hidden_size": 2560, "num_hidden_layers": 24, "num_attention_heads": 20,
            "num_key_value_heads": 4,
        },
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        sinks="sinks",
    ),
    Family("granitemoe_swa", {**COMMON}, qkv_bias=_BIAS, output_bias=_BIAS, sinks="sinks"),
    # Attention beside a state-space path in every layer.
    Family("falcon_h1", {**COMMON, "num_key_value_heads": 8}, qkv_bias=_BIAS, output_bias=_BIAS),
)  # fmt: skip
