"""meta-llama/llama-models#246: params.json claims 8 KV heads for Llama-2-7B, which has 32.

A folder in Meta's layout is refused with its conversion; once converted, shapes decide and a
params.json that came along is an ordinary file.
"""

import json
from pathlib import Path

import pytest

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError
from upcycle.planning import plan


def test_metas_layout_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "params.json").write_text(json.dumps({"n_heads": 32, "n_kv_heads": 8, "dim": 4096}))
    (source / "consolidated.00.pth").write_bytes(b"PK\x03\x04 pickled")
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth") as caught:
        convert(source, tmp_path / "out", kv_heads=4)
    assert "convert_llama_weights_to_hf" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_a_params_file_beside_the_weights_decides_nothing(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    (source / "params.json").write_text(json.dumps({"n_heads": 8, "n_kv_heads": 2, "dim": 64}))
    assert plan(source, kv_heads=4).source_shape.num_key_value_heads == 8
