"""PersuGPT#2: a shard whose download stopped (`MetadataIncompleteBuffer`)."""

from pathlib import Path

import pytest

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_truncated_shard_is_named_before_anything_is_written(tmp_path: Path, left: int) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    shard = sorted(source.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=shard.name):
        convert(source, tmp_path / "out", kv_heads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
