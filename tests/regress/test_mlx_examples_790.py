"""ml-explore/mlx-examples#790: the split points of Phi-3's `qkv_proj` move with the KV heads.

Also meta-pytorch/torchtune#2197 (a shape error) and vllm-project/llm-compressor#2494.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tiny import convert, tiny_checkpoint

NAME = "model.layers.0.self_attn.qkv_proj.weight"


def test_rows_are_queries_then_keys_then_values(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "phi3")
    convert(source, tmp_path / "out", kv_heads=2)
    before = load_file(source / "model.safetensors")[NAME].split([64, 64, 64])
    after = load_file(tmp_path / "out" / "model.safetensors")[NAME].split([64, 16, 16])
    assert torch.equal(after[0], before[0])
    for old, new in zip(before[1:], after[1:], strict=True):
        mean = old.double().view(2, 4, 8, 64).mean(1).flatten(0, 1).float()
        assert torch.equal(new, mean)
