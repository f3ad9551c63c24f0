"""Tiny random models of the classes that are retargeted, and what each becomes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import byte_tokenizer
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families.retargets.view import RetargetedCheckpoint, retargeted

WEIGHTS = "model.safetensors"
BASE = {
    "vocab_size": 260,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_NEOX = {"intermediate_size": 80, "layer_norm_eps": 1e-3, "rotary_pct": 0.5}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0}
_SEQUENTIAL = {**_NEOX, "use_parallel_residual": False}
# name: (model type, settings, target's model type)
SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "pythia": ("gpt_neox", _NEOX, "phi"),
    "pythia, full rotary": ("gpt_neox", {**_NEOX, "rotary_pct": 1.0}, "phi"),
    "pythia, tied": ("gpt_neox", {**_NEOX, "tie_word_embeddings": True}, "phi"),
    "pythia, no attention bias": ("gpt_neox", {**_NEOX, "attention_bias": False}, "phi"),
    "pythia, another base": ("gpt_neox", {**_NEOX, "rotary_emb_base": 500}, "phi"),
    "pythia, scaled": ("gpt_neox", {**_NEOX, "rope_scaling": _LINEAR}, "phi"),
    "pythia, YaRN": ("gpt_neox", {**_NEOX, "rope_parameters": _YARN}, "phi"),
    "neox, sequential": ("gpt_neox", {**_SEQUENTIAL, "rotary_pct": 1.0}, "starcoder2"),
    "neox, sequential, no attention bias": (
        "gpt_neox",
        {**_SEQUENTIAL, "rotary_pct": 1.0, "attention_bias": False, "tie_word_embeddings": True},
        "starcoder2",
    ),
    "neox, sequential, partial rotary": (
        "gpt_neox",
        {**_SEQUENTIAL, "hidden_act": "gelu_new"},
        "nemotron",
    ),
    "gptj": ("gptj", {"rotary_dim": 6, "layer_norm_epsilon": 1e-3}, "phi"),
    "gptj, full rotary": ("gptj", {"rotary_dim": 12, "n_inner": 80}, "phi"),
    "codegen": ("codegen", {"rotary_dim": 4, "num_attention_heads": 8}, "phi"),
    "codegen, few heads": ("codegen", {"rotary_dim": 8, "num_attention_heads": 2}, "phi"),
    "gpt2": ("gpt2", {"layer_norm_epsilon": 1e-3}, "gpt_bigcode"),
    "gpt2, untied": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "relu"},
        "gpt_bigcode",
    ),
    "gpt2, scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        "gpt_bigcode",
    ),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}, "gpt_bigcode"),
    "opt": ("opt", {"ffn_dim": 80}, "gpt_bigcode"),
    "opt, untied": ("opt", {"ffn_dim": 80, "tie_word_embeddings": False}, "gpt_bigcode"),
    "opt, no bias": ("opt", {"ffn_dim": 80, "enable_bias": False}, "gpt_bigcode"),
    "opt, no affine": (
        "opt",
        {"ffn_dim": 80, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        "gpt_bigcode",
    ),
}


def source_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random fp64 model whose every parameter matters: norms, biases and heads all differ."""
    torch.manual_seed(seed)
    model_type, settings, _ = SOURCES[name]
    config = AutoConfig.for_model(model_type, **{**BASE, **settings, **overrides})
    return randomised(AutoModelForCausalLM.from_config(config).double())


def randomised(model: Any) -> Any:
    """The model with norms and biases that differ, and larger matrices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(5)
    return model.eval()


def source_checkpoint(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Save `source_model` and a byte tokenizer as a Hugging Face folder."""
    model = source_model(name, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def view_of(folder: Path, dtype: str | None = None) -> RetargetedCheckpoint:
    """The checkpoint of a folder as its target class sees it."""
    view = retargeted(Checkpoint.open(folder), dtype)
    assert isinstance(view, RetargetedCheckpoint)
    return view


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder that has one file of them."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
