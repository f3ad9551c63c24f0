"""Phi-1, 1.5 and 2: biases everywhere, rotary on part of each head."""

from upcycle.families.family import Family

FAMILY = Family(
    model_type="phi",
    qkv_bias=True,
    output_bias=True,
    output_name="dense",
    refused=("qk_layernorm",),
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
    },
)
