"""meta-llama/llama#427: `n_kv_heads` edited in the config, the weights left as they were."""

import json
from pathlib import Path

import pytest

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError


def test_an_edited_config_is_refused_with_both_shapes(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 1}))
    with pytest.raises(CheckpointError, match=r"asks for shape \[8, 64\] but .* has \[64, 64\]"):
        convert(source, tmp_path / "out", kv_heads=1)
