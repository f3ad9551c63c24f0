"""paiml/entrenar#262: head_dim taken as hidden_size / num_attention_heads.

Also EleutherAI/gpt-neox#1434, pytorch/torchtitan#3570, elixir-nx/bumblebee#364 (Gemma: 3072 against
4096) and ggml-org/llama.cpp#8922 (Minitron: 4096 against 6144).
"""

from pathlib import Path

import torch

from tests.regress.folders import load, logits
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint

GEMMA = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}


def test_heads_wider_than_the_hidden_size_allows_are_kept(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "gemma", **GEMMA)
    convert(source, tmp_path / "out", kv_heads=2)
    module = "model.layers.0.self_attn."
    shapes = {
        name.removeprefix(module): tensor.shape
        for name, tensor in Checkpoint.open(tmp_path / "out").tensors.items()
        if name.startswith(module)
    }
    assert shapes == {
        "q_proj.weight": (64, 48),
        "k_proj.weight": (32, 48),
        "v_proj.weight": (32, 48),
        "o_proj.weight": (48, 64),
    }
    reference = load(source)
    for layer in reference.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            pooled = projection.weight.data.view(2, 2, 16, 48).mean(1, keepdim=True)
            projection.weight.data = pooled.expand(2, 2, 16, 48).reshape(64, 48)
    torch.testing.assert_close(
        logits(load(tmp_path / "out")), logits(reference), rtol=1e-4, atol=1e-4
    )
