"""NVIDIA/Megatron-LM#480: heads of an interleaved fused tensor averaged as if it were three blocks.

GPT-NeoX stores `query_key_value` head by head, `[q_0 k_0 v_0 q_1 …]`. The reports' own
`mean(view([g, -1, d, D]))` of a block of it mixes queries with keys and "didn't work well".
"""

from pathlib import Path

import torch
from transformers import GPTNeoXConfig

from tests.regress.folders import load, logits, pooled, save_random
from tests.tiny import convert

CONFIG = GPTNeoXConfig(
    vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=8, max_position_embeddings=128, rotary_pct=0.5, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip
KV_HEADS = 2


def merge_in_place(model: torch.nn.Module, *, by_head: bool) -> torch.nn.Module:
    """Give every group of the source class the mean of its keys and values."""
    for layer in model.gpt_neox.layers:
        for parameter in layer.attention.query_key_value.parameters():
            layout = (8, 3, 8, -1) if by_head else (3, 8, 8, -1)
            rows = parameter.data.view(layout)
            rows = rows if by_head else rows.transpose(0, 1)
            for part in (1, 2):
                rows[:, part] = pooled(rows[:, part], KV_HEADS)
    return model


def test_groups_are_those_of_the_interleaved_layout(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", CONFIG)
    convert(source, tmp_path / "out", kv_heads=KV_HEADS)
    converted = logits(load(tmp_path / "out"))
    right = logits(merge_in_place(load(source), by_head=True))
    wrong = logits(merge_in_place(load(source), by_head=False))
    torch.testing.assert_close(converted, right, rtol=1e-4, atol=1e-4)
    assert (converted - wrong).abs().max() > 0.1
