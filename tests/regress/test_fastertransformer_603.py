"""NVIDIA/FasterTransformer#603 and #668: grouped heads that are repeated before they are cached.

Also OpenNMT/CTranslate2#1231 and vllm-project/vllm#209. transformers does so with Falcon's new
decoder, which is refused because nothing would be saved.
"""

from pathlib import Path

import pytest
from transformers import DynamicCache, FalconConfig

from tests.regress.folders import IDS, load, save_random
from tests.tiny import convert
from upcycle.errors import FamilyError

CONFIG = FalconConfig(
    vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_kv_heads=2,
    new_decoder_architecture=True, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def test_falcons_new_decoder_is_refused_since_its_cache_does_not_shrink(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", CONFIG)
    model = load(source)
    cache = DynamicCache(config=model.config)
    model(IDS, cache=cache, use_cache=True)
    assert cache.layers[0].keys.shape[1] == 8  # not the 2 of num_kv_heads
    with pytest.raises(FamilyError, match="the cache would not shrink"):
        convert(source, tmp_path / "out", kv_heads=1)
