"""vllm-project/vllm#13686: OLMo-2's key norm has one weight a KV channel, and shrinks with them.

Also ggml-org/llama.cpp#12376 (expected 5120, got 1024), allenai/OLMo#521, allenai/OLMo-core#477,
EleutherAI/gpt-neox#1367, vllm-project/vllm-metal#691 and lablup/mlxcel#317. The root mean square
runs over the channels of all KV heads: repeated heads have the same one as the pooled.
"""

from pathlib import Path

import pytest
import torch

from tests.regress.folders import load, logits, pooled
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint

KV_HEADS = 2


@pytest.mark.parametrize("family", ["olmo2", "olmoe"])
def test_the_norm_shrinks_and_normalises_the_merged_keys(tmp_path: Path, family: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", family)
    convert(source, tmp_path / "out", kv_heads=KV_HEADS)
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert tensors["model.layers.0.self_attn.k_norm.weight"].shape == (KV_HEADS * 8,)
    assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (64,)
    reference = load(source)
    for layer in reference.model.layers:
        for name in ("k_proj", "v_proj", "k_norm"):
            parameter = getattr(layer.self_attn, name).weight
            heads = parameter.data.view(8, 8, -1)
            parameter.data = pooled(heads, KV_HEADS).view_as(parameter)
    torch.testing.assert_close(
        logits(load(tmp_path / "out")), logits(reference), rtol=1e-4, atol=1e-4
    )
