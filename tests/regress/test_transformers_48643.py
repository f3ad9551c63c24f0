"""huggingface/transformers#48643: 7 query heads with 2 KV heads construct, and fail at forward."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.errors import FamilyError
from upcycle.planning import plan


def test_uneven_groups_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    path = source / "config.json"
    uneven = {"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 8}
    path.write_text(json.dumps({**json.loads(path.read_text()), **uneven}))
    with pytest.raises(FamilyError, match="7 query heads cannot share 2 KV heads"):
        plan(source, kv_heads=1)
