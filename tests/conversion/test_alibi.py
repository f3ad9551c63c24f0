"""Models with ALiBi: calibrated on what their class computes, and verified by what is exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from tests.conversion.streams import last_hidden, relative, some_ids, streamed
from tests.conversion.test_calibrated import TEXT, logits
from tests.heads.layers import inputs, random_layer
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checks import Check
from upcycle.conversion.calibration import check_order
from upcycle.conversion.convert import check_request
from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.predict import predict
from upcycle.conversion.verify import verify
from upcycle.conversion.whole_model import fp64_outputs, relative_differences
from upcycle.errors import PlanError
from upcycle.families import family_in
from upcycle.heads.gauge import scramble
from upcycle.heads.permute import can_reorder, permute_kv_heads
from upcycle.heads.reference import alibi_slopes, attention_output
from upcycle.models.loading import load_model
from upcycle.options.convert import ConvertOptions, MergeOptions
from upcycle.planning import plan

ALIBI = "ALiBi's slope of a query head goes by its place, and stays there"


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
    found = predict(
        alibi_source(tmp_path),
        MergeOptions(calibration=[text], calibration_tokens=2560, device="cpu"),
    )
    assert found.kv_heads == (1,)
    assert all(0 < layer.residuals[1].values < 1 for layer in found.layers)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71])
def test_slopes_are_those_of_the_class(heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    slopes = alibi_slopes(heads, torch.float64)
    torch.testing.assert_close(bias[:, 0, 1], slopes, rtol=4e-3, atol=0)  # bf16 in the class


def verdicts(source: Path, output: Path) -> dict[str, Check]:
    result = verify(source, output)
    assert result.passed, [check for check in result.checks if check.failed]
    assert not any(check.measured == float("inf") for check in result.checks)
    return {check.name: check for check in result.checks}


@pytest.mark.parametrize("model_class", ["FalconForCausalLM", "FalconModel"])
@pytest.mark.parametrize(("now", "wanted"), [(8, 1), (8, 8), (1, 8)])
def test_what_is_exact_is_proven_and_what_is_not_says_why(
    tmp_path: Path, model_class: str, now: int, wanted: int
) -> None:
    source = alibi_source(tmp_path / "source", multi_query=now == 1)
    what = "logits"
    if model_class == "FalconModel":
        load_model(source, dtype=torch.float32).transformer.save_pretrained(source)
        what = "hidden states"
    convert(source, tmp_path / "out", kv_heads=wanted)
    found = verdicts(source, tmp_path / "out")
    loaded = "AutoModelForCausalLM" if what == "logits" else model_class
    assert [name for name, check in found.items() if check.passed is None] == [
        "permuted heads give the same attention output",
        f"permuted heads give the same {what}",
    ]
    assert found[f"permuted heads give the same {what}"].detail == ALIBI
    for name in (
        "gauge-transformed heads give the same attention output",
        f"gauge-transformed heads give the same {what}",
    ):
        assert 0 < found[name].measured < 1e-12, "it was computed, and is exact in fp64"  # type: ignore[operator]
    assert found[f"plain {loaded} gives the same {what} with and without cache"].passed
    assert found["the cache holds the predicted bytes"].passed


def test_another_order_of_heads_would_be_another_model(tmp_path: Path) -> None:
    """What verify leaves out is no identity: the class itself says so."""
    source = Checkpoint.open(alibi_source(tmp_path))
    family = family_in(source)
    shape = family.shape(source.config)
    assert shape.alibi
    changed = {}
    for layer in shape.attention_layers:
        names = family.tensor_names(layer, shape)
        weights = family.read({role: source.read(name) for role, name in names.items()}, shape)
        moved = permute_kv_heads(replace(weights, alibi=False), range(7, -1, -1))
        changed |= {names[role]: tensor for role, tensor in family.write(moved).items()}
    expected = fp64_outputs(source, None)
    assert relative_differences(fp64_outputs(source, None, changed), expected) > 1e-3


@pytest.mark.parametrize("options", [{}, {"grouping": "search"}, {"refine": 4}])
def test_a_calibrated_conversion_is_verified(
    tmp_path: Path, text: Path, options: dict[str, object]
) -> None:
    source = alibi_source(tmp_path / "source")
    convert(
        source, tmp_path / "out", kv_heads=1, calibration=[text], calibration_tokens=1024, **options
    )
    found = verdicts(source, tmp_path / "out")
    assert found["lowrank merges equal heads without loss"].passed


def test_equal_heads_lose_nothing(tmp_path: Path, text: Path) -> None:
    grouped = alibi_source(tmp_path / "grouped", multi_query=True)
    convert(grouped, tmp_path / "raised", kv_heads=8)
    for method in ("mean", "procrustes", "lowrank"):
        out = tmp_path / method
        given = [] if method == "mean" else [text]
        convert(
            tmp_path / "raised",
            out,
            kv_heads=1,
            method=method,
            calibration=given,
            calibration_tokens=512,
        )
        assert relative(logits(out), logits(grouped)) <= 1e-5


def test_heads_with_places_are_not_reordered() -> None:
    weights, x = replace(random_layer(8, 4), alibi=True), inputs(9)
    assert not can_reorder(weights)[0]
    with pytest.raises(PlanError, match="another order of heads would change") as caught:
        permute_kv_heads(weights, [1, 0, 2, 3])
    assert ALIBI in str(caught.value)
    assert permute_kv_heads(weights, [0, 1, 2, 3]).q.equal(weights.q)
    expected = attention_output(weights, x)
    other = scramble(weights, torch.Generator().manual_seed(0))
    assert relative(attention_output(other, x), expected) < 1e-12
    moved = replace(permute_kv_heads(replace(weights, alibi=False), [1, 0, 2, 3]), alibi=True)
    assert relative(attention_output(moved, x), expected) > 1e-3
    assert relative(attention_output(replace(weights, alibi=False), x), expected) > 1e-3


def test_a_search_of_groups_is_refused_where_heads_have_places(tmp_path: Path, text: Path) -> None:
    todo = plan(tiny_checkpoint(tmp_path / "source"), kv_heads=2)
    search = MergeOptions(calibration=[text], grouping="search")
    check_order(search, todo)
    placed = replace(todo, source_shape=replace(todo.source_shape, alibi=True))
    with pytest.raises(PlanError, match="a search would put heads into another order"):
        check_order(search, placed)
    check_order(MergeOptions(calibration=[text]), placed)
    check_order(search, replace(placed, num_key_value_heads=1))  # one group has one order
    falcon = alibi_source(tmp_path / "falcon")
    check_request(falcon, ConvertOptions(kv_heads=1, calibration=[text], grouping="search"))
