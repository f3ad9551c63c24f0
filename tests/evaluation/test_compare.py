"""`evaluate` on tiny checkpoints."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import upcycle
from tests.tiny import byte_tokenizer, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_file
from upcycle.errors import DataError, DeviceError, EvaluationError
from upcycle.evaluation.held_out import read_held_out
from upcycle.evaluation.results import Comparison
from upcycle.options.evaluate import EvaluateOptions

SHORT = {"max_tokens": 600, "sequence_length": 64, "device": "cpu"}


def compare(source: Path, candidates: Sequence[Path], **options: Any) -> Comparison:
    return upcycle.evaluate(source, candidates, EvaluateOptions(**options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "source": tiny_checkpoint(folder / "demo", seed=0, dtype=torch.float16),
        "mqa": tiny_checkpoint(folder / "mqa", seed=1, num_key_value_heads=1, dtype=torch.float16),
        "gqa": tiny_checkpoint(folder / "gqa", seed=2, num_key_value_heads=2, dtype=torch.float16),
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve documents of unlike length."""
    path = tmp_path_factory.mktemp("text") / "mine.jsonl"
    rows = [{"text": f"line {i}\n" * (i + 2)} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def comparison(folders: dict[str, Path], text: Path) -> Comparison:
    return compare(
        folders["source"],
        [folders["mqa"], folders["gqa"]],
        text=[text],
        prompts=["def main(", "import "],
        new_tokens=6,
        margins={"kl_mean": 1e-6, "nll_increase": 100.0},
        **SHORT,
    )


def test_models_are_labelled_by_their_folders(comparison: Comparison) -> None:
    assert [model.label for model in comparison.models] == ["source", "mqa", "gqa"]


def test_the_measured_cache_is_the_predicted_one(comparison: Comparison) -> None:
    for model, heads in zip(comparison.models, (8, 1, 2), strict=True):
        cache = model.kv_cache
        assert model.num_key_value_heads == heads
        assert cache.measured_bytes_per_token == cache.predicted_bytes_per_token
        assert cache.predicted_bytes_per_token == 2 * 2 * heads * 8 * 4  # layers, k+v, d, fp32
        assert (cache.stored_dtype, cache.measured_dtype) == ("float16", "float32")
        assert cache.bytes_per_token * 2 == cache.predicted_bytes_per_token


def test_units_of_likelihood_agree(comparison: Comparison) -> None:
    text = comparison.text
    assert text.bos
    assert text.tokens - text.documents <= text.bytes <= text.tokens  # bytes, and EOS tokens
    for model in comparison.models:
        total = model.nll * text.tokens
        assert model.perplexity == pytest.approx(math.exp(model.nll))
        assert model.bits_per_byte == pytest.approx(total / math.log(2) / text.bytes)


def test_the_noise_floor_is_far_below_the_differences(comparison: Comparison) -> None:
    floor = comparison.noise_floor
    assert floor.batch_sizes[1] == 1
    assert floor.kl_max < 1e-5
    assert floor.top1_agreement == 1
    for model in comparison.models[1:]:
        assert model.divergence is not None
        assert model.divergence.kl.mean > 1000 * max(floor.kl_mean, 1e-9)


def test_margins_judge_the_last_model(comparison: Comparison) -> None:
    kl, nll = comparison.margins
    assert (kl.name, kl.label, kl.passed) == ("kl_mean", "gqa", False)
    assert (nll.name, nll.label, nll.passed) == ("nll_increase", "gqa", True)
    divergence = comparison.models[-1].divergence
    assert divergence is not None
    assert divergence.nll_interval is not None
    assert nll.value == divergence.nll_interval.high
    assert not comparison.passed


def test_every_model_continues_every_prompt(comparison: Comparison) -> None:
    assert [g.prompt for g in comparison.generations] == ["def main(", "import "]
    for generation in comparison.generations:
        assert [c.label for c in generation.continuations] == ["source", "mqa", "gqa"]
        assert generation.continuations[0].first_divergence is None


def test_the_dictionary_is_json_without_surprises(comparison: Comparison) -> None:
    document = comparison.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_the_source_against_itself_is_equal_and_repeatable(
    folders: dict[str, Path], text: Path
) -> None:
    source = folders["source"]
    first, second = (
        compare(source, [source], text=[text], prompts=["a"], **SHORT) for _ in range(2)
    )
    assert first == second
    assert [model.label for model in first.models] == ["source", "demo"]
    divergence = first.models[1].divergence
    assert divergence is not None
    assert divergence.kl.max == 0
    assert divergence.top1_agreement == 1
    assert divergence.nll_interval is not None
    assert divergence.nll_interval.low == divergence.nll_interval.high == 0
    assert first.generations[0].continuations[1].first_divergence is None
    assert first.passed


def test_given_text_is_named_and_hashed(text: Path) -> None:
    found = read_held_out(
        EvaluateOptions(text=[text], sequence_length=64, max_tokens=10_000), byte_tokenizer()
    ).text
    lines = sum(i + 2 for i in range(12))
    assert found.files == ["mine.jsonl"]
    assert found.hashes == [hash_file(text)]
    assert not found.packaged
    assert found.documents == 12
    assert found.bytes == sum(len(f"line {i}\n") * (i + 2) for i in range(12))
    assert found.words >= lines * 2  # a word that a window cuts counts twice


def test_no_text_means_the_packaged_text() -> None:
    found = read_held_out(
        EvaluateOptions(sequence_length=64, max_tokens=500), byte_tokenizer()
    ).text
    assert found.files == ["heldout.jsonl"]
    assert found.packaged
    assert 400 < found.tokens <= 500


def test_another_tokenizer_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders["gqa"], tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EvaluationError, match="different vocabulary, split of a probe text"):
        compare(folders["source"], [other], **SHORT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not available"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"margins": {"kl": 1.0}}, "there is no option margins.kl"),
        ({"sequence_length": 129}, "windows of 129 tokens exceed the model's context of 128"),
    ],
)
def test_a_bad_request_is_refused(
    folders: dict[str, Path], text: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises((DeviceError, EvaluationError), match=message):
        compare(folders["source"], [folders["gqa"]], text=[text], **{**SHORT, **options})


def test_nothing_to_compare_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(EvaluationError, match="nothing to compare"):
        upcycle.evaluate(folders["source"], [])


def test_text_that_is_not_there_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        compare(folders["source"], [folders["gqa"]], text=[tmp_path / "x.txt"], **SHORT)
