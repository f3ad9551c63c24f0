"""vllm-project/vllm#24859: KV heads that differ from layer to layer crash or are not supported.

Also vllm-project/vllm#48431, turboderp/exllamav2#726, NVIDIA/TensorRT-LLM#10206 and
microsoft/onnxruntime-genai#2214.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.regress.folders import get_config, set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import FamilyError


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "different numbers"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 2}}]}, "different numbers"),
    ],
)
def test_a_source_with_heads_per_layer_is_refused(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, **changes)
    with pytest.raises(FamilyError, match=what) as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert "layer" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_one_number_is_written(tmp_path: Path) -> None:
    convert(tiny_checkpoint(tmp_path / "source"), tmp_path / "out", kv_heads=2)
    assert get_config(tmp_path / "out")["num_key_value_heads"] == 2
