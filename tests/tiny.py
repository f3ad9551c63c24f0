"""Tiny random checkpoints, made by transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from upcycle.conversion.convert import ConversionResult
from upcycle.conversion.convert import convert as convert_as
from upcycle.families.rope_spelling import missing_rope_keys
from upcycle.options.convert import ConvertOptions
from upcycle.progress import Watcher, ignore

BASE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None}
MULTIPLIERS = {"attention_multiplier": 8**-0.5}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
# What each family's tiny model needs beyond BASE: small experts and states, the variants of norms,
# biases and rotary dims that are off by default, and the scaling 1 / sqrt(head_dim).
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **MOE,
        "head_dim": 16,
        "num_dense_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"head_dim": 16},
    "cohere2_moe": {**MOE, "head_dim": 16},
    "cwm": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "dots1": ROUTED,
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {**LOCAL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone": {"head_dim": 16},
    "exaone4": {},
    "exaone_moe": {**MOE, "num_experts_per_tok": 2},
    "falcon": {"alibi": False, "multi_query": False, "bias": True},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**ROUTED, "use_qk_norm": True},
    "gpt_bigcode": {"multi_query": False},
    "gpt_oss": {
        **LOCAL,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granite": MULTIPLIERS,
    "granite_swa": MULTIPLIERS,
    "granitemoe": {**LOCAL, **MULTIPLIERS},
    "granitemoe_swa": {**LOCAL, **MULTIPLIERS},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        **LOCAL,
        **MAMBA,
        **MULTIPLIERS,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoeshared": {**LOCAL, **MULTIPLIERS, "shared_intermediate_size": 32},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "hy_v3": {**MOE, "head_dim": 16},
    "hyperclovax": MULTIPLIERS,
    "internlm3": {"head_dim": 16},
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    "jamba": {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kolibri1": {**MOE, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": {**LOCAL, "head_dim": 16, "intermediate_size_mlp": 96},
    "mellum": {**MOE, "head_dim": 16},
    "minimax_m2": {**LOCAL, "head_dim": 16, "rotary_dim": 8},
    "ministral": {"head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"head_dim": 8, "sliding_window": None},
    "mixtral": LOCAL,
    "nanochat": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 2.0},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {},
    "phimoe": LOCAL,
    "qwen2": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": MOE,
    "qwen3_next": {
        **MOE,
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "sarvam_moe": {**ROUTED, "head_dim": 16},
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "smollm3": {},
    "solar_open": {**ROUTED, "head_dim": 16},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": {},
    "vaultgemma": GEMMA,
}


CLASSIC = ("gemma", "llama", "mistral", "phi", "qwen2")  # dense, each with another detail
MULTI_QUERY = ("falcon", "gpt_bigcode")  # these classes know as many KV heads as heads, or one


def tiny_model(model_type: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random model in fp32 whose biases and norms are random too, so that none hides."""
    torch.manual_seed(seed)
    settings = {**BASE, **FAMILIES[model_type], **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)  # initial weights are so small that attention would be uniform
    return model.eval()


def kv_settings(model_type: str, kv_heads: int) -> dict[str, Any]:
    """The settings that give a tiny model `kv_heads` KV heads."""
    if model_type in MULTI_QUERY:
        return {"multi_query": kv_heads == 1}
    return {"num_key_value_heads": kv_heads}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after `<|endoftext|>` as token 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def tiny_checkpoint(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Save `tiny_model` and a byte tokenizer as a Hugging Face folder."""
    model = tiny_model(model_type, seed, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def add_older_keys(folder: Path) -> Path:
    """State the rotation at the top level of a checkpoint's configuration too."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **missing_rope_keys(config)}, indent=2))
    return folder


def convert(
    source: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    watch: Watcher = ignore,
    **options: Any,
) -> ConversionResult:
    """`upcycle.convert` with its options as keywords, which are many and short here."""
    asked = ConvertOptions(**options)
    return convert_as(source, output, asked, overwrite=overwrite, resume=resume, watch=watch)
