"""lablup/mlxcel#928: GPT-NeoX's fused rows, split flat in three, have the right shapes.

Such a model even writes fluently. Only its function tells: before any merge the converted model
must compute what the source does.
"""

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig

from tests.regress.folders import load, logits, save_random
from tests.tiny import convert

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "target"),
    [
        ({"use_parallel_residual": True, "rotary_pct": 0.25}, "phi"),
        ({"use_parallel_residual": False, "rotary_pct": 1.0}, "starcoder2"),
    ],
)
def test_nothing_changes_before_a_merge(
    tmp_path: Path, variant: dict[str, object], target: str
) -> None:
    source = save_random(tmp_path / "source", GPTNeoXConfig(**SIZES, **variant))
    convert(source, tmp_path / "out", kv_heads=8)
    converted, original = load(tmp_path / "out"), load(source)
    assert converted.config.model_type == target
    torch.testing.assert_close(logits(converted), logits(original), rtol=1e-4, atol=1e-4)

    for layer in original.gpt_neox.layers:
        fused = layer.attention.query_key_value.weight
        fused.data = fused.data.view(3, 8, 8, 64).transpose(0, 1).reshape(192, 64)
    assert (logits(converted) - logits(original)).abs().max() > 0.1
