"""huggingface/optimum-onnx#97: exporters that size the cache by the query heads.

Also huggingface/optimum-amd#135 and huggingface/optimum#1825 (index 3: got 64, expected 128).
"""

from pathlib import Path

import pytest

from tests.regress.folders import load
from tests.tiny import convert, tiny_checkpoint
from upcycle.export.decoder import decoder_shape
from upcycle.export.stateful import StatefulDecoder


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 8), ("gemma", 16)])
def test_the_exported_cache_has_the_kv_heads_and_their_width(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    source = tiny_checkpoint(tmp_path / "source", family)
    convert(source, tmp_path / "out", kv_heads=2)
    model = load(tmp_path / "out")
    decoder = StatefulDecoder(model, decoder_shape(model, 32), 32)
    assert decoder.signature(1).states == dict.fromkeys(
        ("keyCache", "valueCache"), (2, 2, 32, head_dim)
    )
