"""Lints of arithmetic: what overflows or loses its precision in fp16, and what is not fp16."""

import math
from collections.abc import Iterator

from upcycle.program.graph import Function
from upcycle.program.kv_flow import VIEWS
from upcycle.program.lints.finding import Found, Lint
from upcycle.program.operation import Operation
from upcycle.program.values import LARGEST_FP16
from upcycle.program.weight_file import largest_magnitude

_COMPUTES_NOTHING = {"cast", "const", "identity"}
_BOUNDS = {"clip", "equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum"}
_SCALES = {"mul", "real_div"}
_SUMS = {"reduce_mean", "reduce_sum"}
_SUMS_OF_SQUARES = {"reduce_sum_square", "reduce_l2_norm", "l2_norm"}
_ADDS = {"add", "select", "sub"}  # what a mask goes through


def _beyond_half(function: Function) -> Iterator[Found]:
    """Constants that are computed with; an infinite bound of a `clip` is harmless."""
    used = {name for op in function.operations if op.type not in _BOUNDS for name in op.operands}
    for name in function.literals:
        numbers = [abs(value) for value in function.literals[name] if isinstance(value, float)]
        if name in used and not all(number <= LARGEST_FP16 for number in numbers):
            yield name, f"a constant of magnitude {max(numbers, key=_nan_last):g}"
    masks = {
        name
        for op in function.operations
        if op.type in _ADDS
        for name in op.operands
        if name in function.weights and function.types[name].dtype in ("float16", "float32")
    }
    for name in sorted(masks):
        largest = largest_magnitude(function.weights[name], function.types[name].dtype)
        if not largest <= LARGEST_FP16:
            yield name, f"a constant of magnitude {largest:g}"


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _naive_norm(function: Function) -> Iterator[Found]:
    for op in function.operations:
        squared = _squared(function, op)
        if squared and _is_half(function, squared) and not _is_scaled(function, squared):
            yield op.outputs[0], "sums squares of fp16 values, infinite once one reaches 256"


def _squared(function: Function, op: Operation) -> str | None:
    """What an operation sums the squares of, if it does."""
    if op.type in _SUMS_OF_SQUARES:
        return op.inputs["x"][0]
    made = function.producers.get(op.inputs["x"][0]) if op.type in _SUMS else None
    if made is None:
        return None
    if made.type == "square" or (made.type == "pow" and function.literal(made, "y") == (2.0,)):
        return made.inputs["x"][0]
    if made.type == "mul" and made.inputs["x"] == made.inputs["y"]:
        return made.inputs["x"][0]
    return None


def _is_half(function: Function, name: str) -> bool:
    return function.types[name].dtype == "float16"


def _is_scaled(function: Function, name: str) -> bool:
    """Whether a value was just multiplied or divided by something."""
    made = function.producers.get(name)
    while made and made.type in VIEWS:
        name = made.inputs["x"][0]
        made = function.producers.get(name)
    return made is not None and made.type in _SCALES


def _half_angles(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type in ("cos", "sin") and _is_half(function, op.inputs["x"][0]):
            yield op.outputs[0], f"the {op.type} of an angle in fp16"


def _single_precision(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type in _COMPUTES_NOTHING or op.type in VIEWS or not op.outputs:
            continue
        if function.types[op.outputs[0]].dtype == "float32":
            yield op.outputs[0], f"a {op.type} in fp32"


def _integer_casts(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type == "cast" and function.types[op.outputs[0]].dtype.startswith("int"):
            yield op.outputs[0], f"a cast to {function.types[op.outputs[0]].dtype}"


NUMBER_LINTS = (
    Lint(
        "beyond-fp16",
        "error",
        _beyond_half,
        f"keep masks finite, such as -4e4: fp16 ends at {LARGEST_FP16:,}, and a row of -inf makes "
        "NaN",
    ),
    Lint(
        "fp16-angles",
        "error",
        _half_angles,
        "make tables of cosines and sines in fp32: at position 4,095 fp16 is off by up to 0.98",
    ),
    Lint(
        "naive-norm",
        "warning",
        _naive_norm,
        "scale by the largest magnitude first, as `upcycle export` does; it changes no result",
    ),
    Lint(
        "fp32",
        "warning",
        _single_precision,
        "convert with fp16 precision: the Neural Engine does not compute in fp32",
    ),
    Lint("integer-cast", "note", _integer_casts, "none needed for indices"),
)
