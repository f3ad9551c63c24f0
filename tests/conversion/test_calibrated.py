"""Conversion on calibration text: exact where it can be, better than mean, the same every time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import FAMILIES, MULTI_QUERY, convert, kv_settings, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_store import STORE_NAME, LayerStore
from upcycle.conversion.verify import verify
from upcycle.data.documents import packaged_text
from upcycle.errors import CheckpointError, PlanError
from upcycle.models.calibration_text import calibration_rows
from upcycle.models.loading import load_model
from upcycle.progress import Progress

DEMO = Path(__file__).parents[2] / "recipes" / "demo-source"
TEXT = " ".join(f"word{i % 97} {i * i % 1013}" for i in range(2000))
OPTIONS: dict[str, Any] = {"calibration_tokens": 512}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return path


def logits(folder: Path) -> torch.Tensor:
    ids = torch.randint(1, 200, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = load_model(folder, dtype=torch.float32)(ids, use_cache=False).logits
    return result


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("method", ["lowrank", "procrustes"])
def test_equal_heads_lose_nothing_and_the_result_is_verified(
    tmp_path: Path, text: Path, name: str, method: str
) -> None:
    groups = 1 if name in MULTI_QUERY else 2
    convert(
        tiny_checkpoint(tmp_path / "grouped", name, **kv_settings(name, groups)),
        tmp_path / "raised",
        kv_heads=8,
    )
    convert(
        tmp_path / "raised",
        tmp_path / "out",
        kv_heads=groups,
        method=method,
        calibration=[text],
        **OPTIONS,
    )
    assert relative(logits(tmp_path / "out"), logits(tmp_path / "grouped")) <= 1e-5
    result = verify(tmp_path / "raised", tmp_path / "out")
    assert result.passed, [check for check in result.checks if not check.passed]


def test_as_many_heads_as_before_is_bit_identical(tmp_path: Path, text: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    convert(source, tmp_path / "out", kv_heads=8, calibration=[text], refine=5, **OPTIONS)
    assert hash_folder(tmp_path / "out") == hash_folder(source)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "olmo2", "stablelm", "falcon", "phi3"])
def test_refining_lowers_the_error_on_held_out_rows(tmp_path: Path, text: Path, name: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", name, **kv_settings(name, 8))
    result = convert(
        source,
        tmp_path / "out",
        kv_heads=1 if name in MULTI_QUERY else 4,
        calibration=[text],
        calibration_tokens=2048,
        refine=30,
    )
    refined = [layer["refinement"] for layer in result.manifest.document["result"]["layers"]]
    assert all(layer["after"] <= layer["before"] for layer in refined)
    assert sum(layer["after"] for layer in refined) < 0.95 * sum(
        layer["before"] for layer in refined
    )


@pytest.mark.parametrize(
    ("tokens", "steps"), [(2048, 20), pytest.param(8192, 40, marks=pytest.mark.slow)]
)
def test_a_trained_model_loses_less_with_every_step(
    tmp_path: Path, tokens: int, steps: int
) -> None:
    losses = []
    for name, options in {
        "mean": {},
        "procrustes": {"method": "procrustes", "calibration": ["builtin"]},
        "lowrank": {"calibration": ["builtin"]},
        "refined": {"calibration": ["builtin"], "refine": steps},
    }.items():
        convert(DEMO, tmp_path / name, kv_heads=2, **options, calibration_tokens=tokens)
        losses.append(held_out_loss(tmp_path / name))
    gap = [loss - held_out_loss(DEMO) for loss in losses]
    assert gap[0] > 1, "what mean pooling loses"
    assert gap[1] < 0.7 * gap[0]
    assert gap[2] < 0.2 * gap[0]
    assert gap[3] < 0.7 * gap[2]


def held_out_loss(folder: Path) -> float:
    """Nats per token on rows that calibration does not draw from."""
    rows = calibration_rows(
        Checkpoint.open(folder), [packaged_text("heldout")], tokens=4096, sequence_length=256
    )
    with torch.no_grad():
        found = load_model(folder, dtype=torch.float32)(rows, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(found.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_grouping_finds_heads_that_are_alike(tmp_path: Path, text: Path) -> None:
    """Heads 0 and 2, and 1 and 3, are copies: only a search can merge them without loss."""
    grouped = tiny_checkpoint(
        tmp_path / "grouped", num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    convert(grouped, tmp_path / "raised", kv_heads=4)
    weights = load_file(tmp_path / "raised" / "model.safetensors")
    order = [0, 2, 1, 3]
    for name, tensor in weights.items():
        if ".self_attn." in name:
            heads = tensor.T if "o_proj" in name else tensor
            heads = heads.unflatten(0, (4, -1))[order].flatten(0, 1)
            tensor.copy_(heads.T if "o_proj" in name else heads)
    source = tiny_checkpoint(tmp_path / "source", num_attention_heads=4, num_key_value_heads=4)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((tmp_path / "raised" / "config.json").read_text())
    assert relative(logits(source), logits(grouped)) < 1e-5
    differences = {}
    for grouping in ("contiguous", "search"):
        out = tmp_path / grouping
        convert(source, out, kv_heads=2, calibration=[text], grouping=grouping, **OPTIONS)
        differences[grouping] = relative(logits(out), logits(grouped))
    assert differences["search"] < 1e-5 < 1e-2 < differences["contiguous"]


def test_two_runs_and_a_resumed_one_give_the_same_bytes(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=3)
    options = {"kv_heads": 2, "calibration": [text], "refine": 5, **OPTIONS}
    for name in ("a", "b"):
        convert(source, tmp_path / name, **options)
    stop_before_layer(2, monkeypatch, source, tmp_path / "c", options)
    assert calibrated_layers(source, tmp_path / "c", options) == 1
    for name in ("b", "c"):
        assert content(tmp_path / name) == content(tmp_path / "a")


def stop_before_layer(
    layer: int, monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, options: dict[str, Any]
) -> Path:
    """The store that a run leaves which stops there."""
    save = LayerStore.save_state

    def stop(store: LayerStore, next_layer: int, state: Any) -> None:
        save(store, next_layer, state)
        if next_layer == layer:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, "save_state", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, output, **options, resume=True)
    return output.parent / f".{output.name}.partial" / STORE_NAME


def calibrated_layers(source: Path, output: Path, options: dict[str, Any]) -> int:
    """How many layers a resumed run makes itself."""
    done: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.task == "calibrate" and progress.done == int(progress.done):
            done.append(progress.done)

    convert(source, output, **options, resume=True, watch=watch)
    return len(set(done) - {0})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change_source(source: Path, store: Path) -> None:
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the header stays
    path.write_bytes(data)


def empty_state(source: Path, store: Path) -> None:
    (store / "state.safetensors").write_bytes(b"")


def empty_layer(source: Path, store: Path) -> None:
    (store / "0.safetensors").write_bytes(b"")


def flip_layer(source: Path, store: Path) -> None:
    path = store / "0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def drop_layer(source: Path, store: Path) -> None:
    (store / "0.safetensors").unlink()


@pytest.mark.parametrize(
    "damage", [change_source, empty_state, empty_layer, flip_layer, drop_layer]
)
def test_layers_that_are_damaged_or_of_other_weights_are_made_again(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path, Path], None],
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    options = {"kv_heads": 2, "calibration": [text], **OPTIONS}
    damage(source, stop_before_layer(1, monkeypatch, source, tmp_path / "out", options))
    assert calibrated_layers(source, tmp_path / "out", options) == 2
    convert(source, tmp_path / "fresh", **options)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, text: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")

    def change(progress: Progress) -> None:
        if (progress.task, progress.done) == ("calibrate", 1):
            change_source(source, tmp_path)

    with pytest.raises(CheckpointError, match="changed while they were calibrated"):
        convert(source, tmp_path / "out", kv_heads=2, calibration=[text], watch=change, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_manifest_says_what_was_measured(tmp_path: Path, text: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen3", head_dim=16)
    convert(source, tmp_path / "out", kv_heads=2, calibration=[text], **OPTIONS)
    manifest = json.loads((tmp_path / "out" / "upcycle.json").read_text())
    assert manifest["options"]["method"] == "lowrank"
    assert manifest["options"]["calibration"] == ["calibration.txt"]
    assert len(manifest["source"]["calibration"]) == 32
    layers = manifest["result"]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    assert "RMS norm" in layers[0]["keys"]
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lowrank"}, "method lowrank needs text"),
        ({"refine": 3}, "--refine needs text"),
        ({"grouping": "search"}, "--grouping search needs text"),
        ({"grouping": "random"}, "unknown grouping 'random'"),
        ({"refine": -1}, "refine cannot be -1"),
    ],
)
def test_what_needs_text_is_refused_without(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    with pytest.raises(PlanError, match=message):
        convert(source, tmp_path / "out", kv_heads=2, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, text: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][3, 3] = float("inf")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_proj\.weight has values"):
        convert(source, tmp_path / "out", kv_heads=2, calibration=[text], **OPTIONS)
    assert not (tmp_path / "out").exists()
