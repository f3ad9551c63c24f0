"""`verify` passes what is right and names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import FAMILIES, tiny_checkpoint
from upcycle.conversion.run import convert
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_conversion_passes(tmp_path: Path, name: str, kv_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source", name, num_key_value_heads=4)
    convert(source, tmp_path / "out", kv_heads=kv_heads)
    result = verify(source, tmp_path / "out")
    assert result.passed, [check for check in result.checks if not check.passed]


def change_embedding(weights: dict) -> None:
    weights["model.embed_tokens.weight"][3, 3] += 1e-3


def drop_norm(weights: dict) -> None:
    del weights["model.norm.weight"]


@pytest.mark.parametrize("damage", [change_embedding, drop_norm])
def test_a_damaged_tensor_is_named(tmp_path: Path, damage: Callable[[dict], None]) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    weights = load_file(out / "model.safetensors")
    damage(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    result = verify(source, out)
    failed = [check for check in result.checks if not check.passed]
    assert not result.passed
    assert "model." in failed[0].detail


def test_a_config_that_changed_more_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    failed = [check for check in verify(source, out).checks if not check.passed]
    assert [check.detail for check in failed] == ["first: rms_norm_eps"]


def test_raised_heads_are_compared_bit_by_bit(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=2)
    out = tmp_path / "out"
    convert(source, out, kv_heads=4)
    weights = load_file(out / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1e-6
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    failed = [check for check in verify(source, out).checks if not check.passed]
    assert [check.detail for check in failed] == ["first: model.layers.1.self_attn.v_proj.weight"]


def test_a_folder_that_convert_did_not_make_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="was not made by"):
        verify(source, source)
