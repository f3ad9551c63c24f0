"""`verify` passes what is right and names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import FAMILIES, MULTI_QUERY, convert, kv_settings, tiny_checkpoint
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError, UpcycleWarning


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_conversion_passes(tmp_path: Path, name: str) -> None:
    now = 8 if name in MULTI_QUERY else 4
    source = tiny_checkpoint(tmp_path / "source", name, **kv_settings(name, now))
    for kv_heads in (1, 8):
        out = tmp_path / str(kv_heads)
        convert(source, out, kv_heads=kv_heads)
        result = verify(source, out)
        assert result.passed, [check for check in result.checks if not check.passed]
        names = [check.name for check in result.checks]
        assert names == [*ALWAYS, *([EQUAL] if kv_heads < now else []), *RELOADED]
        measured = {check.name: check.measured for check in result.checks}
        assert 0 < measured[PERMUTED] < 1e-12, "it was computed, and exact in fp64"


FILES = "source and output are as the conversion left them"
COPIED = "tensors outside the merged attention are identical"
MERGED = "merged tensors are what the method makes"
OLD_HEADS = "no attention keeps the old KV heads"
FINITE = "copied tensors are finite"
PERMUTED = "permuted heads give the same attention output"
EQUAL = "mean merges equal heads without loss"
ALWAYS = [
    FILES,
    COPIED,
    MERGED,
    OLD_HEADS,
    FINITE,
    "config.json changed in the planned keys alone",
    PERMUTED,
    "gauge-transformed heads give the same attention output",
    "a planted relative error of 1e-8 is seen",
    "permuted heads give the same logits",
]
RELOADED = [
    "plain AutoModelForCausalLM gives the same logits with and without cache",
    "the cache holds the predicted bytes",
]


def failures(source: Path, out: Path) -> dict[str, str]:
    """The detail of each failed check but the one of file hashes, which sees any change."""
    failed = {check.name: check.detail for check in verify(source, out).checks if not check.passed}
    assert failed.pop(FILES).startswith("first: ")
    return failed


def change_embedding(weights: dict) -> None:
    weights["model.embed_tokens.weight"][3, 3] += 1e-3


def drop_norm(weights: dict) -> None:
    del weights["model.norm.weight"]


def zero_queries(weights: dict) -> None:
    weights["model.layers.1.self_attn.q_proj.weight"].zero_()


def scale_keys(weights: dict) -> None:
    weights["model.layers.0.self_attn.k_proj.weight"].mul_(3)


@pytest.mark.parametrize(
    ("damage", "check", "tensor"),
    [
        (change_embedding, COPIED, "model.embed_tokens.weight"),
        (drop_norm, COPIED, "model.norm.weight"),
        (zero_queries, MERGED, "model.layers.1.self_attn.q_proj.weight"),
        (scale_keys, MERGED, "model.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_a_damaged_tensor_is_named(
    tmp_path: Path, damage: Callable[[dict], None], check: str, tensor: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    weights = load_file(out / "model.safetensors")
    damage(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert failures(source, out) == {check: f"first: {tensor}"}


def test_a_nan_that_is_copied_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, :2] = float("nan")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", kv_heads=2)
    failed = {c.name: c.detail for c in verify(source, tmp_path / "out").checks if not c.passed}
    assert failed[FINITE] == "first: model.layers.1.mlp.up_proj.weight (2)"


def test_a_changed_sidecar_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    (out / "tokenizer.json").write_text("junk")
    failed = [check for check in verify(source, out).checks if not check.passed]
    assert [check.detail for check in failed] == [f"first: {out / 'tokenizer.json'}"]


def test_a_sliding_window_keeps_fewer_keys_rightly(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "mistral", sliding_window=16)
    convert(source, tmp_path / "out", kv_heads=2)
    assert verify(source, tmp_path / "out").passed


def test_a_cache_of_another_size_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    monkeypatch.setattr("upcycle.conversion.exactness.measured_cache_bytes", lambda cache: 4711)
    failed = [check for check in verify(source, tmp_path / "out").checks if not check.passed]
    assert [check.name for check in failed] == ["the cache holds the predicted bytes"]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    (tmp_path / "out" / "upcycle.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"upcycle\.json is damaged"):
        verify(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("options", {}),
        ("options", {"dtype": None, "method": "mean", "seed": "1", "calibration": []}),
        ("source", []),
        ("source", {"files": None}),
        ("result", 5),
    ],
)
def test_an_edited_manifest_is_refused(tmp_path: Path, part: str, value: object) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    path = tmp_path / "out" / "upcycle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))
    with pytest.raises(CheckpointError, match=rf"upcycle\.json is damaged: {part}(\.| is no)"):
        verify(source, tmp_path / "out")


def test_a_config_that_changed_more_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert list(failures(source, out).values()) == ["first: rms_norm_eps"]


def test_raised_heads_are_compared_bit_by_bit(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=2)
    out = tmp_path / "out"
    convert(source, out, kv_heads=4)
    weights = load_file(out / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1e-6
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    expected = ["first: model.layers.1.self_attn.v_proj.weight"]
    assert list(failures(source, out).values()) == expected


def test_a_folder_that_convert_did_not_make_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="was not made by"):
        verify(source, source)


def test_a_causal_model_without_its_head_is_checked_as_the_bare_one_and_said(
    tmp_path: Path,
) -> None:
    source, out = tiny_checkpoint(tmp_path / "source"), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UpcycleWarning, match="1 missing"):
        convert(source, out, kv_heads=2)
    with pytest.warns(UpcycleWarning, match=r"what is checked is LlamaModel, which has no such"):
        assert verify(source, out).passed
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    convert(source, tmp_path / "bare", kv_heads=2)
    assert verify(source, tmp_path / "bare").passed
