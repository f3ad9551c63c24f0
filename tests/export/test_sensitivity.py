"""The measured damage of each layer's quantisation."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_checkpoint, tiny_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.data.documents import packaged_text
from upcycle.errors import DataError, ExportError
from upcycle.export.quantize.dequantise import (
    dequantise_model,
    dequantised,
)
from upcycle.export.quantize.preparation import prepare_quantization
from upcycle.export.quantize.schemes import PRESETS, Scheme
from upcycle.export.quantize.weights import WeightMatrix, assign, find_weights, untie
from upcycle.export.sensitivity import log_probabilities, mean_divergence, measure_sensitivity
from upcycle.models.calibration_text import calibration_rows
from upcycle.models.loading import load_model
from upcycle.options.export import ExportOptions

if TYPE_CHECKING:
    from upcycle.progress import Progress

LAYERS = 3
YAML = """\
ffn: {kind: palette, bits: 4}
lm_head: {kind: palette, bits: 4}
promote: {count: 1}
"""


@pytest.fixture(scope="module", params=["llama", "gemma2", "mixtral"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, num_hidden_layers=LAYERS)


def rows() -> Tensor:
    return torch.randint(0, 260, (2, 24), generator=torch.Generator().manual_seed(1))


def plan(model: Any) -> tuple[dict[str, WeightMatrix], dict[str, Scheme]]:
    weights = {weight.name: weight for weight in find_weights(model)}
    return weights, assign(PRESETS["mixed"], weights.values())


def test_each_layer_is_measured_as_if_it_alone_were_quantised(model: Any) -> None:
    weights, schemes = plan(model)
    seen: list[Progress] = []
    found = measure_sensitivity(model, weights, schemes, rows(), seen.append)
    assert [moment.done for moment in seen] == [0, 1, 2, 3]
    assert found.tokens == 48
    with torch.inference_mode():
        reference = log_probabilities(model, rows())
        for layer in range(LAYERS):
            other = copy.deepcopy(model)
            own = {name: s for name, s in schemes.items() if weights[name].layer == layer}
            dequantise_model(other, weights, own)
            expected = mean_divergence(reference, log_probabilities(other, rows()))
            assert expected > 0
            assert found.kl[layer] == pytest.approx(expected, rel=1e-4)


def test_the_model_is_as_before(model: Any) -> None:
    weights, schemes = plan(model)
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        logits = model(input_ids=rows()).logits
    measure_sensitivity(model, weights, schemes, rows())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(input_ids=rows()).logits, logits)


def test_layers_without_a_scheme_cost_nothing_and_rank_last(model: Any) -> None:
    weights, schemes = plan(model)
    some = {name: scheme for name, scheme in schemes.items() if weights[name].layer == 1}
    found = measure_sensitivity(model, weights, some, rows())
    assert found.kl[0] == found.kl[2] == 0
    assert found.ranking == (1, 0, 2)


def test_the_divergence_is_that_of_the_definition() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    expected = 0.5 * torch.tensor(2.0).log() - 0.25 * torch.tensor(2.0).log()
    assert mean_divergence(p.log()[None, None], q.log()[None, None]) == pytest.approx(
        float(expected)
    )


def test_the_layer_that_does_not_fit_a_palette_is_promoted(tmp_path: Path) -> None:
    """All others have two different weights only, which a palette holds exactly."""
    folder = tiny_checkpoint(tmp_path / "source", num_hidden_layers=LAYERS)
    exact = load_model(folder, dtype=torch.float32)
    for weight in find_weights(exact):
        if weight.layer in (0, 2):
            parameter = exact.get_parameter(weight.name)
            parameter.data = 0.0625 * parameter.data.sign()
    exact.save_pretrained(folder)
    (tmp_path / "scheme.yaml").write_text(YAML)
    checkpoint = Checkpoint.open(folder)
    prepared = prepare_quantization(
        checkpoint, ExportOptions(quantize=str(tmp_path / "scheme.yaml"))
    )
    assert prepared.sensitivity is not None
    assert prepared.sensitivity.kl[0] == prepared.sensitivity.kl[2] == 0
    assert prepared.sensitivity.kl[1] > 0
    assert prepared.promoted == (1,)
    assert prepared.schemes["model.layers.1.mlp.up_proj.weight"].bits == 8
    record = prepared.record()
    assert record["promoted"] == [1]
    assert record["sensitivity"]["tokens"] == 512
    assert record["schemes"]["lm_head.weight"] == {"kind": "palette", "bits": 4}
    assert record["kl"] > 0


def test_only_a_tied_pair_can_be_untied(tmp_path: Path) -> None:
    tied = tiny_checkpoint(tmp_path / "tied", num_hidden_layers=1, tie_word_embeddings=True)
    prepared = prepare_quantization(
        Checkpoint.open(tied), ExportOptions(quantize="mixed", untie=True)
    )
    assert prepared.schemes["model.embed_tokens.weight"].bits == 4
    assert prepared.schemes["lm_head.weight"].bits == 6
    assert prepared.sensitivity is None
    separate = load_model(tied, dtype=torch.float32)
    untie(separate)
    dequantise_model(separate, prepared.weights, prepared.schemes)
    assert not torch.equal(separate.lm_head.weight, separate.model.embed_tokens.weight)
    with pytest.raises(ExportError, match="would both be linear 8-bit"):
        prepare_quantization(Checkpoint.open(tied), ExportOptions(quantize="int8", untie=True))
    apart = tiny_checkpoint(tmp_path / "apart", num_hidden_layers=1, tie_word_embeddings=False)
    with pytest.raises(ExportError, match="not tied"):
        prepare_quantization(Checkpoint.open(apart), ExportOptions(quantize="mixed", untie=True))


def test_too_little_text_names_no_option_that_export_has_not(tmp_path: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source"))
    scheme, text = tmp_path / "scheme.yaml", tmp_path / "short.txt"
    scheme.write_text(YAML)
    text.write_text("A few words." * 15)
    with pytest.raises(DataError, match=r"512 tokens .*\n.*short.txt\n.*add text$"):
        prepare_quantization(source, ExportOptions(quantize=str(scheme), calibration=(text,)))


@pytest.mark.slow
def test_promoting_the_most_sensitive_layers_of_a_real_model_pays(smollm2: Path) -> None:
    """On other text than they were chosen on, and more than as many insensitive layers do."""
    checkpoint = Checkpoint.open(smollm2)
    model = load_model(checkpoint.folder, dtype=torch.float32)
    weights, schemes = plan(model)
    ranking = measure_sensitivity(
        model,
        weights,
        schemes,
        calibration_rows(checkpoint, ["builtin"], tokens=256, sequence_length=128),
    ).ranking
    held_out = calibration_rows(
        checkpoint, [packaged_text("heldout")], tokens=512, sequence_length=256
    )
    with torch.inference_mode():
        reference = log_probabilities(model, held_out)

        def damage(promoted: tuple[int, ...]) -> float:
            chosen = assign(PRESETS["top8"], weights.values(), promoted)
            with dequantised(model, weights, chosen):
                return mean_divergence(reference, log_probabilities(model, held_out))

        none, top, bottom = damage(()), damage(ranking[:8]), damage(ranking[-8:])
    assert top < bottom < none
    assert top < 0.8 * none
