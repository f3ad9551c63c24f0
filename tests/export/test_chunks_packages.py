"""A model exported as chunks: what they hold, and that together they are the single package."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from tests.export.families import exported_checkpoint
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.cli import check_export as _check  # noqa: F401 - registers the command
from upcycle.cli import export as _export  # noqa: F401
from upcycle.cli import graph as _graph  # noqa: F401
from upcycle.cli.app import app
from upcycle.errors import ExportError, OutputError
from upcycle.export.checks import BrokenExportError, check_chunk
from upcycle.export.coreml import ExportResult, export_coreml
from upcycle.export.saving import weights_size
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.parity.check import check_export
from upcycle.parity.core_ml import Chain
from upcycle.parity.exported import Program, ProgramOutputs, run_program
from upcycle.parity.feeding import Runner
from upcycle.program.bandwidth import exported_shape
from upcycle.program.chunked import chunk_paths, read_exported
from upcycle.program.graph import Graph
from upcycle.program.reading import read_graph

LAYERS, CONTEXT, PREFILL, BUDGET = 4, 64, 8, 140_000
TABLE = 260 * 64 * 2  # bytes of the tied matrix
TOKENS = torch.arange(24) * 7 % 260


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunks") / "source"
    return tiny_checkpoint(
        folder, num_hidden_layers=LAYERS, num_key_value_heads=2, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def single(source: Path) -> ExportResult:
    options = ExportOptions(context=CONTEXT, prefill=PREFILL)
    return export_coreml(source, source.with_name("single.mlpackage"), options)


@pytest.fixture(scope="module")
def chunked(source: Path) -> ExportResult:
    options = ExportOptions(context=CONTEXT, prefill=PREFILL, chunk_size=BUDGET)
    return export_coreml(source, source.with_name("chunked"), options)


def ran(output: Path, *, half: bool, runner: Runner | None = None) -> ProgramOutputs:
    program = Program.read(output)
    return run_program(program, runner or Interpreter(program.loaded, half=half), TOKENS)


def graphs(result: ExportResult) -> list[Graph]:
    return [read_graph(path) for path in chunk_paths(result.package)]


def upcycle(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("half", [False, True])
def test_the_chunks_compute_the_same_bits(
    single: ExportResult, chunked: ExportResult, half: bool
) -> None:
    one, other = (ran(result.package, half=half) for result in (single, chunked))
    assert one.prefilled == other.prefilled == PREFILL
    assert torch.equal(one.text, other.text)
    assert torch.equal(one.end, other.end)


def test_a_runner_for_each_chunk_does_the_same(chunked: ExportResult) -> None:
    parts = graphs(chunked)
    chain = Chain([Interpreter(Loaded(graph), half=False) for graph in parts], parts)
    one, other = (ran(chunked.package, half=False, runner=each) for each in (None, chain))
    assert torch.equal(one.text, other.text)
    assert one.caches is not None
    assert other.caches is not None
    assert torch.equal(one.caches, other.caches)


def test_inputs_outputs_and_states_of_the_chunks(chunked: ExportResult) -> None:
    parts = graphs(chunked)
    layers = [chunk["num_layers"] for chunk in chunked.manifest.document["result"]["chunks"]]
    assert layers == [1, 2, 1]
    for graph, count in zip(parts, layers, strict=True):
        assert set(graph.functions) == {"main", "prefill"}
        states = {name: state.shape for name, state in graph.decode.states.items()}
        assert states == dict.fromkeys(("keyCache", "valueCache"), (count, 2, CONTEXT, 8))
    inputs = [graph.decode.inputs[0] for graph in parts]
    outputs = [graph.decode.outputs for graph in parts]
    assert inputs == ["inputIds", "hidden", "hidden"]
    assert outputs == [("newHidden",), ("newHidden",), ("logits",)]
    hidden = parts[1].functions["prefill"].types["hidden"]
    assert (hidden.shape, hidden.dtype) == ((1, PREFILL, 64), "float16")


def test_each_weight_is_in_one_chunk_but_the_tied_one(
    single: ExportResult, chunked: ExportResult
) -> None:
    parts = graphs(chunked)
    first = 0
    for graph, path in zip(parts, chunk_paths(chunked.package), strict=True):
        last = first + graph.decode.state_writes["keyCache"]
        assert weights_size(path) <= BUDGET
        names = [name.split("_layers_") for name in graph.decode.weights]
        layers = {rest[0][0] for _, *rest in names if rest}
        assert layers == set(map(str, range(first, last)))
        first = last
    tables = [
        [name for name in graph.decode.weights if "embed_tokens" in name or "lm_head" in name]
        for graph in parts
    ]
    assert [len(names) for names in tables] == [1, 0, 1]
    whole = read_graph(single.package).weight_bytes
    total = sum(graph.weight_bytes for graph in parts)
    repeated = TABLE + 2 * 2 * CONTEXT * 8 * 2  # and the cosines and sines of two more chunks
    assert 0 <= total - whole - repeated <= 0.01 * whole  # zero biases


def test_read_together_they_are_the_whole_model(
    single: ExportResult, chunked: ExportResult
) -> None:
    graph = read_exported(chunked.package)
    one, together = single.function, graph.decode
    assert (together.inputs, together.outputs) == (one.inputs, one.outputs)
    assert together.histogram["linear"] == one.histogram["linear"]
    assert sum(together.state_writes.values()) == 2 * LAYERS
    assert exported_shape(graph) == exported_shape(read_graph(single.package))
    assert chunked.function.histogram == together.histogram


def test_check_export_takes_the_folder_and_refuses_a_chunk(
    source: Path, single: ExportResult, chunked: ExportResult
) -> None:
    result = check_export(source, chunked.package, tokens=12, against=single.package)
    assert result.passed
    assert all(found.against and found.against.maximum == 0 for found in result.arithmetics)
    with pytest.raises(ExportError, match="is one of 3 chunks of a model"):
        Program.read(chunk_paths(chunked.package)[1])


def test_graph_counts_a_chunk_or_all(chunked: ExportResult) -> None:
    path = chunk_paths(chunked.package)[1]
    assert "chunk 2 of 3, layers 1 to 2: all that follows is of this chunk" in (
        upcycle("graph", path).stdout
    )
    one, whole = (
        json.loads(upcycle("graph", output, "--json").stdout) for output in (path, chunked.package)
    )
    assert (one["attention"]["num_layers"], whole["attention"]["num_layers"]) == (2, LAYERS)
    assert whole["chunk"] is None
    assert one["weight_bytes"] < whole["weight_bytes"]
    worse = {found["lint"] for found in whole["findings"] if found["severity"] != "note"}
    assert worse == {"state-size"}  # heads of 8 channels
    assert whole["findings"][0]["function"] == "chunk1 main"


def test_the_folder_has_what_an_app_needs(chunked: ExportResult) -> None:
    names = {path.name for path in chunked.package.iterdir()}
    assert {"chunk1.mlpackage", "chunk3.mlpackage", "tokenizer.json", "config.json"} <= names
    noted = json.loads((chunked.package / "upcycle.json").read_text())
    assert noted["result"]["files"] == hash_folder(chunked.package)
    assert noted["options"]["chunk_size"] == BUDGET
    sizes = [chunk["weight_bytes"] for chunk in noted["result"]["chunks"]]
    assert sizes == [weights_size(path) for path in chunk_paths(chunked.package)]


def test_a_chunk_of_another_export_is_refused(chunked: ExportResult, tmp_path: Path) -> None:
    copy = shutil.copytree(chunked.package, tmp_path / "copy")
    one, two, _ = chunk_paths(copy)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with pytest.raises(ExportError, match=r"chunk1.mlpackage is not chunk 1 of the export"):
        read_exported(copy)
    manifest = json.loads((copy / "upcycle.json").read_text())
    manifest["options"]["context"] = 96
    (copy / "upcycle.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match=r"chunk1.mlpackage is not chunk 1 of the export"):
        read_exported(copy)
    shutil.rmtree(copy / "chunk2.mlpackage")
    with pytest.raises(ExportError, match="no Core ML package"):
        read_exported(copy)


def test_windows_and_a_read_only_cache(tmp_path: Path) -> None:
    """Each chunk takes the masks and the K and V of its own layers."""
    source = tiny_checkpoint(
        tmp_path / "source",
        "gemma3_text",
        num_key_value_heads=2,
        num_hidden_layers=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    )
    options: dict[str, Any] = {"context": CONTEXT, "kv_cache": "read-only", "argmax": True}
    one = export_coreml(source, tmp_path / "one.mlpackage", ExportOptions(**options))
    cut = export_coreml(source, tmp_path / "cut", ExportOptions(**options, chunk_size=150_000))
    first, last = (graph.decode for graph in graphs(cut))
    assert first.inputs == ("inputIds", "position", "keyCache0", "valueCache0", "slidingMask")
    assert last.inputs == ("hidden", "position", "keyCache1", "valueCache1", "causalMask")
    assert last.outputs == ("logits", "newKey1", "newValue1", "nextToken")
    outputs: list[Tensor] = [ran(result.package, half=False).text for result in (one, cut)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("quantize", "untie"), [("int8", False), pytest.param("mixed", True, marks=pytest.mark.slow)]
)
def test_quantised_chunks_are_measured_as_they_are_stored(
    source: Path, tmp_path: Path, quantize: str, untie: bool
) -> None:
    options = ExportOptions(context=32, quantize=quantize, untie=untie, chunk_size=95_000)
    result = export_coreml(source, tmp_path / "cut", options)
    chunks = result.manifest.document["result"]["chunks"]
    assert [chunk["num_layers"] for chunk in chunks] == [2, 2]
    assert max(chunk["weight_bytes"] for chunk in chunks) <= 95_000
    assert check_export(source, result.package, tokens=8).passed


def test_one_chunk_may_be_enough(source: Path, tmp_path: Path) -> None:
    done = upcycle("export", source, tmp_path / "cut", "--context", 32, "--chunk-size", "400KB")
    assert done.exit_code == 0, done.output
    assert "chunk1.mlpackage: layers 0 to 3" in done.stdout
    assert "weights, which is the whole model" in done.stdout
    size = weights_size(tmp_path / "cut" / "chunk1.mlpackage")
    assert size < 4 * 60_000 + 1.5 * TABLE, "the tied matrix is stored once"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cut.mlpackage", ("--chunk-size", "1GB"), "chunks go into a folder"),
        ("cut", (), "cut does not end in .mlpackage"),
        ("cut", ("--chunk-size", "50KB"), "layer 3 and the output head have"),
        ("cut", ("--chunk-size", "much"), "'much' is not a memory size"),
        ("cut.aimodel", ("--chunk-size", "1GB"), "have no --chunk-size"),
    ],
)
def test_requests_that_are_refused(
    source: Path, tmp_path: Path, name: str, arguments: tuple[str, ...], message: str
) -> None:
    done = upcycle("export", source, tmp_path / name, "--context", 32, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept(chunked: ExportResult, source: Path) -> None:
    options = ExportOptions(context=32, chunk_size=BUDGET)
    with pytest.raises(OutputError, match="exists"):
        export_coreml(source, chunked.package, options)


def test_weights_of_other_layers_are_caught() -> None:
    check_chunk(1000, 1000)
    with pytest.raises(BrokenExportError, match=r"1,001 B of weights, and its layers have 1,000"):
        check_chunk(1001, 1000)


def test_chunks_without_a_linear_layer_are_read(tmp_path: Path) -> None:
    """GPT-2's projections are products of matrices; only its output head is a linear layer."""
    source = exported_checkpoint(tmp_path / "source", "gpt2")
    result = export_coreml(source, tmp_path / "out", ExportOptions(context=32, chunk_size=170_000))
    linears = [graph.decode.histogram["linear"] for graph in graphs(result)]
    assert linears == [0, 1]
    assert result.function.histogram["linear"] == 1
