"""Gemma 1: head_dim stands by itself, not hidden_size / num_attention_heads."""

from upcycle.families.family import Family

FAMILY = Family(
    model_type="gemma",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "attention_bias": False,
        "initializer_range": 0.02,
    },
)
