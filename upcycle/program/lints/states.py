"""Lints of states: writes that are missing, too large or aliased, and what devices refuse."""

from collections.abc import Iterator

from upcycle.program.graph import Function
from upcycle.program.kv_flow import REFORMS, VIEWS
from upcycle.program.lints.finding import Found, Lint

_MOST_STATES = 2
_MULTIPLE = 32
_NO_MULTIPLE = f"no multiple of {_MULTIPLE}"


def _unwritten(function: Function) -> Iterator[Found]:
    for name, writes in function.state_writes.items():
        if not writes:
            yield name, "the state is never written"


def _too_many(function: Function) -> Iterator[Found]:
    if len(function.states) > _MOST_STATES:
        yield next(iter(function.states)), f"{len(function.states)} states"


def _misaligned(function: Function) -> Iterator[Found]:
    """The last two axes of a state, which are laid out in memory; those before may be of any size.

    A state of 8 planes of 256 x 256 ran on the Neural Engine, and one of 270 x 270 did not.
    """
    for name, state in function.states.items():
        odd = [size for size in state.shape[-2:] if size not in (None, 1) and size % _MULTIPLE]
        if odd:
            of = [size or "?" for size in state.shape]
            yield name, f"{' and '.join(map(str, odd))} of its axes {of} {_NO_MULTIPLE}"


def _misaligned_heads(function: Function) -> Iterator[Found]:
    for name in () if function.states else function.kv.cache_inputs:
        width = function.types[name].shape[-1]
        if width is not None and width % _MULTIPLE:
            yield name, f"heads of {width} channels: {_NO_MULTIPLE}"


def _rewritten(function: Function) -> Iterator[Found]:
    shifted = {state for state, _ in _shifted(function)}
    for state, _ in function.kv.rewrites:
        if state not in shifted:
            yield state, f"all {function.states[state].nbytes:,} B of it are written anew"


def _shifted(function: Function) -> Iterator[Found]:
    for state, value in function.kv.rewrites:
        made = function.producers.get(value)
        while made and made.type in REFORMS:
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
        "use a context that is a multiple of 32; heads that are none stay: export those with "
        "--kv-cache read-only, which has no states, if the Neural Engine fails (coremltools#2631)",
    ),
    Lint(
        "head-size",
        "note",
        _misaligned_heads,
        "none known; if it leaves the Neural Engine, take another model",
    ),
    Lint(
        "run-time-index",
        "note",
        _run_time_index,
        "if a device's compiler fails on it, export with --kv-cache read-only",
    ),
)
