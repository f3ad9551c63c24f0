"""vllm-project/vllm#53114: BLOOM, Falcon and GPT-NeoX fuse q, k and v head by head, not in blocks.

One checkpoint of each such layout; GPT-NeoX has its own file, and BLOOM is refused.
"""

from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, FalconConfig, GPTBigCodeConfig, PretrainedConfig

from tests.regress.folders import load, logits, pooled, save_random
from tests.tiny import convert
from upcycle.errors import FamilyError

FUSED = {
    "falcon": FalconConfig(
        vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, alibi=True,
        multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True,
        bos_token_id=0, eos_token_id=0,
    ),
    "gpt_bigcode": GPTBigCodeConfig(
        vocab_size=260, n_embd=64, n_layer=2, n_head=8, n_positions=128, multi_query=False,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip
MODULES = {"falcon": "self_attention.query_key_value", "gpt_bigcode": "attn.c_attn"}


@pytest.mark.parametrize("name", FUSED)
def test_all_heads_merge_into_one_from_where_they_lie(tmp_path: Path, name: str) -> None:
    source = save_random(tmp_path / "source", FUSED[name])
    convert(source, tmp_path / "out", kv_heads=1)
    reference = load(source)
    for layer in reference.transformer.h:
        for parameter in layer.get_submodule(MODULES[name]).parameters():
            rows = parameter.data.view(8, 3, 8, -1)
            rows[:, 1], rows[:, 2] = pooled(rows[:, 1], 1), pooled(rows[:, 2], 1)
    converted = load(tmp_path / "out")
    assert converted.config.multi_query
    torch.testing.assert_close(logits(converted), logits(reference), rtol=1e-4, atol=1e-4)


def test_bloom_is_refused(tmp_path: Path) -> None:
    config: PretrainedConfig = BloomConfig(vocab_size=260, hidden_size=64, n_layer=2, n_head=8)
    source = save_random(tmp_path / "source", config)
    with pytest.raises(FamilyError, match="BloomForCausalLM has no KV heads"):
        convert(source, tmp_path / "out", kv_heads=1)
