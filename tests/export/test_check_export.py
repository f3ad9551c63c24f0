"""`upcycle check-export` on packages that are right, and on packages with a planted fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.cli import check_export as _check_export  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.errors import ExportError
from upcycle.export import loading
from upcycle.export.coreml import export_coreml
from upcycle.export.quiet import quiet_coremltools
from upcycle.interpreter.interpreter import Interpreter
from upcycle.options.export import ExportOptions
from upcycle.parity.check import check_export
from upcycle.parity.exported import Program
from upcycle.parity.results import ExportCheck
from upcycle.program.reading import read_graph
from upcycle.program.specification import read_specification

LAYERS, HEADS, HEAD_DIM, CONTEXT, PREFILL = 2, 8, 8, 64, 16
TOKENS = 24


def upcycle(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=2, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def package(source: Path) -> Path:
    output = source.with_name("qfold.mlpackage")
    return export_coreml(source, output, ExportOptions(context=CONTEXT, prefill=PREFILL)).package


def failed(result: ExportCheck) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


def test_prefill_decode_and_the_end_of_the_context_are_the_models(
    source: Path, package: Path
) -> None:
    result = check_export(source, package, tokens=TOKENS)
    assert failed(result) == set()
    assert (result.tokens, result.prefilled, result.compressed) == (2 * TOKENS, PREFILL, 0)
    full, half = result.arithmetics
    assert (full.name, half.name) == ("fp32", "fp16")
    for found in (full, half):
        assert found.text.positions == 2 * TOKENS
        assert found.end.positions == 16
        assert found.text.broken == 0 < found.text.decided
        assert found.overflowed == []
    assert full.text.relative < 1e-4
    assert full.full.relative > full.text.relative
    assert full.prefill is not None
    assert full.prefill.relative < 1e-6
    assert full.caches is not None
    assert full.caches < 1e-6
    assert half.text.maximum > full.text.maximum
    assert 0 < half.largest[0].magnitude < 65504


@pytest.mark.parametrize("option", [{"attention": "repeat-kv"}, {"kv_cache": "read-only"}])
def test_another_package_of_the_same_model_agrees(
    source: Path, package: Path, tmp_path: Path, option: dict[str, str]
) -> None:
    """Copied K and V, or a cache outside of the program, change nothing."""
    other = tmp_path / "other.mlpackage"
    export_coreml(source, other, ExportOptions(context=CONTEXT, prefill=8, **option))  # type: ignore[arg-type]
    result = check_export(source, other, tokens=TOKENS, against=package)
    assert failed(result) == set()
    assert result.prefilled == TOKENS
    against = result.arithmetics[0].against
    assert against is not None
    assert against.relative < 1e-5


def test_the_command_says_what_it_found(source: Path, package: Path) -> None:
    done = upcycle("check-export", source, package, "--tokens", TOKENS)
    assert done.exit_code == 0, done.output
    assert "48 tokens of the packaged held-out text: 16 by prefill, 32 by decode" in done.stdout
    assert "fp16: 0 operations beyond fp16's 65,504" in done.stdout
    done = upcycle("check-export", source, package, "--tokens", TOKENS, "--json", "--max-kl", 0)
    document = json.loads(done.stdout)
    assert done.exit_code == 1  # fp16 weights are not the checkpoint's, to the last bit
    assert [check["name"] for check in document["checks"] if not check["passed"]] == [
        "fp32: KL to the checkpoint",
        "fp16: KL to the checkpoint",
    ]


def test_bad_requests_are_refused(source: Path, package: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    done = upcycle("check-export", source, package, "--text", short)
    assert done.exit_code == 2
    assert "the text has 11 tokens, and the check needs 64" in done.stderr
    stranger = edited(package, tmp_path, lambda model: _forget(model))
    with pytest.raises(ExportError, match="was not made by `upcycle export`"):
        check_export(source, stranger)


def test_an_unknown_operation_is_named(source: Path, package: Path, tmp_path: Path) -> None:
    def rename(model: Any) -> None:
        operations(model, "prefill", "softmax")[0].type = "classify"

    with pytest.raises(ExportError, match=r"does not know the operation 'classify'\n.*'prefill'"):
        check_export(source, edited(package, tmp_path, rename), tokens=TOKENS)


def test_compressed_weights_are_compared_with_themselves(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "small.mlpackage"
    export_coreml(source, output, ExportOptions(context=CONTEXT, prefill=PREFILL, quantize="mixed"))
    result = check_export(source, output, tokens=TOKENS)
    assert failed(result) == set()
    assert result.compressed == 7 * LAYERS + 2
    full = result.arithmetics[0].full
    assert full.kl > 100 * result.arithmetics[0].text.kl
    assert failed(check_export(source, output, tokens=TOKENS, max_kl=full.kl / 2)) == {
        "fp32: KL to the checkpoint",
        "fp16: KL to the checkpoint",
    }
    other = tiny_checkpoint(tmp_path / "other", num_key_value_heads=2, seed=1)
    with pytest.raises(ExportError, match="does not resemble its parameter"):
        check_export(other, output, tokens=TOKENS)


def test_on_a_mac_core_ml_runs_too(
    source: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Apple's runtime: what is called, and that its row is there."""

    class Model:
        def __init__(self, path: str) -> None:
            self.program = Program.read(Path(path))

        def make_state(self) -> Interpreter:
            return Interpreter(self.program.loaded, half=True)

        def predict(self, inputs: dict[str, Any], state: Interpreter) -> dict[str, Any]:
            tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
            return {name: value.numpy() for name, value in state.run("main", tensors).items()}

    with quiet_coremltools():
        import coremltools as ct
    monkeypatch.setattr(ct.models, "MLModel", Model)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    result = check_export(source, package, tokens=TOKENS)
    assert failed(result) == set()
    assert [found.name for found in result.arithmetics] == ["fp32", "fp16", "Core ML"]
    apple = result.arithmetics[-1]
    assert (apple.prefill, apple.largest) == (None, [])
    assert apple.end == result.arithmetics[1].end


