"""The attention shape of a Core ML function that does not say what model it is."""

import math

from upcycle.program.graph import Function
from upcycle.program.operation import Operation


def inferred_shape(function: Function) -> dict[str, int] | None:
    """L, H, g, d + e, C and T (tokens per call), found in the program; None where it is unclear.

    Each K or V that goes into a cache makes one update, so L is half their number, and an update
    differs from its cache in the axis of positions, T against C. Attention over the cache takes
    T·H·C·(d+e) products per layer, and a position of it has g·(d+e) elements: that gives H.
    Key and value heads are taken as equally wide.
    """
    updates = [_positions(function, new, whole) for new, whole in function.kv.updates]
    found = {each for each in updates if each is not None}
    cached = [op for op in function.kv.contractions if _attends_to_cache(function, op)]
    lengths = {_inner_length(function, op) for op in cached}
    if not function.is_static or None in updates or len(updates) % 2 or len(found) != 1:
        return None
    ((tokens, context, per_position),) = found
    # A graph that joins past and new attends over C + T positions.
    head_dim = min(lengths - {context, context + tokens}, default=context)
    num_layers = len(updates) // 2
    products = sum(_products(function, op) for op in cached)
    groups, odd = divmod(per_position, head_dim)
    per_head = num_layers * tokens * 2 * head_dim
    heads = next(
        (
            products // (per_head * positions)
            for positions in (context, context + tokens)
            if products % (per_head * positions) == 0
        ),
        0,
    )
    if odd or not groups or not heads or heads % groups:
        return None
    return {
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dims": 2 * head_dim,
        "context": context,
        "tokens": tokens,
    }


def _positions(function: Function, new: str, whole: str) -> tuple[int, int, int] | None:
    """T, C, and the elements of one position, of an update and its cache."""
    parts, full = function.types[new], function.types[whole].shape
    axes = [
        (part, size)
        for part, size in zip(parts.shape[1:], full[1:], strict=False)
        if part is not None and size is not None and part != size
    ]
    if len(axes) != 1:
        return None
    tokens, context = axes[0]
    return tokens, context, parts.elements // tokens


def _inner_length(function: Function, op: Operation) -> int:
    """How many products a contraction adds up for each of its results."""
    if op.type == "matmul":
        axis = -2 if function.literal(op, "transpose_x") == (True,) else -1
        return function.types[op.inputs["x"][0]].shape[axis] or 0
    key = "query" if op.type == "scaled_dot_product_attention" else "values"
    return function.types[op.inputs[key][0]].shape[-1] or 0


def _attends_to_cache(function: Function, op: Operation) -> bool:
    return bool(function.kv.values.intersection(op.operands))


def _products(function: Function, op: Operation) -> int:
    """Products of two numbers that a contraction takes."""
    if op.type == "scaled_dot_product_attention":
        query, key = (function.types[op.inputs[name][0]] for name in ("query", "key"))
        return 2 * query.elements * (key.shape[-2] or 0)
    results = math.prod(size or 0 for size in function.types[op.outputs[0]].shape)
    return results * _inner_length(function, op)
