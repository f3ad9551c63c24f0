"""Separate projections whose queries and keys are normalised."""

from upcycle.attention import QkNorm
from upcycle.families.cached import (
    Windows,
    all_but_last_of,
    every_layer,
    no_layer,
    upper_layers,
    where_rotated,
)
from upcycle.families.family import Family
from upcycle.families.projections import Separate
from upcycle.families.qk_norms import NormTensors

_BIAS = "attention_bias"
_RMS_PER_HEAD = NormTensors(QkNorm("rms", "shared"))
_RMS_OVER_HEADS = NormTensors(QkNorm("rms", "all"))
_AFTER_ROPE = QkNorm("rms", "shared", after_rope=True)

FAMILIES = (
    # One RMS weight of head_dim for all heads.
    *(
        Family(model_type, qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=_RMS_PER_HEAD)
        for model_type in ("apertus", "hy_v3")
    ),
    *(
        Family(
            model_type,
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            qk_norm=_RMS_PER_HEAD,
            windows=Windows(rule, switch="use_sliding_window"),
        )
        for model_type, rule in (("qwen3", upper_layers), ("qwen3_moe", every_layer))
    ),
    *(
        Family(
            model_type,
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            qk_norm=_RMS_PER_HEAD,
            windows=Windows(rule),
        )
        for model_type, rule in (("dots1", upper_layers), ("mellum", no_layer))
    ),
    Family(
        "gemma3_text",
        {"sliding_window_pattern": 6},
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("rms", "shared", offset=1.0)),
        windows=Windows(all_but_last_of("sliding_window_pattern")),
    ),
    *(
        Family(
            model_type,
            qk_norm=_RMS_PER_HEAD,
            windows=Windows(all_but_last_of("sliding_window_pattern")),
        )
        for model_type in ("exaone4", "exaone_moe")
    ),
    Family("kolibri1", qk_norm=_RMS_PER_HEAD, windows=Windows(all_but_last_of(5))),
    Family(
        "glm4_moe",
        qkv_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("rms", "shared"), when="use_qk_norm"),
    ),
    Family(
        "afmoe",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_PER_HEAD,
        gate="gate_proj.weight",
        windows=Windows(all_but_last_of("global_attn_every_n_layers")),
    ),
    # The same after the rotation.
    *(
        Family(
            model_type,
            qkv_bias=_BIAS,
            output_bias=_BIAS,
            qk_norm=NormTensors(_AFTER_ROPE, query="query_layernorm", key="key_layernorm"),
        )
        for model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    ),
    Family(
        "nanochat",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(_AFTER_ROPE, query=None, key=None),
        rope_clockwise=True,
    ),
    Family(
        "llama4_text",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(_AFTER_ROPE, when="use_qk_norm", query=None, key=None),
        rope_pairing="interleaved",
        windows=Windows(where_rotated(True), key="attention_chunk_size", kind="chunked_attention"),
    ),
    # The RMS is taken over the channels of all heads together.
    *(
        Family(model_type, qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=_RMS_OVER_HEADS)
        for model_type in ("flex_olmo", "olmo2", "olmoe")
    ),
    Family(
        "olmo3",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=_RMS_OVER_HEADS,
        windows=Windows(all_but_last_of(4)),
    ),
    Family("minimax_m2", qk_norm=_RMS_OVER_HEADS),
    # LayerNorms, if the configuration asks for them.
    Family(
        "cohere",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=NormTensors(QkNorm("layer", "head"), "layer_norm_eps", when="use_qk_norm"),
        rope_pairing="interleaved",
    ),
    Family(
        "stablelm",
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
)
