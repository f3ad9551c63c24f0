"""Headers of safetensors files: whatever is read here, the library reads in the same way."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from upcycle.checkpoint.headers import DTYPE_BITS, read_header
from upcycle.errors import CheckpointError


def write(path: Path, header: bytes, data: int = 8) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    return path


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as caught:
        deserialize(struct.pack("<Q", len(one("none"))) + one("none") + bytes(8))
    listed = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert {name.strip("` ") for name in listed.split(",")} == set(DTYPE_BITS)
    for dtype, bits in DTYPE_BITS.items():
        data = write(tmp_path / "a.safetensors", one(dtype, (8,), (0, bits)), bits).read_bytes()
        assert read_header(tmp_path / "a.safetensors").tensors[0].nbytes == bits
        assert len(deserialize(data)) == 1


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not readable JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "malformed"),
        (b'{"a": ["F32", [2], [0, 8]]}', "malformed"),
        (b'{"a": 5}', "malformed"),
        (one()[:-1] + b", " + one()[1:], "'a' comes twice"),
        (one(offsets=(0, 4)), "has 4 bytes"),
        (one(offsets=(8, 0)), "has -8 bytes"),
        (one(offsets=(4, 8), shape=(1,)), "hole"),
        (one(offsets=(-8, 0)), "no sizes"),
        (one(offsets=(0, 8, 8)), "no sizes"),
        (one(offsets=(0.0, 8.0)), "no sizes"),
        (one(offsets=(0, 1e999)), "no sizes"),
        (one(offsets="08"), "no sizes"),
        (one(shape=(-1, -2)), "no sizes"),
        (one(shape=(True, 2)), "no sizes"),
        (one(shape=(2.0,)), "no sizes"),
        (one(shape=(float("nan"),)), "no sizes"),
        (one(shape=2), "no sizes"),
        (one(shape=(2**63,)), "no sizes"),
        (one(shape=(2**62,) * 900), "beyond any file"),
        (one(shape=(2**62, 2**62, 0), offsets=(0, 0)), "beyond any file"),
        (one(shape=(10**99, 2)), "no sizes"),
        (one(shape=(10**200,)), "a number has 201 digits"),
        (one("Q4"), "unknown dtype 'Q4'"),
        (one(["F32"]), r"unknown dtype \['F32'\]"),
        (one("F4", (3,), (0, 1)), "has 1 bytes"),
        (b'{"__metadata__": 7}', "metadata"),
        (b'{"__metadata__": {"a": 7}}', "metadata"),
        (b'{"__metadata__": {"a": "b", "a": "c"}}', "comes twice"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}', "surrogates"),
        (b"{}", "has 18 bytes but its header speaks of 10"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(write(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, too few"),
        (b"1234567", "has 7 bytes, too few"),
        (struct.pack("<Q", 9) + b"{}", "truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "claims a header of 9,223"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "claims a header"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["", "new\nline", "ünïcode", "\U0001f600", "../up", "a" * 500])
def test_any_tensor_name_is_read(tmp_path: Path, name: str) -> None:
    save_file({name: torch.ones(3)}, tmp_path / "model.safetensors")
    assert [tensor.name for tensor in read_header(tmp_path / "model.safetensors").tensors] == [name]


def test_tensors_without_data_and_without_dimensions_are_read(tmp_path: Path) -> None:
    tensors = {"empty": torch.ones(0, 3), "scalar": torch.tensor(2.0), "none": torch.ones(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    header = read_header(tmp_path / "model.safetensors")
    assert {t.name: (t.shape, t.nbytes) for t in header.tensors} == {
        "empty": ((0, 3), 0), "scalar": ((), 4), "none": ((0,), 0),
    }  # fmt: skip


def test_what_is_read_here_the_library_reads_too(tmp_path: Path) -> None:
    """Random damage to a header: never more lenient than the library, never another reading."""
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4).half(), "c": torch.ones(1).bool()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    sound = path.read_bytes()
    length = 8 + int.from_bytes(sound[:8], "little")
    accepted = 0
    for seed in range(3000):
        rng = random.Random(seed)
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 2)):
            damaged[rng.randrange(length)] = rng.choice(b'0123456789"[]{},: \\FBO_a\x00\xff')
        path.write_bytes(damaged)
        try:
            ours = read_header(path)
        except CheckpointError:
            continue
        theirs: dict[str, dict[str, Any]] = dict(deserialize(bytes(damaged)))
        assert {t.name: (t.dtype, list(t.shape), t.nbytes) for t in ours.tensors} == {
            name: (entry["dtype"], entry["shape"], len(entry["data"]))
            for name, entry in theirs.items()
        }, f"seed {seed}"
        accepted += 1
    assert 10 < accepted < 1500
