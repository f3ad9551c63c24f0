"""Tiny random checkpoints, made by transformers' own classes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "qwen2": {},
    "phi": {"partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 16},
}


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
