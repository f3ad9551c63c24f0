"""Lints of shapes and of compressed weights."""

import math
from collections.abc import Callable, Iterator

from upcycle.program.graph import Function
from upcycle.program.lints.finding import Found, Lint

_HIGHEST_RANK = 4
_ROW_BYTES = 64
_MOST_PADDING = 2**20
_LONGEST = 65_536
_BLOCKED = "constexpr_blockwise_shift_scale"
_PALETTE = "constexpr_lut_to_dense"


def _dynamic(function: Function) -> Iterator[Found]:
    for name in (*function.inputs, *function.states):
        tensor = function.states.get(name) or function.types[name]
        if None in tensor.shape:
            declared = function.declared.get(name)
            yield name, f"its shape is {declared}" if declared else "its shape is dynamic"


def _high_rank(function: Function) -> Iterator[Found]:
    for op in function.operations:
        for name in op.outputs:
            rank = len(function.types[name].shape)
            if rank > _HIGHEST_RANK and op.type != "const" and not _is_constexpr(op.type):
                yield name, f"{op.type} of rank {rank}"


def _padded(function: Function) -> Iterator[Found]:
    """Rows take whole lines of 64 bytes: a last axis of one fp16 element costs 32 times as much.

    What lies in a state is told of the state (`state-size`).
    """
    in_states = function.kv.in_place if function.states else frozenset()
    for op in function.operations:
        if op.type == "const" or _is_constexpr(op.type):
            continue
        for name in (name for name in op.outputs if name not in in_states):
            tensor = function.types[name]
            row = (tensor.shape[-1] or 0) * tensor.bits // 8 if tensor.shape else 0
            if 0 < row < _ROW_BYTES:
                padding = tensor.nbytes // row * (_ROW_BYTES - row)
                if padding >= _MOST_PADDING:
                    yield name, f"{padding:,} B of padding: its last axis has {row} B"


def _longer_than(limit: int, up_to: float = math.inf) -> Callable[[Function], Iterator[Found]]:
    def check(function: Function) -> Iterator[Found]:
        for op in function.operations:
            for name in () if op.type == "const" else op.outputs:
                longest = max((size or 0 for size in function.types[name].shape), default=0)
                if limit < longest <= up_to:
                    yield name, f"a {op.type} with an axis of {longest:,}"

    return check


def _per_block(function: Function) -> Iterator[Found]:
    """Scales that change along an input axis, or palettes that change along two axes."""
    for op in function.operations:
        if op.type == _BLOCKED:
            scale = function.types[op.inputs["scale"][0]].shape
            if any((size or 1) > 1 for size in scale[1:]):
                yield op.outputs[0], f"scales {list(scale)}"
        elif op.type == _PALETTE:
            groups = function.types[op.inputs["lut"][0]].shape[:-2]
            if sum((size or 1) > 1 for size in groups) > 1:
                yield op.outputs[0], f"palettes {list(groups)}"


def _is_constexpr(kind: str) -> bool:
    return kind.startswith("constexpr_")


SHAPE_LINTS = (
    Lint(
        "dynamic-shape",
        "warning",
        _dynamic,
        "make one function per number of tokens: flexible shapes stay off the Neural Engine, and "
        "with states they have failed to load",
    ),
    Lint(
        "rank",
        "warning",
        _high_rank,
        "reshape to rank 4: higher ranks have failed at run time",
    ),
    Lint(
        "padding",
        "warning",
        _padded,
        "give the last axis at least 32 elements of fp16",
    ),
    Lint(
        "axis-65536",
        "warning",
        _longer_than(_LONGEST),
        "split it (an output layer into several): reports of the Neural Engine's limit differ, "
        "and this is beyond all of them",
    ),
    Lint(
        "axis-16384",
        "note",
        _longer_than(16_384, _LONGEST),
        "split it if the Neural Engine refuses: reports of its limit say 16,384 or 65,536",
    ),
    Lint(
        "per-block",
        "warning",
        _per_block,
        "use grouped palettes or per-channel scales: per-block ones run on the CPU or GPU, or "
        "give wrong results on the Neural Engine",
    ),
)
