"""Configurations of published models."""

# https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
