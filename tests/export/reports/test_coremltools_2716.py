"""apple/coremltools#2716: 4-bit palettes beside states crash after 100 to 200 predictions.

A package of coremltools 9.0 on the Neural Engine; one that 8.3 made of the same source did not.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.export.planted import rules
from tests.tiny import tiny_checkpoint
from upcycle.cli import export as _export  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.program.graph import Function, Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.operation import Operation, TensorType
from upcycle.program.reading import read_graph

VERSION = "com.github.apple.coremltools.version"


@pytest.mark.parametrize(
    ("scheme", "kv_cache", "told"),
    [
        ("lut4", "state", True),
        ("lut4", "read-only", False),
        ("lut6", "state", False),
        ("int4", "state", False),
        ("mixed", "state", True),  # 4 bits for the feed-forward layers
    ],
)
def test_ours_are_told(tmp_path: Path, scheme: str, kv_cache: str, told: bool) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, **shape)
    output = tmp_path / "model.mlpackage"
    options = ["--context", "64", "--kv-cache", kv_cache, "--quantize", scheme]
    done = CliRunner().invoke(app, ["export", str(source), str(output), *options, "--json"])
    assert done.exit_code == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert any("apple/coremltools#2716" in note for note in notes) == told
    graph = read_graph(output)
    assert ("palette-states" in rules(graph, without="")) == told
    notes = [each for each in lint_graph(graph) if each.lint == "palette-states"]
    assert {each.severity for each in notes} <= {"note"}


def palettes(dtype: str, *, state: bool) -> Function:
    """A weight as indices into a palette."""
    types = {
        "indices": TensorType((8, 64), dtype),
        "lut": TensorType((1, 1, 16, 1), "float16"),
        "weight": TensorType((8, 64), "float16"),
    }
    operands = {"indices": ("indices",), "lut": ("lut",)}
    operation = Operation("constexpr_lut_to_dense", operands, ("weight",))
    states = {"cache": TensorType((1, 2, 64, 64), "float16")} if state else {}
    return Function((operation,), types, states, {})


@pytest.mark.parametrize(
    ("function", "metadata", "told"),
    [
        (palettes("uint4", state=True), {}, True),
        (palettes("uint4", state=True), {VERSION: "9.0"}, True),
        (palettes("uint4", state=True), {VERSION: "8.3.0"}, False),
        (palettes("uint4", state=True), {VERSION: "9.1"}, False),
        (palettes("uint4", state=False), {VERSION: "9.0"}, False),
        (palettes("uint6", state=True), {VERSION: "9.0"}, False),
    ],
)
def test_anyones_are_told(function: Function, metadata: dict[str, str], told: bool) -> None:
    graph = Graph({"main": function}, metadata, "main")
    assert ("palette-states" in rules(graph, without="")) == told
    several = replace(graph, functions={"main": function, "prefill": function})
    found = [each for each in lint_graph(several) if each.lint == "palette-states"]
    assert len(found) == told
