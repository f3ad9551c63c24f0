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

# https://huggingface.co/deepseek-ai/DeepSeek-V2/blob/main/config.json
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}

# https://huggingface.co/LGAI-EXAONE/EXAONE-4.0-1.2B/blob/main/config.json
EXAONE_4_1B = {
    "model_type": "exaone4",
    "hidden_size": 2048,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": None,
    "max_position_embeddings": 65536,
}
