"""Separate projections without norms: Llama and everything that is stored like it."""

from upcycle.families.cached import (
    States,
    Windows,
    after_dense_layers,
    all_but_first_of,
    all_but_last_of,
    lower_even_layers,
    mamba_2,
    upper_layers,
    where_rotated,
)
from upcycle.families.family import Family
from upcycle.families.projections import Separate

_BIAS = "attention_bias"

FAMILIES = (
    *(
        Family(model_type, qkv_bias=_BIAS, output_bias=_BIAS)
        for model_type in (
            "arcee", "aria_text", "gemma", "granite", "granitemoe", "granitemoeshared",
            "hyperclovax", "iquestcoder", "jais2", "llama", "nemotron", "olmo",
        )
    ),
    Family("solar_open", qkv_bias=_BIAS),
    Family("seed_oss", qkv_bias=_BIAS, output_bias="attention_out_bias"),
    Family(
        "exaone",
        aliases={"num_hidden_layers": "num_layers"},
        projections=Separate(output="out_proj"),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        attention_module="transformer.h.{layer}.attn.attention",
    ),
    Family("internlm3", aliases={_BIAS: "qkv_bias"}, qkv_bias=_BIAS, output_bias=_BIAS),
    # Rotary planes of neighbouring channels.
    *(
        Family(
            model_type, qkv_bias="use_bias", output_bias="use_bias", rope_pairing="interleaved"
        )
        for model_type in ("ernie4_5", "ernie4_5_moe")
    ),
    *(
        Family(model_type, qkv_bias=_BIAS, rope_pairing="interleaved")
        for model_type in ("glm", "glm4", "helium")
    ),
    # Windows.
    *(
        Family(model_type, windows=Windows())
        for model_type in ("ministral", "ministral3", "mistral", "mixtral")
    ),
    Family("phimoe", qkv_bias=_BIAS, output_bias=_BIAS, windows=Windows()),
    Family("starcoder2", qkv_bias="use_bias", output_bias="use_bias", windows=Windows()),
    Family("cwm", windows=Windows(all_but_first_of(4))),
    Family("qwen2", qkv_bias=True, windows=Windows(upper_layers, switch="use_sliding_window")),
    Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        windows=Windows(lower_even_layers, switch="use_sliding_window"),
    ),
    *(
        Family(
            model_type, qkv_bias=_BIAS, output_bias=_BIAS, windows=Windows(all_but_last_of(2))
        )
        for model_type in ("gemma2", "vaultgemma")
    ),
    Family(
        "smollm3",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        windows=Windows(where_rotated(False), switch="use_sliding_window"),
    ),
    Family(
        "cohere2",
        {"sliding_window_pattern": 4},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rope_pairing="interleaved",
        windows=Windows(all_but_last_of("sliding_window_pattern")),
    ),
    Family(
        "cohere2_moe",
        {"first_k_dense_replace": 0},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rope_pairing="interleaved",
        windows=Windows(after_dense_layers),
    ),
    # Attention sinks: a logit per query head that joins the softmax.
    Family(
        "gpt_oss",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        sinks="sinks",
        windows=Windows(all_but_last_of(2)),
    ),
    *(
        Family(
            model_type,
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            sinks="sinks",
            windows=Windows(all_but_first_of(4)),
        )
        for model_type in ("granite_swa", "granitemoe_swa")
    ),
    # Attention beside a state-space path in every layer.
    Family(
        "falcon_h1", qkv_bias=_BIAS, output_bias=_BIAS, states=States(mamba_2, everywhere=True)
    ),
)  # fmt: skip
