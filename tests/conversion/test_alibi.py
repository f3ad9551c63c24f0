"""Models with ALiBi: calibrated on what their class computes, and verified by what is exact."""

from pathlib import Path

import pytest
import torch

from tests.conversion.streams import last_hidden, relative, some_ids, streamed
from tests.conversion.test_calibrated import TEXT, logits
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.loading import load_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.predict import predict
from upcycle.conversion.run import convert


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return path


def alibi_source(folder: Path, **overrides: object) -> Path:
    return tiny_checkpoint(folder, "falcon", alibi=True, **overrides)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("heads", [8, 6])
def test_any_number_of_rows_streams_as_users_load_the_model(
    tmp_path: Path, rows: int, heads: int
) -> None:
    source = alibi_source(tmp_path, num_attention_heads=heads, hidden_size=8 * heads)
    ids = some_ids(rows)
    stream = LayerStream(Checkpoint.open(source), ids.shape[1], device="cpu", chunk_rows=3)
    expected = last_hidden(load_model(source, dtype=torch.float32), ids)
    assert relative(streamed(stream, ids), expected) < 1e-6


def test_an_attention_runs_on_other_numbers_of_rows(tmp_path: Path) -> None:
    ids = some_ids(5)
    stream = LayerStream(Checkpoint.open(alibi_source(tmp_path)), ids.shape[1], device="cpu")
    calls = []
    with stream.layer(0) as layer, torch.no_grad():
        layer.advance(stream.embed(ids), calls.append)
        inputs, output = (
            torch.cat([getattr(call, part) for call in calls]) for part in ("inputs", "output")
        )
        for rows in (slice(3), slice(2, 3), slice(5), slice(3)):
            assert relative(layer.attend(inputs[rows]), output[rows]) < 1e-5


@pytest.mark.parametrize("options", [{}, {"method": "procrustes"}, {"refine": 10}])
def test_calibration_keeps_the_logits_nearer_than_the_mean(
    tmp_path: Path, text: Path, options: dict[str, object]
) -> None:
    source = alibi_source(tmp_path / "source")
    convert(source, tmp_path / "mean", kv_heads=1)
    convert(
        source, tmp_path / "out", kv_heads=1, calibration=[text], calibration_tokens=5120, **options
    )
    expected = logits(source)
    distance = {n: float((logits(tmp_path / n) - expected).norm()) for n in ("mean", "out")}
    assert distance["out"] < 0.9 * distance["mean"]


def test_what_merging_would_lose_is_predicted(tmp_path: Path, text: Path) -> None:
    found = predict(alibi_source(tmp_path), calibration=[text], tokens=2560, device="cpu")
    assert found.kv_heads == (1,)
    assert all(0 < layer.residuals[1].values < 1 for layer in found.layers)
