"""Families of transformers that export, and a tiny random model of each.

What a family has that others lack is switched on: windows shorter than the context, experts, ...
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import BASE, FAMILIES, byte_tokenizer, kv_settings, tiny_checkpoint

CONTEXT = 64
_WINDOW = 24
_HYBRID = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_SCALED, "rope_type": "yarn"}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": CONTEXT,
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
}
# What the export has to deal with in each family beyond Llama, and the settings that show it.
EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("q/k-norm, no gate", {}),
    "arcee": ("no gate", {}),
    "aria_text": ("experts", {}),
    "cohere": ("interleaved RoPE, q/k-norm, tied", {}),
    "cohere2": ("layers without RoPE, windows", _HYBRID),
    "cwm": ("windows", _HYBRID),
    "dots1": ("experts", {}),
    "ernie4_5": ("interleaved RoPE, biases", {}),
    "exaone4": ("q/k-norm, post-norm, windows", _HYBRID),
    "exaone_moe": ("experts", {}),
    "gemma": ("explicit head_dim, scaled embeddings", {}),
    "gemma2": ("soft-capped scores, windows", {**_HYBRID, "attn_logit_softcapping": 5.0}),
    "gemma3_text": ("RoPE by layer type, windows", _HYBRID),
    "glm": ("partial interleaved RoPE", {}),
    "glm4": ("partial interleaved RoPE", {}),
    "glm4_moe": ("experts, partial RoPE, q/k-norm", {}),
    "gpt2": ("learned positions, no groups", {}),
    "gpt_bigcode": ("learned positions, one KV head", {}),
    "gpt_neox": ("partial RoPE, fused QKV, no groups", {}),
    "gpt_oss": ("experts, attention sinks, windows", _HYBRID),
    "granite": ("scaled scores and residuals", {}),
    "granitemoe": ("experts", {}),
    "helium": ("interleaved RoPE", {}),
    "hunyuan_v1_dense": ("q/k-norm after RoPE", {}),
    "llama": ("Llama 3's scaled RoPE", {"rope_parameters": _LLAMA3}),
    "minimax_m2": ("experts, partial RoPE", {}),
    "ministral": ("windows", _HYBRID),
    "mistral": ("windows in all layers", {"sliding_window": _WINDOW}),
    "mixtral": ("experts", {}),
    "nanochat": ("norms without weights", {}),
    "nemotron": ("layer norms, partial RoPE", {}),
    "olmo": ("clipped QKV, norms without weights", {}),
    "olmo2": ("post-norm", {}),
    "olmo3": ("RoPE by layer type, windows", _HYBRID),
    "olmoe": ("experts, clipped QKV", {}),
    "phi": ("partial RoPE, biases", {}),
    "phi3": ("fused QKV, long RoPE", {"rope_parameters": _LONG, "sliding_window": None}),
    "phimoe": ("experts, layer norms", {}),
    "qwen2": ("biases, windows", {**_HYBRID, "use_sliding_window": True}),
    "qwen2_moe": ("experts, a shared one", {}),
    "qwen3": ("q/k-norm, YaRN", {"rope_parameters": _YARN}),
    "qwen3_moe": ("experts, q/k-norm", {}),
    "seed_oss": ("explicit head_dim, biases", {}),
    "smollm3": ("layers without RoPE", {}),
    "stablelm": ("partial RoPE, q/k-norm", {}),
    "starcoder2": ("layer norms, windows in all layers", {"sliding_window": _WINDOW}),
    "vaultgemma": ("windows", _HYBRID),
}


# Families of `tests.tiny` that have something the export refuses, and how it says so.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "does not leave attention to transformers' interface"),
    "falcon_h1": ({}, "layers of type hybrid"),
    "lfm2": ({}, "layers of type conv"),
    "llama4_text": ({}, "picks its experts in a way of its own"),
    "qwen3_next": ({}, "layers of type linear_attention"),
}


_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Classes that `tests.tiny` has no model of, and whose attention is none over a plain cache.
REFUSED_CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "diffllama": ({}, "4 calls of attention in 2 layers; the export needs one in each"),
    "minicpm3": (_LATENT, "layers attend to other keys or values than they keep"),
    "deepseek_v3": (_LATENT, "layers attend to other keys or values than they keep"),
    "bloom": ({}, "does not leave attention to transformers' interface"),
    "mamba": ({}, "layers of type linear_attention"),
}


def refused_checkpoint(folder: Path, model_type: str) -> Path:
    """A tiny random checkpoint of a class that the export refuses."""
    settings, _ = REFUSED_CLASSES[model_type]
    config = AutoConfig.for_model(model_type, **{**BASE, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def exported_checkpoint(folder: Path, family: str) -> Path:
    """A tiny random checkpoint of a family, with two KV heads where the class knows groups."""
    _, settings = EXPORTED[family]
    if family in FAMILIES:
        return tiny_checkpoint(folder, family, **{**kv_settings(family, 2), **settings})
    config = AutoConfig.for_model(family, **{**BASE, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
