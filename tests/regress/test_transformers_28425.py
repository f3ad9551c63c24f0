"""huggingface/transformers#28425: lowering KV heads should mean-pool them, and save cache.

Whether decoding is faster too depends on the attention that runs it: on a CPU `repeat_kv` can cost
more than the smaller cache saves, so that no speed is asserted.
"""

from pathlib import Path

from transformers import DynamicCache

from tests.regress.folders import IDS, load
from tests.tiny import convert, tiny_checkpoint
from upcycle.kvcache.counting import kv_cache_bytes


def cached_bytes(folder: Path) -> int:
    model = load(folder)
    cache = DynamicCache(config=model.config)
    model(IDS, cache=cache, use_cache=True)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_the_cache_is_halved_as_predicted(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_attention_heads=4, num_key_value_heads=4)
    convert(source, tmp_path / "out", kv_heads=2)
    before, after = cached_bytes(source), cached_bytes(tmp_path / "out")
    assert after * 2 == before
    predicted = kv_cache_bytes(tmp_path / "out", length=IDS.shape[1], bytes_per_element=4)
    assert after == predicted
