"""Hub ids: what is asked for, and what is said when it does not come."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.errors import CheckpointError


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
