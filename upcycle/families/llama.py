"""Llama, and every model that is stored as one."""

from upcycle.families.family import Family

FAMILY = Family(
    model_type="llama",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "attention_bias": False,
        "initializer_range": 0.02,
    },
)
