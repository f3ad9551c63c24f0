"""Programs that ask for what is not there: a failed check or a refusal, never our own bug."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from tests.export.mutations import block_of, functions_of, mutate
from tests.tiny import tiny_checkpoint
from upcycle.cli import check_export as _check  # noqa: F401 - registers the command
from upcycle.cli import graph as _graph  # noqa: F401
from upcycle.cli.app import app
from upcycle.export.coreml import export_coreml
from upcycle.interpreter.arguments import ProgramError
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.program.graph import Function, Graph
from upcycle.program.operation import Operation, TensorType
from upcycle.program.specification import read_specification, write_specification

CONTEXT = 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unrunnable") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def package(source: Path) -> Path:
    output = source.with_name("model.mlpackage")
    return export_coreml(source, output, ExportOptions(context=CONTEXT, prefill=4)).package


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    """The package alone, without the folder beside it."""
    return shutil.copytree(package, tmp_path / package.name)


def check(source: Path, package: Path) -> Result:
    arguments = ["check-export", str(source), str(package), "--tokens", "4", "--json"]
    return CliRunner().invoke(app, arguments)


def failures(done: Result) -> list[str]:
    """The details of the checks that the program runs, which failed."""
    assert done.exit_code == 1, done.output
    checks = json.loads(done.stdout)["checks"]
    return [each["detail"] for each in checks if each["name"].endswith(": the program runs")]


def damage(package: Path, change: Callable[[Any], None]) -> None:
    """Change every function of a package."""
    model = read_specification(package)
    for function in functions_of(model):
        change(function)
    write_specification(package, model)


def first(function: Any, kind: str) -> Any:
    return next(op for op in block_of(function).operations if op.type == kind)


def test_a_write_beyond_the_end_of_the_cache_fails_the_check(source: Path, copy: Path) -> None:
    """The position is taken 40 further: slots 40 .. of 32."""

    def later(function: Any) -> None:
        block = block_of(function)
        update = first(function, "slice_update")
        joined = {op.outputs[0].name: op for op in block.operations if op.type == "concat"}
        for key in ("begin", "end"):
            values = joined[update.inputs[key].arguments[0].name].inputs["values"]
            place = values.arguments[2].name
            operations = list(block.operations)
            index = next(
                i for i, op in enumerate(operations)
                if op.outputs and op.outputs[0].name == update.inputs[key].arguments[0].name
            )  # fmt: skip
            made = type(update)()
            made.CopyFrom(
                next(op for op in operations if op.outputs and op.outputs[0].name == place)
            )
            added = type(update)(type="add")
            added.inputs["x"].arguments.add().name = place
            value = added.inputs["y"].arguments.add().value
            value.CopyFrom(constant_value(40))
            added.outputs.add().CopyFrom(made.outputs[0])
            added.outputs[0].name = f"later_{key}"
            values.arguments[2].name = added.outputs[0].name
            del block.operations[:]
            block.operations.extend([*operations[:index], added, *operations[index:]])

    damage(copy, later)
    details = failures(check(source, copy))
    assert len(details) == 2  # in fp32 and in fp16
    for detail in details:
        assert re.match(
            r"function '(main|prefill)', operation 'slice_update', value '\w+': ", detail
        )
        assert re.search(r"names the slots \d+ \.\. \d+ of axis 2, which has 0 \.\. 31", detail)


def constant_value(number: int) -> Any:
    """A MIL value of one int32."""
    from upcycle.program.specification import _model_message

    program = type(_model_message().mlProgram)()
    value = program.functions["f"].block_specializations["b"].operations.add().attributes["v"]
    value.type.tensorType.dataType = 23  # INT32
    value.type.tensorType.rank = 1
    value.type.tensorType.dimensions.add().constant.size = 1
    value.immediateValue.tensor.ints.values.append(number)
    return value


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_damaged_is_a_failed_check_or_refused(
    source: Path, package: Path, copy: Path, seed: int
) -> None:
    model = read_specification(package)
    what = mutate(model, seed)
    write_specification(copy, model)
    for done in (check(source, copy), CliRunner().invoke(app, ["graph", str(copy)])):
        assert done.exit_code in (0, 1, 2), (what, done.output)
        if done.exit_code == 2:
            assert len(done.stderr.splitlines()) == 3


def test_an_update_of_a_state_with_a_second_result(source: Path, copy: Path) -> None:
    def more(function: Any) -> None:
        update = first(function, "slice_update")
        added = update.outputs.add()
        added.CopyFrom(update.outputs[0])
        added.name = "second"

    damage(copy, more)
    details = failures(check(source, copy))
    assert len(details) == 2  # in fp32 and in fp16
    assert all("it has 1 results, and 2 are declared" in detail for detail in details)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1400, 50))
def test_many_damages_are_failed_checks_or_refused(
    source: Path, package: Path, copy: Path, start: int
) -> None:
    for seed in range(start, start + 50):
        test_whatever_is_damaged_is_a_failed_check_or_refused(source, package, copy, seed)


FLOATS = TensorType((2, 3, 4), "float32")


def run(kind: str, operands: dict[str, Any], result: TensorType) -> torch.Tensor:
    """One operation as a program; operands are arrays, or a word."""
    operations, types, literals = [], {"y": result}, {}
    inputs = {}
    for key, value in operands.items():
        parts = value if isinstance(value, tuple) else (value,)
        inputs[key] = tuple(f"{key}{i}" for i in range(len(parts)))
        for name, part in zip(inputs[key], parts, strict=True):
            array = np.asarray(part)
            word = isinstance(part, str)
            types[name] = TensorType(
                () if word else array.shape, "string" if word else str(array.dtype)
            )
            literals[name] = (part,) if word else tuple(array.reshape(-1).tolist())
            operations.append(Operation("const", {}, (name,)))
    operations.append(Operation(kind, inputs, ("y",)))
    function = Function(tuple(operations), types, {}, {}, (), ("y",), literals)
    return Interpreter(Loaded(Graph({"main": function}, {}, "main")), half=False).run("main", {})[
        "y"
    ]


X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
ONE = np.int32([0, 0, 0])


@pytest.mark.parametrize(
    ("kind", "operands", "result", "what"),
    [
        (
            "slice_update",
            {"x": X, "update": X[:, :1], "begin": np.int32([0, 3, 0]), "end": np.int32([2, 4, 4])},
            FLOATS,
            "it names the slots 3 .. 3 of axis 1, which has 0 .. 2",
        ),
        (
            "slice_update",
            {"x": X, "update": X[:, :1], "begin": ONE, "end": np.int32([2, 2, 4])},
            FLOATS,
            "an update of shape [2, 1, 4] does not fit the part [2, 2, 4] that it replaces",
        ),
        (
            "slice_by_index",
            {"x": X, "begin": np.int32([0, 2, 0]), "end": np.int32([2, 4, 4])},
            TensorType((2, 2, 4), "float32"),
            "its result has the shape [2, 1, 4], and [2, 2, 4] is declared (begin [0, 2, 0], end",
        ),
        (
            "slice_by_index",
            {"x": X, "begin": np.int32([0, 9, 0]), "end": np.int32([2, 10, 4]),
             "squeeze_mask": np.bool_([False, True, False])},
            TensorType((2, 4), "float32"),
            "it names the slots 9 .. 9 of axis 1, which has 0 .. 2",
        ),
        (
            "slice_by_index",
            {"x": X, "begin": ONE, "end": np.int32([2, 3, 4]), "stride": np.int32([1, 0, 1])},
            FLOATS,
            "its stride on axis 1 is 0",
        ),
        (
            "slice_by_index",
            {"x": X, "begin": np.int32([0, 0]), "end": np.int32([2, 3])},
            FLOATS,
            "its operand 'begin' has 2 numbers for 3 axes",
        ),
        (
            "slice_by_size",
            {"x": X, "begin": ONE, "size": np.int32([2, 5, 4])},
            TensorType((2, 5, 4), "float32"),
            "it names the slots 0 .. 4 of axis 1, which has 0 .. 2",
        ),
        (
            "slice_by_size",
            {"x": X, "begin": ONE, "size": np.int32([2, -3, 4])},
            FLOATS,
            "it names the slots 0 .. -4 of axis 1, which has 0 .. 2",
        ),
        (
            "gather",
            {"x": X, "indices": np.int32([3]), "axis": np.int32(1)},
            TensorType((2, 1, 4), "float32"),
            "an index of 3 .. 3 is outside 0 .. 2",
        ),
        (
            "gather_nd",
            {"x": X, "indices": np.int32([[1, 7]])},
            TensorType((1, 4), "float32"),
            "an index of 7 .. 7 is outside 0 .. 2",
        ),
        (
            "scatter_nd",
            {"data": X, "indices": np.int32([[2]]), "updates": X[:1], "mode": "update"},
            FLOATS,
            "an index of 2 .. 2 is outside 0 .. 1",
        ),
        (
            "scatter_nd",
            {"data": X, "indices": np.int32([[1], [1]]), "updates": X, "mode": "update"},
            FLOATS,
            "it gives one element two values, in no order",
        ),
        ("scatter_nd", {"data": X, "indices": np.int32([[1]]), "updates": X[:1], "mode": "swap"},
         FLOATS, "its mode is 'swap'"),
        ("reshape", {"x": X, "shape": np.int32([5, 5])}, TensorType((5, 5), "float32"),
         "it cannot be evaluated: shape '[5, 5]' is invalid for input of size 24"),
        ("tile", {"x": X, "reps": np.int32([10**5, 10**4, 1])}, FLOATS,
         "its result has the shape [200000, 30000, 4], and [2, 3, 4] is declared"),
        ("tile", {"x": X, "reps": np.int32([1, 2])}, FLOATS,
         "its operand 'reps' has 2 numbers for 3 axes"),
        ("fill", {"shape": np.int32([10**6, 10**6]), "value": np.float32(1)}, FLOATS,
         "its result has the shape [1000000, 1000000], and [2, 3, 4] is declared"),
        ("pad", {"x": X, "pad": np.int32([0, 2 * 10**9])}, FLOATS,
         "its result has the shape [2, 3, 2000000004], and [2, 3, 4] is declared"),
        ("one_hot", {"indices": np.int32([0]), "one_hot_vector_size": np.int32(2 * 10**9)}, FLOATS,
         "its result has the shape [1, 2000000000], and [2, 3, 4] is declared"),
        ("range_1d", {"start": np.int32(0), "end": np.int32(2 * 10**9), "step": np.int32(1)},
         FLOATS, "its result has the shape [2000000000], and [2, 3, 4] is declared"),
        ("range_1d", {"start": np.int32(0), "end": np.int32(4), "step": np.int32(0)},
         TensorType((4,), "int32"), "it cannot be evaluated: division by zero"),
        ("floor_div", {"x": np.int32([4]), "y": np.int32([0])}, TensorType((1,), "int32"),
         "it cannot be evaluated: ZeroDivisionError"),
        ("add", {"x": X, "y": np.ones((5, 4), np.float32)}, FLOATS, "it cannot be evaluated: "),
        ("add", {"x": X}, FLOATS, "it has no operand 'y'"),
        ("add", {"x": X, "y": "word"}, FLOATS, "its operand 'y' is the word 'word'"),
        ("add", {"x": X, "y": np.ones((7, 1, 1, 1), np.float32)}, FLOATS,
         "its result has the shape [7, 2, 3, 4], and [2, 3, 4] is declared"),
        ("matmul", {"x": X, "y": X}, FLOATS, "it cannot be evaluated: "),
        ("linear", {"x": X, "weight": np.ones((5, 3), np.float32)}, FLOATS,
         "it cannot be evaluated: "),
        ("transpose", {"x": X, "perm": np.int32([0, 0, 1])}, FLOATS, "it cannot be evaluated: "),
        ("concat", {"values": (X, X[0]), "axis": np.int32(0)}, FLOATS, "it cannot be evaluated: "),
        ("split", {"x": X, "num_splits": np.int32(2), "axis": np.int32(0)}, FLOATS,
         "it has 2 results, and 1 are declared"),
        ("softmax", {"x": X, "axis": np.int32(7)}, FLOATS, "it cannot be evaluated: Dimension out"),
        ("gelu", {"x": X, "mode": np.int32(1)}, FLOATS, "its operand 'mode' is not a word"),
    ],
)  # fmt: skip
def test_an_operation_that_asks_for_too_much_is_named(
    kind: str, operands: dict[str, Any], result: TensorType, what: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        run(kind, operands, result)
    assert caught.value.where == f"function 'main', operation {kind!r}, value 'y'"
    assert caught.value.what.startswith(what)


def test_what_is_there_is_computed() -> None:
    """The harness above can pass: the same operations within their bounds."""
    update = {"x": X, "update": -X[:, :1], "begin": np.int32([0, 2, 0]), "end": np.int32([2, 3, 4])}
    found = run("slice_update", update, FLOATS)
    assert torch.equal(found[:, 2], -torch.from_numpy(X[:, 0]))
    assert torch.equal(run("add", {"x": X, "y": X}, FLOATS), torch.from_numpy(2 * X))
