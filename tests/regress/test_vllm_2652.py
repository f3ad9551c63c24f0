"""vllm-project/vllm#2652: a number of query heads that no longer divides among the devices.

Also vllm-project/vllm#596, #414, #5003 and #52535. Merging KV heads leaves the query heads alone.
"""

from pathlib import Path

import pytest

from tests.regress.folders import get_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_the_number_of_query_heads_never_changes(tmp_path: Path, kv_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=4)
    convert(source, tmp_path / "out", kv_heads=kv_heads)
    expected = {**get_config(source), "num_key_value_heads": kv_heads}
    assert get_config(tmp_path / "out") == expected
    tensors = Checkpoint.open(tmp_path / "out").tensors
    for name in ("q_proj", "o_proj"):
        assert tensors[f"model.layers.0.self_attn.{name}.weight"].shape == (64, 64)
