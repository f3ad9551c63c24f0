"""Qwen 1.5, 2 and 2.5: biases on q, k and v, none on o."""

from upcycle.families.family import Family

FAMILY = Family(
    model_type="qwen2",
    qkv_bias=True,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "initializer_range": 0.02,
    },
)
