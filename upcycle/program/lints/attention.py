"""Lints of attention: copies of K and V, fused attention, and batches."""

import math
from collections.abc import Iterator

from upcycle.program.graph import Function
from upcycle.program.kv_flow import REFORMS, VIEWS, contracted
from upcycle.program.lints.finding import Found, Lint
from upcycle.program.operation import Operation

_MOVES_NOTHING = VIEWS | {"slice_by_index", "slice_update", "read_state", "split", "tile"}
_FAILING_BATCH = 10  # a GPU gave wrong results from here on
_LONGEST_UPDATE = 64  # tokens per call that stayed on the Neural Engine


def _tiled_kv(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type == "tile" and op.outputs[0] in function.kv.values:
            yield op.outputs[0], f"writes {_size(function, op)} of repeated keys or values"


def _tiled_other(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type == "tile" and op.outputs[0] not in function.kv.values:
            yield op.outputs[0], f"writes {_size(function, op)} that are no keys or values"


def _copied_kv(function: Function) -> Iterator[Found]:
    """Copies that attention reads; what replaces a state is told of the state."""
    replacing = {name for _, value in function.kv.rewrites for name in _behind(function, value)}
    for op in function.operations:
        name = op.outputs[0] if op.outputs else ""
        if (
            name in function.kv.values
            and name not in replacing
            and name not in function.kv.in_place
            and op.type not in _MOVES_NOTHING
            and function.types[name].elements >= _smallest_cache(function)
        ):
            yield name, f"a {op.type} writes {_size(function, op)} of cached keys or values anew"


def _behind(function: Function, name: str) -> Iterator[str]:
    """A value and what it is a view or another layout of."""
    made = function.producers.get(name)
    yield name
    while made and made.type in REFORMS:
        (name,) = made.inputs["x"]
        yield name
        made = function.producers.get(name)


def _fused(function: Function) -> Iterator[Found]:
    for op in function.operations:
        if op.type == "scaled_dot_product_attention":
            queries = function.types[op.inputs["query"][0]].shape[-2]
            yield op.outputs[0], f"fused attention over {queries or 'any number of'} queries"


def _batched(function: Function) -> Iterator[Found]:
    for op in function.kv.contractions:
        batch = max(function.types[name].shape[0] or 0 for name in contracted(op))
        if batch >= _FAILING_BATCH:
            yield op.outputs[0], f"attention over {batch} on the batch axis"


def _long_update(function: Function) -> Iterator[Found]:
    if not function.states:
        return
    for new, whole in function.kv.updates:
        pairs = zip(function.types[new].shape[1:], function.types[whole].shape[1:], strict=False)
        tokens = [part for part, full in pairs if part is not None and part != full]
        if tokens and tokens[-1] > _LONGEST_UPDATE:
            yield new, f"{tokens[-1]} tokens per call go into a state"


def _size(function: Function, op: Operation) -> str:
    shape = [size or "?" for size in function.types[op.outputs[0]].shape]
    return f"{function.types[op.outputs[0]].nbytes:,} B {shape}".replace("'", "")


def _smallest_cache(function: Function) -> int:
    """Elements of one layer's keys, the least that counts as a copy of the cache."""
    sizes = [math.prod(size or 1 for size in state.shape[1:]) for state in function.states.values()]
    sizes += [function.types[name].elements for name in function.kv.cache_inputs]
    return min(sizes, default=0)


ATTENTION_LINTS = (
    Lint(
        "kv-tile",
        "error",
        _tiled_kv,
        "fold the query heads of a group into rows instead (`upcycle export --attention qfold`)",
    ),
    Lint(
        "kv-copy",
        "warning",
        _copied_kv,
        "keep past and new keys apart (split softmax) and in the layout that attention reads",
    ),
    Lint("other-tile", "note", _tiled_other, "none needed while it is small"),
    Lint(
        "fused-attention",
        "warning",
        _fused,
        "decompose it into matmul and softmax: two or more fused ones have sent whole models to "
        "the CPU, and in fp16 with several queries have crashed there",
    ),
    Lint(
        "attention-batch",
        "warning",
        _batched,
        "put heads on another axis than the first: from 10 on a GPU has given wrong results",
    ),
    Lint(
        "long-update",
        "warning",
        _long_update,
        "prefill at most 64 tokens per call: longer ones have left the Neural Engine",
    ),
)
