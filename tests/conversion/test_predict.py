"""What each number of KV heads would cost is known before converting."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conversion.test_nonfinite import damage
from tests.tiny import convert, tiny_checkpoint
from upcycle.cli import app as cli
from upcycle.conversion.predict import predict
from upcycle.errors import CheckpointError, DeviceError
from upcycle.options.convert import MergeOptions

TEXT = " ".join(f"word{i % 97} {i * i % 1013}" for i in range(900))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


def test_fewer_heads_cost_more_and_conversion_measures_the_same(tmp_path: Path, text: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")
    found = predict(source, MergeOptions(calibration=[text], calibration_tokens=1024, device="cpu"))
    assert found.kv_heads == (4, 2, 1)
    assert found.tokens == 1024
    for layer in found.layers:
        keys = [layer.residuals[g].keys for g in found.kv_heads]
        values = [layer.residuals[g].values for g in found.kv_heads]
        assert keys == sorted(keys)
        assert values == sorted(values)
        assert 0 < values[0] < values[-1] < 1
    result = convert(
        source, tmp_path / "out", kv_heads=2, calibration=[text], calibration_tokens=1024
    )
    for layer, made in zip(found.layers, result.manifest.document["result"]["layers"], strict=True):
        assert made["residual"]["keys"] == pytest.approx(layer.residuals[2].keys, rel=1e-9)
        assert made["residual"]["values"] == pytest.approx(layer.residuals[2].values, rel=1e-9)


def test_equal_heads_cost_nothing(tmp_path: Path, text: Path) -> None:
    grouped = tiny_checkpoint(tmp_path / "grouped", num_key_value_heads=2)
    convert(grouped, tmp_path / "raised", kv_heads=8)
    found = predict(tmp_path / "raised", MergeOptions(calibration=[text], calibration_tokens=512))
    for layer in found.layers:
        for g in (4, 2):
            assert layer.residuals[g].keys < 1e-6
            assert layer.residuals[g].values < 1e-6
        assert layer.residuals[1].values > 1e-2


def test_the_command_prints_every_layer_and_json(tmp_path: Path, text: Path) -> None:
    from importlib import import_module

    for name in cli.COMMANDS:
        import_module(f"upcycle.cli.{name.replace('-', '_')}")
    source = tiny_checkpoint(tmp_path / "source")
    arguments = ["predict", str(source), "--calibration", str(text), "--calibration-tokens", "512"]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "2 KV heads: K / V" in shown.output
    assert "mean" in shown.output
    data = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)
    assert [layer["layer"] for layer in data["layers"]] == [0, 1]
    assert set(data["mean"]) == {"1", "2", "4"}


@pytest.mark.parametrize("name", ["layers.1.self_attn.k_proj", "layers.0.mlp.up_proj"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, text: Path, name: str, value: float
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    damage(source, f"model.{name}.weight", value, (3, 2))
    with pytest.raises(CheckpointError, match=rf"model\.{name}\.weight has values") as caught:
        predict(source, MergeOptions(calibration=[text], calibration_tokens=512))
    assert "--allow-nonfinite" not in caught.value.fix
    with pytest.raises(CheckpointError, match=rf"model\.{name}\.weight has values"):
        convert(
            source,
            tmp_path / "out",
            kv_heads=2,
            calibration=[text],
            calibration_tokens=512,
            allow_nonfinite=True,
        )


def test_only_rows_of_the_embedding_that_the_text_uses_must_be_finite(
    tmp_path: Path, text: Path
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    name = "model.embed_tokens.weight"
    damage(source, name, float("nan"), (ord("Z"), 0))
    predict(source, MergeOptions(calibration=[text], calibration_tokens=512))
    damage(source, name, float("nan"), *((row, 0) for row in range(200)))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values"):
        predict(source, MergeOptions(calibration=[text], calibration_tokens=512))


def test_a_device_that_is_not_there_is_refused_first(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DeviceError, match="'abacus' is not available"):
        predict(
            tmp_path / "missing",
            MergeOptions(calibration=[text], calibration_tokens=512, device="abacus"),
        )
    source = tiny_checkpoint(tmp_path / "source")
    with pytest.raises(DeviceError, match="'abacus' is not available"):
        convert(source, tmp_path / "out", kv_heads=2, device="abacus")
