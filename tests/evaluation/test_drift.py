"""`upcycle sweep`: counts beside the drift of outputs, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.tiny import convert, tiny_checkpoint
from upcycle.cli import sweep as _sweep  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.errors import DeviceError, EvaluationError, PlanError
from upcycle.evaluation.drift import DriftSweep
from upcycle.kvcache.counting import count_attention
from upcycle.models.loading import load_model
from upcycle.options.convert import MergeOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.pipeline.sweep import sweep_kv_heads
from upcycle.planning import plan

SMALL = {"max_tokens": 150, "sequence_length": 32, "device": "cpu"}


def sweep(source: Path, *, kv_heads: Sequence[int] = (), **options: Any) -> DriftSweep:
    """With options as keywords; a device is that of the comparison, which conversions take over."""
    read = {name: options.pop(name) for name in EvaluateOptions.model_fields if name in options}
    reading = EvaluateOptions(**{"max_tokens": 4096, **read})
    return sweep_kv_heads(source, MergeOptions(**options), reading, kv_heads=kv_heads)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("drift") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("One document of forty characters or so.\n")
    return path


@pytest.fixture(scope="module")
def swept(source: Path, text: Path) -> DriftSweep:
    return sweep(source, text=[text], sequence_length=64, device="cpu")


def test_the_models_own_heads_differ_in_not_one_bit(swept: DriftSweep) -> None:
    own = swept.choices[0]
    assert own.counts.kind == "MHA"
    for found in (own.logits, *own.layers):
        assert found.identical
        assert (found.max_absolute, found.max_relative, found.rms_relative) == (0, 0, 0)
    for choice in swept.choices[1:]:
        assert not choice.logits.identical
        assert all(found.max_absolute > 0 for found in (choice.logits, *choice.layers))


def test_counts_are_those_of_the_model(swept: DriftSweep, source: Path) -> None:
    assert [choice.counts.kv_heads for choice in swept.choices] == [8, 4, 2, 1]
    assert tuple(c.counts for c in swept.choices) == count_attention(source, length=64)


def test_drift_is_that_of_two_models_side_by_side(
    swept: DriftSweep, source: Path, text: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "out", kv_heads=2)
    ids = torch.tensor([_byte_ids(source, text)])
    outputs = []
    for folder in (source, tmp_path / "out"):
        model = load_model(folder, dtype=torch.float32)
        with torch.no_grad():
            out = model(ids, use_cache=False, output_hidden_states=True)
        outputs.append([out.logits, *out.hidden_states[1:]])
    choice = swept.choices[2]
    for found, before, after in zip((choice.logits, *choice.layers), *outputs, strict=True):
        moved = (after - before).abs()
        assert found.max_absolute == pytest.approx(moved.max().item(), rel=1e-5)
        assert found.max_relative == pytest.approx((moved.max() / before.abs().max()).item())
        assert found.rms_relative == pytest.approx((moved.norm() / before.norm()).item(), rel=1e-4)


def _byte_ids(source: Path, text: Path) -> list[int]:
    from upcycle.evaluation.held_out import read_held_out
    from upcycle.models.loading import load_tokenizer

    (row,) = read_held_out(
        EvaluateOptions(text=[text], sequence_length=64, max_tokens=4096), load_tokenizer(source)
    ).rows
    return row.ids.tolist()


def test_heads_that_are_equal_inside_each_group_hardly_drift(tmp_path: Path, text: Path) -> None:
    grouped = tiny_checkpoint(tmp_path / "grouped", num_key_value_heads=2)
    convert(grouped, tmp_path / "mha", kv_heads=8)  # repeats heads, which is exact
    own, *lowered = sweep(
        tmp_path / "mha", kv_heads=[2, 4, 8, 1], text=[text], sequence_length=64, device="cpu"
    ).choices
    assert own.logits.identical
    lossless, merged = lowered[:2], lowered[2]
    assert all(choice.logits.max_relative < 1e-5 for choice in lossless)
    assert merged.logits.max_relative > 1e-2


def test_weights_are_those_of_the_plan(source: Path, swept: DriftSweep) -> None:
    for choice in swept.choices:
        assert choice.counts.kv_heads is not None
        planned = plan(source, kv_heads=choice.counts.kv_heads).output_bytes
        assert choice.weight_bytes == planned


def test_a_calibrated_method_is_the_one_of_convert(source: Path) -> None:
    swept = sweep(source, kv_heads=[2], calibration=["builtin"], calibration_tokens=1024, **SMALL)
    assert swept.method == "lowrank"
    assert not swept.choices[0].logits.identical


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_heads": [8, 3]}, PlanError),
        ({"method": "lowrank"}, PlanError),
        ({"device": "abacus"}, DeviceError),
        ({"dtype": "int8"}, EvaluationError),
        ({"sequence_length": 4096}, EvaluationError),
    ],
    ids=str,
)
def test_what_cannot_be_swept_is_refused(
    source: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        sweep(source, **(SMALL | options))


def test_outputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tiny_checkpoint(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match="not finite"):
        sweep(broken, kv_heads=[8], **SMALL)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_the_command_as_text_json_and_page(source: Path, text: Path, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    options = ["--kv-heads", "8,2", "--text", text, "--sequence-length", 64, "--device", "cpu"]
    shown = run(source, *options, "--html", page)
    assert shown.exit_code == 0, shown.stderr
    assert "g=8: not one bit differs in any layer or logit" in shown.stdout
    assert "drift, not quality loss" in shown.stdout
    data = json.loads(run(source, *options, "--json").stdout)
    assert [choice["counts"]["kv_heads"] for choice in data["choices"]] == [8, 2]
    assert data["choices"][0]["logits"]["identical"]
    assert data["text"]["packaged"] is False
    html = page.read_text()
    assert "not one bit differs" in html
    before = text.read_bytes()
    refused = run(source, *options, "--html", text)
    assert refused.exit_code == 2
    assert "lies inside the input" in refused.stderr
    assert text.read_bytes() == before
    assert html.count("data-layer ") == 2


def test_the_packaged_text_is_named(source: Path) -> None:
    shown = run(source, "--kv-heads", "8", "--max-tokens", 60, "--sequence-length", 32)
    assert "the packaged held-out text" in shown.stdout


def test_one_kv_head_has_nothing_to_merge(text: Path, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "multi-query", num_key_value_heads=1)
    options = ["--text", text, "--max-tokens", 40, "--sequence-length", 32, "--device", "cpu"]
    page = tmp_path / "sweep.html"
    shown = run(source, *options, "--kv-dtype", "float32", "--html", page)
    assert shown.exit_code == 0, shown.stderr
    assert "already multi-query: nothing to merge" in shown.stdout
    assert "Already multi-query: nothing to merge." in page.read_text()
    assert "Cache bytes in fp32." in page.read_text()
    row = next(line.split() for line in shown.stdout.splitlines() if line.startswith("1 (now)"))
    assert row[3] == str(2 * 1 * 16 * 4)  # two layers, a head of 8 + 8, 4 bytes an element
    refused = run(source, *options, "--kv-dtype", "fp7")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: unknown KV cache dtype 'fp7'")


@pytest.mark.parametrize("numbers", ["", "8,", "8;4", "-2", "eight"])
def test_what_is_no_list_of_heads_is_refused(source: Path, numbers: str) -> None:
    result = run(source, f"--kv-heads={numbers}")
    assert result.exit_code == 2
    assert "is no list of numbers" in result.stderr
    assert len(result.stderr.splitlines()) == 3
