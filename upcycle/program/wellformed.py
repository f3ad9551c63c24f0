"""What every reader of a program relies on: operations have the operands that their types need."""

from collections.abc import Iterator
from pathlib import Path

from upcycle.errors import ExportError
from upcycle.program.graph import Function
from upcycle.program.kv_flow import VIEWS
from upcycle.program.operation import Operation

_BINARY = ("add", "mul", "pow", "real_div", "sub")
_UNARY = (
    "cast", "cos", "l2_norm", "reduce_l2_norm", "reduce_mean", "reduce_sum", "reduce_sum_square",
    "sin", "square", "transpose", *VIEWS,
)  # fmt: skip
# Operands without which MIL does not take an operation, of those that lints and counts look at.
_NEEDED = {
    **dict.fromkeys(_BINARY, ("x", "y")),
    **dict.fromkeys(_UNARY, ("x",)),
    "concat": ("values",),
    "constexpr_blockwise_shift_scale": ("data", "scale"),
    "constexpr_lut_to_dense": ("indices", "lut"),
    "einsum": ("values",),
    "gather": ("x", "indices"),
    "linear": ("x", "weight"),
    "matmul": ("x", "y"),
    "read_state": ("input",),
    "scaled_dot_product_attention": ("query", "key", "value"),
    "slice_by_index": ("x", "begin", "end"),
    "slice_update": ("x", "update", "begin", "end"),
    "split": ("x",),
    "tile": ("x", "reps"),
    "write_state": ("input", "data"),
}
_RESULTS = {"read_state": 1, "write_state": 0}
_OF_STATES = ("read_state", "write_state")
# How many axes an operand of attention has at least.
_FACTORS = ("x", "y", "values", "query", "key", "value")
_LEAST_RANK = {"einsum": 1, "matmul": 1, "scaled_dot_product_attention": 3}


def check_wellformed(name: str, function: Function, package: Path) -> None:
    """See that a function can be read.

    Args:
        name: of the function.
        function: as its package has it.
        package: for the error.

    Raises:
        ExportError: it reads what nothing makes, or an operation lacks an operand or a result, has
            one twice, or takes a state for a value.
    """
    for problem in _problems(function):
        raise ExportError(problem, where=f"{package}, function {name!r}", fix="make it again")


def _problems(function: Function) -> Iterator[str]:
    if not function.operations:
        yield "the program has a function without operations"
    made = {*function.types, *function.states}
    read = {name for op in function.operations for name in op.operands}.union(function.outputs)
    if unknown := read - made:
        yield f"the program reads {min(unknown)!r}, which nothing in it makes"
    results = [name for op in function.operations for name in op.outputs]
    if len(results) > len(set(results)):
        twice = next(name for name in results if results.count(name) > 1)
        yield f"the program makes {twice!r} twice"
    if taken := [name for name in function.outputs if name not in function.types]:
        yield f"the program gives the state {taken[0]!r} as an output"
    for op in function.operations:
        yield from _problems_of(function, op)


def _problems_of(function: Function, op: Operation) -> Iterator[str]:
    what = f"the operation {op.type!r} of {op.outputs[0]!r}" if op.outputs else f"a {op.type!r}"
    if (count := len(op.outputs)) != _RESULTS.get(op.type, count or 1):
        yield f"{what} has {count} results instead of {_RESULTS.get(op.type, 1)}"
    for key in _NEEDED.get(op.type, ()):
        if not op.inputs.get(key):
            yield f"{what} has no operand {key!r}"
    for key, names in op.inputs.items():
        is_state = key == "input" and op.type in _OF_STATES
        if wrong := [name for name in names if (name in function.states) != is_state]:
            kind = "no state" if is_state else "a state"
            yield f"{what} has {wrong[0]!r} as {key!r}, which is {kind}"
        rank = _LEAST_RANK.get(op.type, 0)
        if rank and key in _FACTORS:
            short = [name for name in names if len(function.types[name].shape) < rank]
            if short:
                yield f"{what} has {short[0]!r} as {key!r}, which has too few axes"
