"""NVIDIA-NeMo/RL#2802: a fused tensor split as for MHA, a bug that g = H hides.

Also NVIDIA-NeMo/Megatron-Bridge#1818, epfLLM/Megatron-LLM#45 and EleutherAI/gpt-neox#1315. With 8
query and 4 KV heads the blocks of `qkv_proj` are not thirds.
"""

from pathlib import Path

import pytest
import torch

from tests.regress.folders import load, logits, pooled
from tests.tiny import convert, tiny_checkpoint

QUERY_ROWS = 64


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_grouped_fused_tensor_is_split_where_its_heads_are(tmp_path: Path, kv_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source", "phi3", num_key_value_heads=4)
    convert(source, tmp_path / "out", kv_heads=kv_heads)
    reference = load(source)
    for layer in reference.model.layers:
        rows = layer.self_attn.qkv_proj.weight.data
        keys_and_values = rows[QUERY_ROWS:].view(2, 4, 8, 64)
        for part in (0, 1):
            keys_and_values[part] = pooled(keys_and_values[part], kv_heads)
    torch.testing.assert_close(
        logits(load(tmp_path / "out")), logits(reference), rtol=1e-4, atol=1e-4
    )
