"""Mistral: no biases; already grouped by default."""

from upcycle.families.family import Family

FAMILY = Family(
    model_type="mistral",
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "initializer_range": 0.02,
    },
)
