"""Headers and folders: what is read, and what damaged ones are told."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.headers import read_header
from upcycle.checkpoint.reader import INDEX_FILE, Checkpoint
from upcycle.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "source")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_tensors_are_those_of_the_library(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    expected = load_file(folder / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
        data = b"".join(checkpoint.chunks(name))
        assert data == tensor.numpy().tobytes()
    assert checkpoint.num_parameters == sum(tensor.numel() for tensor in expected.values())


def test_shards_are_read_as_one(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    expected = {k: v for path in sharded.glob("*.safetensors") for k, v in load_file(path).items()}
    assert set(checkpoint.tensors) == set(expected)


def test_a_hub_cache_snapshot_of_symlinks_is_read(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert Checkpoint.open(snapshot).tensors == Checkpoint.open(folder).tensors


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16,
        torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.float64, torch.int64,
    ]  # fmt: skip
    tensors = {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}
    save_file(tensors, tmp_path / "all.safetensors")
    assert {tensor.name for tensor in read_header(tmp_path / "all.safetensors").tensors} == set(
        tensors
    )


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "has 4 bytes"),
        (b'{"a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "hole"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "has 4 bytes"),
        (b'{"__metadata__": 7}', "metadata"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} is missing"):
        Checkpoint.open(sharded)


def test_an_index_that_leaves_the_folder_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../elsewhere.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
        Checkpoint.open(sharded)


def test_only_pickled_weights_are_refused_unread(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin") as caught:
        Checkpoint.open(folder)
    assert "save_pretrained" in caught.value.fix


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_a_path_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the Hub did not give it"):
        Checkpoint.open("some-team/some-model")


@pytest.mark.parametrize("weight_map", [[], {"a": 5}, {"a": ["b"]}, {"a": ".."}, {"a": "w.bin"}])
def test_an_index_of_another_form_is_refused(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint.open(sharded)


def test_two_sets_of_weights_are_refused(sharded: Path) -> None:
    """transformers would take the single file, whatever the index says."""
    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "model.safetensors")
    with pytest.raises(CheckpointError, match="two sets of weights"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_no_reader_can_take_is_refused(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["./missing", "../missing", "missing", "a/b/c"])
def test_a_mistyped_folder_is_no_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(name)
