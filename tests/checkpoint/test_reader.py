"""Folders: what is read, and what damaged ones are told."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.headers import TORCH_DTYPES
from upcycle.checkpoint.reader import Checkpoint
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


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} is missing"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_a_path_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_two_sets_of_weights_are_refused(sharded: Path) -> None:
    """transformers would take the single file, whatever the index says."""
    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "model.safetensors")
    with pytest.raises(CheckpointError, match="two sets of weights"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",  # a byte order mark, which transformers refuses too
        b"[" * 100_000,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"model_type": "llama", "model_type": "gemma"}',
        b'{"hidden_size": 1' + b"0" * 200 + b"}",
        b'{"a": "\\ud800"}',
        b" " * (65 << 20),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_a_config_that_no_reader_can_take_is_refused(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"config\.json (is not readable JSON|has more than 64 MiB)"
    ):
        Checkpoint.open(folder)


def test_a_config_with_infinity_is_read(folder: Path) -> None:
    """Python's json writes it, and configurations of state-space hybrids have it."""
    text = (
        (folder / "config.json").read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1)
    )
    (folder / "config.json").write_text(text)
    assert Checkpoint.open(folder).config["time_step_limit"] == [0.0, float("inf")]


def test_weights_that_the_config_names_elsewhere_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "other.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"transformers_weights names 'other\.safetensors'"):
        Checkpoint.open(folder)


def test_every_stored_dtype_is_read_as_the_library_reads_it(folder: Path) -> None:
    names = [name for name in TORCH_DTYPES.values() if hasattr(torch, name)]
    tensors = {
        f"{name}{list(shape)}": torch.arange(6)
        .to(getattr(torch, name))
        .reshape(-1)[:count]
        .reshape(shape)
        for name in names
        for shape, count in (((2, 3), 6), ((), 1), ((0, 4), 0))
    }
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert (
            read.reshape(-1).view(torch.uint8).tolist()
            == tensor.reshape(-1).view(torch.uint8).tolist()
        )


def test_a_dtype_that_torch_lacks_is_copied_but_not_read(folder: Path) -> None:
    header = b'{"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    checkpoint = Checkpoint.open(folder)
    assert b"".join(checkpoint.chunks("a")) == b"abc"
    with pytest.raises(CheckpointError, match="F6_E2M3, which torch cannot compute with"):
        checkpoint.read("a")


def test_offsets_beyond_4_gib_are_right(folder: Path) -> None:
    """A sparse file: 5 GiB of nothing, then two numbers."""
    hole = 5 << 30
    header = json.dumps(
        {
            "hole": {"dtype": "U8", "shape": [hole], "data_offsets": [0, hole]},
            "end": {"dtype": "F32", "shape": [2], "data_offsets": [hole, hole + 8]},
        }
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(hole, os.SEEK_CUR)
        file.write(struct.pack("<2f", 1.5, -2.5))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read("end").tolist() == [1.5, -2.5]
    assert b"".join(checkpoint.chunks("end")) == struct.pack("<2f", 1.5, -2.5)


def test_a_file_that_shrinks_is_refused_while_it_is_read(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    last = max(checkpoint.tensors.values(), key=lambda tensor: tensor.offset).name
    os.truncate(folder / "model.safetensors", checkpoint.tensors[last].offset + 3)
    for read in (checkpoint.read, lambda name: list(checkpoint.chunks(name))):
        with pytest.raises(CheckpointError, match="became shorter"):
            read(last)


@pytest.mark.parametrize("name", ["with space", "ünïcode 模型", "new\nline", "-dash", "per%cent{}"])
def test_any_folder_name_will_do(tmp_path: Path, name: str) -> None:
    assert Checkpoint.open(tiny_checkpoint(tmp_path / name)).tensors
