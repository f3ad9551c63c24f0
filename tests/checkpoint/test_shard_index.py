"""The index of a sharded checkpoint: what it may name, and what it forgets."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import INDEX_FILE, Checkpoint
from upcycle.checkpoint.writer import rewrite
from upcycle.errors import CheckpointError
from upcycle.models.loading import load_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "sharded"
    return tiny_checkpoint(folder, max_shard_size="100KB", num_hidden_layers=1)


@pytest.fixture
def sharded(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "sharded")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard",
    [
        "../elsewhere.safetensors", "/etc/elsewhere.safetensors", "a/b.safetensors",
        "..\\elsewhere.safetensors", "a\x00.safetensors", "a\n.safetensors", ".safetensors",
        ".hidden.safetensors", "..", "", "weights.bin", "model.safetensors/", 5, None, ["a"],
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_of_the_folder_is_refused(sharded: Path, shard: object) -> None:
    edit(sharded, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "shard", ["missing.safetensors", "ünï.safetensors", "a" * 300 + ".safetensors"]
)
def test_a_shard_that_is_not_there_is_named(sharded: Path, shard: str) -> None:
    edit(sharded, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match=shard):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "{", "",
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
        '{"weight_map": {"a": "\\ud800.safetensors"}}',
    ],
)  # fmt: skip
def test_an_index_of_another_form_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint.open(sharded)


def test_swapped_shards_are_refused(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    first.rename(sharded / "aside")
    second.rename(first)
    (sharded / "aside").rename(second)
    with pytest.raises(CheckpointError, match=r"the index says that .* which does not have it"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(CheckpointError, match="is in two shards"):
        Checkpoint.open(sharded)


def test_a_tensor_that_the_index_forgot_is_kept(sharded: Path, tmp_path: Path) -> None:
    """transformers loads whatever is in the shards; the index written anew names it again."""
    edit(sharded, lambda index: index["weight_map"].pop("model.norm.weight"))
    checkpoint = Checkpoint.open(sharded)
    norm = checkpoint.read("model.norm.weight")
    loaded = load_model(sharded, dtype=torch.float32).state_dict()
    assert torch.equal(loaded["model.norm.weight"], norm)
    (tmp_path / "output").mkdir()
    rewrite(checkpoint, tmp_path / "output", {})
    index = json.loads((tmp_path / "output" / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(checkpoint.tensors)


def test_a_shard_that_the_index_does_not_name_is_left_alone(sharded: Path) -> None:
    save_file({"stale": torch.ones(1)}, sharded / "model-00009-of-00009.safetensors")
    assert "stale" not in Checkpoint.open(sharded).tensors


@pytest.mark.parametrize("metadata", [{"total_size": -1}, {"total_size": "x"}, None, [], {}])
def test_a_wrong_total_is_counted_anew(sharded: Path, tmp_path: Path, metadata: object) -> None:
    edit(sharded, lambda index: index.update(metadata=metadata))
    checkpoint = Checkpoint.open(sharded)
    rewrite(checkpoint, tmp_path, {})
    assert json.loads((tmp_path / INDEX_FILE).read_text())["metadata"] == {
        "total_parameters": checkpoint.num_parameters,
        "total_size": checkpoint.weight_bytes,
    }
