"""NaN and infinity in what is merged, and how they are counted in what is not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.families.retarget_sources import source_checkpoint
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.headers import DTYPE_BITS, TORCH_DTYPES
from upcycle.checkpoint.manifest import read_manifest
from upcycle.checkpoint.nonfinite import NonfiniteScan, count_nonfinite
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
FLOATS = [d for d in TORCH_DTYPES if d[0] in "FBC" and d != "BOOL"]


def damage(folder: Path, name: str, value: float, *positions: tuple[int, ...]) -> None:
    """Put a value into a stored tensor."""
    path = folder / Checkpoint.open(folder).tensors[name].shard
    tensors = load_file(path)
    for position in positions:
        tensors[name][position] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("role", ["q_proj.weight", "k_proj.bias", "v_proj.weight", "o_proj.weight"])
def test_what_is_merged_must_be_finite(
    tmp_path: Path, value: str, dtype: torch.dtype, role: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", dtype=dtype, max_shard_size="100KB")
    name = f"model.layers.1.self_attn.{role}"
    positions = [(5,), (9,)] if role.endswith("bias") else [(7, 3), (40, 63)]
    damage(source, name, BAD[value], *positions)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert f"{name} of layer 1 has 2 values" in caught.value.what
    assert f"the first at {list(positions[0])}" in caught.value.what
    assert Checkpoint.open(source).tensors[name].shard in caught.value.where
    assert "--allow-nonfinite" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(source, tmp_path / "out", kv_heads=2, allow_nonfinite=True)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.options.document["allow_nonfinite"] is True
    assert count_nonfinite(Checkpoint.open(tmp_path / "out"), name) > 0


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        ("model.layers.0.mlp.up_proj.weight", 2),
        ("model.layers.0.self_attn.k_proj.weight", 8),
    ],
)
def test_what_is_copied_may_be_anything(tmp_path: Path, name: str, kv_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    damage(source, name, float("nan"), (1, 2))
    convert(source, tmp_path / "out", kv_heads=kv_heads)
    assert count_nonfinite(Checkpoint.open(tmp_path / "out"), name) == 1


def test_what_is_repeated_may_be_anything(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=2)
    damage(source, "model.layers.0.self_attn.k_proj.weight", float("inf"), (1, 2))
    convert(source, tmp_path / "out", kv_heads=8)


def test_the_source_s_own_tensor_is_named_where_the_class_changes(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "pythia")
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    damage(source, name, float("nan"), (2, 0))
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "out", kv_heads=1)
    assert f"{name} of layer 1 has 1 values" in caught.value.what


def count(dtype: str, data: bytes) -> int:
    scan = NonfiniteScan(dtype)
    scan.update(data)
    return scan.count


@given(st.sampled_from(FLOATS), st.binary(max_size=96))
def test_counts_are_torch_s(dtype: str, data: bytes) -> None:
    data = data[: len(data) // 16 * 16]
    values = torch.frombuffer(bytearray(data or bytes(16)), dtype=torch.uint8)
    if dtype == "C64":
        numbers: Any = values.view(torch.float32)
    else:
        numbers = values.view(getattr(torch, TORCH_DTYPES[dtype])).to(torch.float64)
    assert count(dtype, data) == int((~numbers.isfinite()).sum()) * bool(data)


def test_every_bit_pattern_of_16_bits() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("F16", "BF16"):
        numbers = torch.from_numpy(patterns.view(np.int16)).view(
            getattr(torch, TORCH_DTYPES[dtype])
        )
        expected = ~numbers.double().isfinite()
        assert count(dtype, patterns.tobytes()) == int(expected.sum())


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - set(FLOATS)))
def test_other_dtypes_have_none(dtype: str) -> None:
    assert count(dtype, b"\xff" * 32) == 0


def test_chunks_are_counted_on() -> None:
    scan = NonfiniteScan("F32")
    for values in ([1.0, 2.0], [3.0, float("nan")], [float("inf"), 4.0]):
        scan.update(np.array(values, np.float32).tobytes())
    assert (scan.count, scan.first) == (2, 3)
