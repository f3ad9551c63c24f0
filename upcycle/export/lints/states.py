"""Lints of states: writes that are missing, too large or aliased, and what devices refuse."""

from collections.abc import Iterator

from upcycle.export.graph import Function
from upcycle.export.kv_flow import VIEWS
from upcycle.export.lints.finding import Found, Lint

_MOST_STATES = 2
_MULTIPLE = 32
_COMPUTED_FREELY = VIEWS | {"cast", "transpose"}


def _unwritten(function: Function) -> Iterator[Found]:
    for name, writes in function.state_writes.items():
        if not writes:
            yield name, "the state is never written"


def _too_many(function: Function) -> Iterator[Found]:
    if len(function.states) > _MOST_STATES:
        yield next(iter(function.states)), f"{len(function.states)} states"


def _misaligned(function: Function) -> Iterator[Found]:
    for name, state in function.states.items():
        length = state.shape[-2] if len(state.shape) > 1 else state.shape[-1]
        if length is not None and length % _MULTIPLE:
            yield name, f"its axis before the last has {length} entries"


def _rewritten(function: Function) -> Iterator[Found]:
    for state, _ in function.kv.rewrites:
        yield state, f"all {function.states[state].nbytes:,} B of it are written anew"


def _shifted(function: Function) -> Iterator[Found]:
    for state, value in function.kv.rewrites:
        made = function.producers.get(value)
        while made and made.type in _COMPUTED_FREELY:
            made = function.producers.get(made.inputs["x"][0])
        if made and made.type == "concat":
            yield state, "it is shifted: a slice of it and the new entries, joined"


def _aliased(function: Function) -> Iterator[Found]:
    written = {value for _, value in function.kv.rewrites}
    for name in function.outputs:
        made = function.producers.get(name)
        if written & {name, *(made.operands if made and made.type in VIEWS else ())}:
            yield name, "the output is the very value that replaces a state's content"


def _undeclared(function: Function) -> Iterator[Found]:
    for name in (*function.inputs, *function.states):
        if function.declared and name not in function.declared:
            yield name, "the program reads it, but the package does not declare it"


def _run_time_index(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type == "slice_update" and op.outputs[0] in function.kv.in_place:
            begin = op.inputs.get("begin", ())
            if not function.kv.constants.issuperset(begin):
                yield op.outputs[0], "a state is written at a position that is known at run time"


STATE_LINTS = (
    Lint(
        "unwritten-state",
        "error",
        _unwritten,
        "write it by slice assignment: tracing drops a write at a tensor index, without an error",
    ),
    Lint(
        "undeclared-input",
        "error",
        _undeclared,
        "write the state in the shape in which it is traced: a transpose before the write has "
        "made such packages, which do not load",
    ),
    Lint(
        "many-states",
        "error",
        _too_many,
        "use at most two states per package: with three the Neural Engine fails at prediction",
    ),
    Lint(
        "state-alias",
        "error",
        _aliased,
        "return another tensor: such a package has crashed while it loads",
    ),
    Lint(
        "state-shift",
        "warning",
        _shifted,
        "write in place instead: with tied embeddings the Neural Engine's compiler fails (-14)",
    ),
    Lint(
        "state-rewrite",
        "warning",
        _rewritten,
        "write only the new entries, by slice assignment",
    ),
    Lint(
        "state-size",
        "warning",
        _misaligned,
        "use a context that is a multiple of 32",
    ),
    Lint(
        "run-time-index",
        "note",
        _run_time_index,
        "if a device's compiler fails on it, export with --kv-cache read-only",
    ),
)
