"""aim-uofa/LoRAPrune#6: head_dim inferred from hidden size or rows instead of the config."""

import json
from pathlib import Path

from tests.tiny import convert, tiny_checkpoint
from upcycle.families import shape_of


def test_an_explicit_head_dim_survives(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", head_dim=16)  # hidden 64, 8 heads
    convert(source, tmp_path / "out", kv_heads=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert shape_of(config).head_dim == 16
    assert shape_of(config).num_key_value_heads == 2
