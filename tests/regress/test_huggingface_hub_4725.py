"""huggingface/huggingface_hub#4725: the index lists a tensor in a shard that lacks it."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import INDEX_FILE, Checkpoint
from upcycle.errors import CheckpointError


def test_a_phantom_key_is_refused_with_key_and_shard(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["mtp.fc.weight"] = shard
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"mtp\.fc\.weight is in {shard}"):
        Checkpoint.open(folder)
