"""Rules that no report has a test for, on graphs made by hand; and the tables of all rules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.planted import rules
from upcycle.program.graph import Function, Graph
from upcycle.program.lints.package import FUNCTION_LINTS, PACKAGE_LINTS, lint_graph
from upcycle.program.operation import Operation, TensorType, Weight

NAMES = [lint.name for lint in (*FUNCTION_LINTS, *PACKAGE_LINTS)]


def half(*shape: int | None) -> TensorType:
    return TensorType(shape, "float16")


def graph_of(*operations: Operation, **types: TensorType) -> Graph:
    return Graph({"main": Function(operations, types, {}, {})}, {}, "main")


def relu(shape: TensorType) -> Graph:
    return graph_of(Operation("relu", {"x": ("x",)}, ("y",)), x=shape, y=shape)


@pytest.mark.parametrize(
    ("shape", "broken"),
    [
        (half(1, 1, 64, 64), set()),
        (half(1, 1, 1, 64, 64), {"rank"}),
        (half(1, 32, 4096, 1), {"padding"}),
        (half(1, 32, 4096, 32), set()),
        (half(1, 1, 1), set()),  # too small to matter
        (TensorType((1, 64), "float32"), {"fp32"}),
        (half(), set()),
        (half(0), set()),
    ],
)
def test_shapes(shape: TensorType, broken: set[str]) -> None:
    assert rules(relu(shape)) == broken


def test_a_tile_of_something_else_is_a_note() -> None:
    tile = Operation("tile", {"x": ("x",), "reps": ("reps",)}, ("y",))
    found = rules(graph_of(tile, x=half(1, 8), y=half(4, 8)), without="")
    assert found == {"other-tile"}


def test_an_integer_cast_is_a_note() -> None:
    cast = Operation("cast", {"x": ("x",), "dtype": ("dtype",)}, ("y",))
    integers = TensorType((1,), "int32")
    assert rules(graph_of(cast, x=half(1), y=integers), without="") == {"integer-cast"}


@pytest.mark.parametrize(("context", "broken"), [(64, False), (96, False), (100, True)])
def test_a_state_has_a_multiple_of_32_positions(context: int, broken: bool) -> None:
    function = Function((), {}, {"cache": half(2, 4, context, 64)}, {})
    assert ("state-size" in rules(Graph({"main": function}, {}, "main"))) == broken


@pytest.mark.parametrize(
    ("one", "other"),
    [("axis-65536", "axis-16384"), ("weights-2GB", "weights-1GB"), ("state-size", "padding"),
     ("state-size", "head-size"), ("kv-tile", "other-tile")],
)  # fmt: skip
def test_one_cause_is_told_once(one: str, other: str) -> None:
    """Whatever the sizes, two rules of one matter never name the same package together."""
    seen = set()
    for size in (16_384, 16_385, 65_536, 65_537, 70_016, 600_000_000, 1_100_000_000):
        file = Weight(2 * size, Path("weight.bin"), 64)
        operations = (
            Operation("const", {}, ("w",)),
            Operation("read_state", {"input": ("cache",)}, ("read",)),
            Operation("relu", {"x": ("read",)}, ("y",)),
            Operation("tile", {"x": ("read",), "reps": ("r",)}, ("tiled",)),
            Operation("matmul", {"x": ("y",), "y": ("tiled",)}, ("z",)),
        )
        for width in (8, 64, 80):
            types = {
                "w": half(size), "r": TensorType((4,), "int32"), "read": half(8, 1, 16_384, width),
                "y": half(1, min(size, 100_000)), "tiled": half(8, 8, 64, width), "z": half(1, 64),
            }  # fmt: skip
            states = {"cache": half(8, 1, 16_384, width)}
            function = Function(operations, types, states, {"w": file})
            found = rules(Graph({"main": function}, {}, "main"), without="")
            assert not {one, other} <= found
            seen |= found
    assert {one, other} & seen


def test_functions_share_their_weights() -> None:
    kind, file = half(1000), Path("weight.bin")
    const = Operation("const", {}, ("w",))
    one = Function((const,), {"w": kind}, {}, {"w": Weight(kind.nbytes, file, 64)})
    other = replace(one, weights={"w": Weight(kind.nbytes, file, 4096)})
    assert rules(Graph({"main": one, "prefill": one}, {}, "main")) == set()
    assert rules(Graph({"main": one, "prefill": other}, {}, "main")) == {"unshared-weights"}


def test_what_the_manifest_promises_must_be_there() -> None:
    counts = ("num_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    decoder = dict.fromkeys((*counts, "value_head_dim"), 1) | {"num_linears": 2, "masks": {}}
    document = {"source": {}, "options": {"context": 64}, "result": {"decoder": decoder}}
    manifest = {"upcycle": json.dumps(document)}
    linear = Operation("linear", {"x": ("x",), "weight": ("w",)}, ("y",))
    conv = Operation("conv", {"x": ("y",), "weight": ("w",)}, ("z",))
    types = {"x": half(1, 4), "y": half(1, 4), "z": half(1, 4)}
    whole = Function((linear, conv), types, {}, {})
    lost = lint_graph(Graph({"main": Function((linear,), types, {}, {})}, manifest, "main"))
    assert [found.what for found in lost if found.lint == "dropped-layers"] == [
        "1 linear layers instead of 2"
    ]
    (found,) = [
        found
        for found in lint_graph(Graph({"main": whole}, manifest, "main"))
        if found.lint == "dropped-layers"
    ]
    assert found.what == "0 cache writes instead of 2"
    del decoder["masks"]
    broken = Graph({"main": whole}, {"upcycle": json.dumps(document)}, "main")
    assert [found.lint for found in lint_graph(broken)] == ["broken-manifest"]


def test_errors_come_first_and_places_are_gathered() -> None:
    tensor = TensorType((1, 1, 1, 1, 64), "float32")
    operations = [Operation("relu", {"x": ("x",)}, (name,)) for name in ("a", "b")]
    function = Function(tuple(operations), {"a": tensor, "b": tensor}, {"s": half(32, 32)}, {})
    found = lint_graph(Graph({"main": function}, {}, "main"))
    assert [each.severity for each in found] == ["error", "warning", "warning"]
    assert {each.lint: each.places for each in found} == {
        "unwritten-state": ("s",),
        "fp32": ("a", "b"),
        "rank": ("a", "b"),
    }


def test_names_are_unique_and_every_rule_has_a_test() -> None:
    assert len(set(NAMES)) == len(NAMES)
    folder = Path(__file__).parent
    tests = [*folder.glob("test_graph_*.py"), *folder.glob("reports/test_*.py")]
    text = "\n".join(path.read_text() for path in tests)
    assert [name for name in NAMES if f'"{name}"' not in text] == []
