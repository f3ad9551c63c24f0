"""Hub ids: what is asked for, and what is said when it does not come."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
)

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.errors import CheckpointError
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.kvcache.layout import config_of
from upcycle.planning import plan


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the Hub did not give it"):
        Checkpoint.open("some-team/some-model")


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        (
            GatedRepoError,
            "accept its terms at https://huggingface.co/team/model, then run `hf auth",
        ),
        (RepositoryNotFoundError, "for a private model run `hf auth login`"),
    ],
)
def test_a_model_that_needs_a_login_says_so(
    monkeypatch: pytest.MonkeyPatch, kind: type[RepositoryNotFoundError], fix: str
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise kind("no", response=Mock(headers={}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=kind.__name__) as caught:
        resolve("team/model")
    assert fix in caught.value.fix


def test_only_files_that_are_read_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    repository = [
        "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        "tokenizer.model", "pytorch_model.bin", "original/consolidated.00.pth", "tf_model.h5",
        "consolidated.safetensors", "model.gguf", "flax_model.msgpack", "onnx/model.onnx",
    ]  # fmt: skip
    fetched: list[str] = []

    def snapshot(_: str, ignore_patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects(repository, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("team/model") == tmp_path
    assert fetched == repository[:4]


@pytest.mark.parametrize(
    "name", ["./missing", "../missing", "missing", "a/b/c", "nul\x00", "x" * 999]
)
def test_a_mistyped_folder_is_no_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(name)


@pytest.mark.parametrize("name", ["team/..", "team/-model", "team/model.git", "t--m/m"])
def test_an_id_that_the_hub_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="HFValidationError"):
        Checkpoint.open(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is not a folder") as caught:
        Checkpoint.open(tmp_path / "model.safetensors")
    assert "name a checkpoint folder" in caught.value.fix


def test_a_description_fetches_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counts, plans and capacity of a model on the Hub are those of its download."""
    local = tiny_checkpoint(tmp_path / "local", max_shard_size="100KB")
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(local / "config.json", cache)
    asked: list[str] = []

    def fetch(hub_id: str, name: str) -> str:
        asked.append(name)
        return str(cache / name)

    def headers(hub_id: str) -> Any:
        files = {}
        for path in local.glob("*.safetensors"):
            data = path.read_bytes()
            described = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            tensors = {
                name: Mock(**info) for name, info in described.items() if name != "__metadata__"
            }
            files[path.name] = Mock(tensors=tensors, metadata=described["__metadata__"])
        return Mock(files_metadata=files)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", headers)
    described, whole = Checkpoint.describe("team/model"), Checkpoint.open(local)
    assert asked == ["config.json"]
    assert described.weight_bytes == whole.weight_bytes
    assert inspect_checkpoint(described) == inspect_checkpoint(whole)
    assert plan("team/model", kv_heads=2).operations == plan(local, kv_heads=2).operations
    assert config_of("team/model") == whole.config


def test_a_model_without_safetensors_cannot_be_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(hub_id: str) -> None:
        raise NotASafetensorsRepoError("no")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: tmp_path / "config.json")
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", refuse)
    with pytest.raises(CheckpointError, match="NotASafetensorsRepoError") as caught:
        Checkpoint.describe("team/model")
    assert caught.value.fix == "name a model with safetensors weights"
