"""apple/coremltools#2631: a state whose axes are no multiple of 32 fails on the Neural Engine.

A state of 270 x 270 failed where one of 256 x 256 ran, both in 8 planes of 1: the axes in front may
be of any size, the last two not.
"""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.export.planted import SliceWrite, hidden, plant, position, rules
from tests.tiny import tiny_checkpoint
from upcycle.cli import export as _export  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.program.graph import Function, Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.operation import TensorType
from upcycle.program.reading import read_graph


@pytest.mark.parametrize(
    ("shape", "odd"),
    [
        ((1, 8, 256, 256), None),
        ((1, 8, 270, 270), "270 and 270 of its axes [1, 8, 270, 270] no multiple of 32"),
        ((1, 8, 64, 270), "270 of its axes [1, 8, 64, 270] no multiple of 32"),
        ((1, 2, 64, 80), "80 of its axes [1, 2, 64, 80] no multiple of 32"),
        ((1, 2, 100, 64), "100 of its axes [1, 2, 100, 64] no multiple of 32"),
        ((30, 3, 2048, 64), None),
        ((33, 80), "33 and 80 of its axes [33, 80] no multiple of 32"),
        ((80,), "80 of its axes [80] no multiple of 32"),
        ((1, 1024, 1, 64), None),  # channels first, with an axis of one in between
        ((), None),
    ],
)
def test_the_last_two_axes_are_looked_at(shape: tuple[int, ...], odd: str | None) -> None:
    function = Function((), {}, {"cache": TensorType(shape, "float16")}, {})
    found = lint_graph(Graph({"main": function}, {}, "main"))
    assert [each.what for each in found if each.lint == "state-size"] == ([odd] if odd else [])


def test_a_package_of_anyone_is_warned_of(tmp_path: Path) -> None:
    shape = (1, 2, 48, 32)
    graph = plant(tmp_path, SliceWrite(shape, shape), {"x": hidden(), "position": position()})
    assert "state-size" in rules(graph)


@pytest.mark.parametrize(
    ("head_dim", "kv_cache", "expected"),
    [
        (80, "state", {"state-size"}),
        (80, "read-only", {"head-size"}),
        (64, "state", set()),
        (64, "read-only", set()),
    ],
)
def test_ours_with_heads_of_80_are_told(
    tmp_path: Path, head_dim: int, kv_cache: str, expected: set[str]
) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    source = tiny_checkpoint(tmp_path / "source", head_dim=head_dim, dtype=torch.float16, **heads)
    output = tmp_path / "model.mlpackage"
    options = ["--context", "64", "--kv-cache", kv_cache]
    done = CliRunner().invoke(app, ["export", str(source), str(output), *options, "--json"])
    assert done.exit_code == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert {note.partition(":")[0] for note in notes} == expected
    found = rules(read_graph(output), without="")
    assert found & {"state-size", "head-size"} == expected
