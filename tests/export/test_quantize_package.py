"""Compressed constants of a converted decoder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny import tiny_checkpoint, tiny_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.coreml import export_coreml
from upcycle.export.loading import load_decoder
from upcycle.export.quantize import compression
from upcycle.export.quantize.compression import compress
from upcycle.export.quantize.dequantise import dequantise
from upcycle.export.quantize.schemes import PRESETS, Quantization, Scheme
from upcycle.export.quantize.weights import WeightMatrix, assign, find_weights, untie
from upcycle.export.quiet import quiet_coremltools
from upcycle.export.saving import convert_decoder
from upcycle.options.export import ExportOptions

CONTEXT = 32
BY_FOUR = Scheme(kind="palette", bits=4, group=4)
GROUPED = Quantization(ffn=BY_FOUR, attention=BY_FOUR, lm_head=BY_FOUR)


def converted(
    folder: Path, model_type: str, form: Mapping[str, Any] | None = None, **overrides: Any
) -> tuple[Any, Any]:
    """A decoder of one layer as an `MLModel`, and the causal LM that it came from."""
    overrides = {"num_hidden_layers": 1, "num_key_value_heads": 2, **overrides}
    source = tiny_checkpoint(folder, model_type, **overrides)
    decoder = load_decoder(
        Checkpoint.open(source),
        ExportOptions(context=CONTEXT, attention="qfold", kv_cache="state", **form or {}),
    )
    return convert_decoder(decoder, 1), tiny_model(model_type, **overrides)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return converted(tmp_path_factory.mktemp("tied") / "source", "llama", tie_word_embeddings=True)


def plan(
    model: Any, preset: str | Quantization
) -> tuple[dict[str, WeightMatrix], dict[str, Scheme]]:
    weights = {weight.name: weight for weight in find_weights(model)}
    quantization = PRESETS[preset] if isinstance(preset, str) else preset
    return weights, assign(quantization, weights.values())


def decompressed(package: Any) -> tuple[dict[str, NDArray[np.float16]], set[str]]:
    """What coremltools makes of the compressed constants, and the names of all others."""
    with quiet_coremltools():
        from coremltools.converters.mil.frontend.milproto.load import load

        spec = package.get_spec()
        version = spec.specificationVersion
        program = load(spec, specification_version=version, file_weights_dir=package.weights_dir)
        operations = program.functions["main"].operations
        values = {
            op.outputs[0].name: op.materialized_val_inference()
            for op in operations
            if op.op_type.startswith("constexpr_")
        }
    return values, {op.outputs[0].name for op in operations if op.op_type == "const"}


def check_values(package: Any, model: Any, schemes: Mapping[str, Scheme]) -> None:
    """Every compressed constant is what `dequantise` says, bit for bit, and there are no others."""
    values, _ = decompressed(package)
    assert len(values) == len(schemes)
    for name, scheme in schemes.items():
        stem = "model_" + name.replace(".", "_")
        (value,) = (v for constant, v in values.items() if constant.startswith(stem))
        expected = dequantise(model.get_parameter(name), scheme).numpy()
        assert np.array_equal(value.reshape(expected.shape), expected), name


@pytest.mark.parametrize("preset", ["mixed", "int4", GROUPED])
def test_the_package_holds_the_numbers_that_torch_computes_with(
    tied: tuple[Any, Any], preset: str | Quantization
) -> None:
    package, model = tied
    weights, schemes = plan(model, preset)
    check_values(compress(package, weights, schemes), model, schemes)


def test_rotary_tables_norms_and_biases_stay(tied: tuple[Any, Any]) -> None:
    package, model = tied
    weights, schemes = plan(model, "int8")
    _, before = decompressed(package)
    _, after = decompressed(compress(package, weights, schemes))
    gone = {name for name in before - after if name.startswith("model_")}
    assert gone == {f"model_{name.replace('.', '_')}_to_fp16" for name in schemes}
    assert "model_model_rotary_emb_cos_None_to_fp16" in after
    # The converter counts its own biases of zero.
    assert [name for name in after if re.fullmatch(r"linear_\d+_bias_\d+_to_fp16", name)]


def test_the_same_weights_give_the_same_bytes(tied: tuple[Any, Any]) -> None:
    package, model = tied
    weights, schemes = plan(model, GROUPED)
    one, two = (
        Path(compress(package, weights, schemes).weights_dir, "weight.bin").read_bytes()
        for _ in range(2)
    )
    assert one == two
    before = Path(package.weights_dir, "weight.bin").stat().st_size
    assert len(one) < 0.45 * before


def test_an_untied_pair_becomes_two_constants(tied: tuple[Any, Any]) -> None:
    package, model = tied
    model = tiny_model(num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
    untie(model)
    weights, schemes = plan(model, "mixed")
    assert schemes["model.embed_tokens.weight"].bits == 4
    assert schemes["lm_head.weight"].bits == 6
    check_values(compress(package, weights, schemes), model, schemes)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["phi3", "gpt_oss"])
def test_other_layouts_are_found(model_type: str, tmp_path: Path) -> None:
    package, model = converted(tmp_path / "source", model_type)
    weights, schemes = plan(model, "mixed")
    assert len({weights[name].role for name in schemes}) >= 3
    check_values(compress(package, weights, schemes), model, schemes)


@pytest.mark.slow
def test_convolutions_are_found(tmp_path: Path) -> None:
    package, model = converted(tmp_path / "source", "llama", {"conv": True})
    weights, schemes = plan(model, "mixed")
    check_values(compress(package, weights, schemes), model, schemes)


@pytest.mark.slow
def test_a_split_head_is_compressed_in_all_its_parts(tmp_path: Path) -> None:
    tied = {"vocab_size": 256, "tie_word_embeddings": True}
    package, model = converted(tmp_path / "source", "llama", {"split_head": 2}, **tied)
    weights, schemes = plan(model, GROUPED)
    values, _ = decompressed(compress(package, weights, schemes))
    expected = dequantise(model.lm_head.weight, BY_FOUR).numpy()
    parts = [value for name, value in sorted(values.items()) if "parts" in name]
    assert np.array_equal(np.concatenate(parts), expected)
    (table,) = (value for name, value in values.items() if "embed_tokens" in name)
    assert np.array_equal(table, expected)


def test_functions_that_are_compressed_apart_share_their_weights(tmp_path: Path) -> None:
    """The export itself checks that the merged package is no larger than its largest part."""
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, num_key_value_heads=2)
    output = tmp_path / "model.mlpackage"
    result = export_coreml(
        source, output, ExportOptions(context=CONTEXT, prefill=8, quantize="mixed")
    )
    for function in result.functions.values():
        assert function.histogram["constexpr_lut_to_dense"] == 3 + 2
        assert function.histogram["constexpr_blockwise_shift_scale"] == 4


def test_a_weight_that_the_program_has_not_is_an_error(tied: tuple[Any, Any]) -> None:
    package, _ = tied
    weights, schemes = plan(tiny_model(num_hidden_layers=2, tie_word_embeddings=True), "int8")
    with pytest.raises(ExportError, match=r"no constant of model\.layers\.1"):
        compress(package, weights, schemes)


def test_a_weight_that_coremltools_leaves_is_an_error(
    tied: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, model = tied
    weights, schemes = plan(model, "int8")
    monkeypatch.setattr(compression, "_quantizer", lambda *_: None)
    with pytest.raises(ExportError, match="coremltools left a weight as it was"):
        compress(package, weights, schemes)