def edited(package: Path, folder: Path, edit: Callable[[Any], None]) -> Path:
    """A copy of a package with its specification changed."""
    copy = shutil.copytree(package, folder / "edited.mlpackage")
    model = read_specification(copy)
    edit(model)
    (copy / "Data/com.apple.CoreML/model.mlmodel").write_bytes(model.SerializeToString())
    return copy


def _forget(model: Any) -> None:
    del model.description.metadata.userDefined["upcycle"]


def operations(model: Any, function: str, kind: str) -> list[Any]:
    found = model.mlProgram.functions[function]
    return [op for op in found.block_specializations[found.opset].operations if op.type == kind]


def constant(package: Path, stem: str, *shape: int) -> NDArray[np.float16]:
    """A weight in the package's weight file, to be changed."""
    weights = read_graph(package).functions["main"].weights
    (weight,) = (weight for name, weight in weights.items() if name.startswith(stem))
    # The data follow a record of 64 bytes.
    return np.memmap(weight.file, np.float16, "r+", weight.offset + 64, shape)


def test_a_dropped_state_write_is_caught(source: Path, package: Path, tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        found = model.mlProgram.functions["main"]
        writes = operations(model, "main", "write_state")
        found.block_specializations[found.opset].operations.remove(writes[-1])

    names = failed(check_export(source, edited(package, tmp_path, drop), tokens=TOKENS))
    assert {"fp32: logits", "fp32: prefill = decode", "fp32: end of context"} <= names


def test_a_wrong_head_order_is_caught(source: Path, package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "heads.mlpackage")
    heads = constant(copy, "model_model_layers_0_self_attn_q_proj", HEADS, HEAD_DIM * 64)
    heads[[0, HEADS - 1]] = heads[[HEADS - 1, 0]]
    heads.flush()  # type: ignore[attr-defined]
    assert "fp32: logits" in failed(check_export(source, copy, tokens=TOKENS))


def test_swapped_layers_are_caught(source: Path, package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "layers.mlpackage")
    first, second = (
        constant(copy, f"model_model_layers_{layer}_mlp_up_proj", 96, 64) for layer in range(2)
    )
    first[:], second[:] = np.array(second), np.array(first)
    first.flush()  # type: ignore[attr-defined]
    second.flush()  # type: ignore[attr-defined]
    assert "fp32: logits" in failed(check_export(source, copy, tokens=TOKENS))


def test_angles_in_fp16_are_caught_at_position_4000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its table, the graph computes the angles itself."""
    source = tiny_checkpoint(
        tmp_path / "long", num_key_value_heads=2, num_hidden_layers=1, max_position_embeddings=4096
    )
    good = export_coreml(source, tmp_path / "good.mlpackage", ExportOptions(context=4096)).package
    assert failed(check_export(source, good, tokens=8)) == set()
    monkeypatch.setattr(loading, "tabulate_rotary", lambda model, context: None)
    bad = export_coreml(source, tmp_path / "bad.mlpackage", ExportOptions(context=4096)).package
    result = check_export(source, bad, tokens=8)
    assert failed(result) >= {"fp16: end of context"}
    assert "fp32: end of context" not in failed(result)
    torch.testing.assert_close(result.arithmetics[0].end.broken, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_split_head_may_be_quantised(tmp_path: Path, tied: bool) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, tie_word_embeddings=tied)
    package = tmp_path / "model.mlpackage"
    options = ExportOptions(context=32, quantize="mixed", split_head=5, untie=tied)
    exported = export_coreml(source, package, options)
    assert exported.function.histogram["linear"] == 7 + 5
    result = check_export(source, package, tokens=8)
    assert failed(result) == set()
    assert result.compressed == 9
    for found in result.arithmetics:  # the rounding to 4 bits is seen, and nothing is left out
        assert found.full.excused == 0
        assert found.text.relative < found.full.relative < 1


def test_a_prefill_of_more_tokens_than_asked_is_run(source: Path, package: Path) -> None:
    result = check_export(source, package, tokens=4)
    assert (result.tokens, result.prefilled) == (PREFILL + 4, PREFILL)
    assert {"fp32: prefill = decode", "fp16: prefill = decode"} <= {
        check.name for check in result.checks
    }


def test_the_context_limits_the_tokens(source: Path, package: Path) -> None:
    assert check_export(source, package, tokens=1000).tokens == CONTEXT


def test_another_vocabulary_is_refused(package: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", num_key_value_heads=2, vocab_size=300)
    with pytest.raises(ExportError, match=r"logits for 260 tokens, and the model of other for 300"):
        check_export(other, package, tokens=4)
