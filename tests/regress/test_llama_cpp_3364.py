"""ggml-org/llama.cpp#3364: keys permuted for GGUF by the query heads instead of the KV heads.

Also ggml-org/llama.cpp#2376 and jzhang38/TinyLlama#24. GGUF keeps Llama's rotary pairs side by
side. The converted model is written the way llama.cpp's converter does it, by the head counts of
its `config.json`, and read back by transformers.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.regress.folders import get_config, load, logits
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows from halves (i, i + d/2) to neighbours (2i, 2i + 1)."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(folder: Path, path: Path, key_heads: int) -> None:
    config = get_config(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.tensors:
        array = checkpoint.read(name).numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config["num_attention_heads"] if "q_proj" in name else key_heads
            array = interleave(array, heads)
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{NAMES[module]}.weight", array)
        else:
            writer.add_tensor(f"{NAMES[module]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("key_heads", [2, 8])
def test_a_converted_model_goes_through_gguf(tmp_path: Path, key_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    write_gguf(tmp_path / "out", tmp_path / "model.gguf", key_heads)
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    error = (logits(found) - logits(load(tmp_path / "out"))).abs().max()
    assert error < 1e-4 if key_heads == 2 else error > 0.1
