"""Grouped-query attention that never copies K or V (Q-fold), and the one that does, to compare.

The n query heads of a group become n rows against their shared KV head: for a query of shape
[B, H, T, d], row-major order over (group, member, position) makes [B, H, T, d] and [B, g, n*T, d]
the same memory, so a reshape folds the members into the rows and another unfolds the scores.
The ranks stay at 4, and no `repeat_kv` (Core ML: `tile`) is left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.options.attention_forms import FORMS

if TYPE_CHECKING:
    from torch import nn

# Passed along by transformers' models. They have no effect over a ready mask and cache: what a
# sliding window hides, the mask hides.
_WITHOUT_EFFECT = {"position_ids", "sliding_window", "use_cache"}


class Call(NamedTuple):
    """What a layer gave to attention: its class, and keys and values [B, g, C, ..]."""

    layer: str
    key: Tensor
    value: Tensor


class Segments:
    """Keys or values that lie apart, such as the past's and the new tokens', and stay apart.

    A cache whose `update` returns it gives attention the scores of all of them, side by side,
    without a copy of what they are of.

    Args:
        parts: each [B, g, C_i, d].
    """

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts


def qfold_attention(
    module: "nn.Module",
    query: Tensor,
    key: Tensor | Segments,
    value: Tensor | Segments,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' `AttentionInterface`; query head h reads KV head h // (H / g).

    Args:
        module: the attention layer, named in errors.
        query: [B, H, T, d].
        key: [B, g, C, d], or segments of it.
        value: [B, g, C, e], or segments of the same lengths.
        attention_mask: additive, [B or 1, 1, T, C]; may be None only for T = 1.
        scaling: factor of the scores.
        dropout: must be 0: this is for inference.
        softcap: bound of the scores by softcap * tanh(scores / softcap), or None (Gemma 2).
        s_aux: [H], a score per head that takes its share of the softmax and has no value, or None
            (the attention sinks of gpt-oss).
        others: what the model passes beside; only arguments without effect are accepted.

    Returns:
        [B, T, H, e], and no attention weights.

    Raises:
        ExportError: the model's attention has a feature that is not expressed here, or no mask
            came with more than one query (attention would silently see the future).
    """
    refuse_unknown(module, others, dropout)
    keys, values = _parts(key), _parts(value)
    batch, heads, queries, _ = query.shape
    groups = keys[0].shape[1]
    members = heads // groups
    rows = members * queries

    # Scaling the query instead of the scores keeps them in the range of fp16.
    folded = (query * scaling).reshape(batch, groups, rows, -1)
    scores = _joined([torch.matmul(folded, part.transpose(2, 3)) for part in keys])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if queries > 1 and attention_mask is None:
        raise ExportError(
            f"attention over {int(queries)} queries got no mask and would see the future",
            where=type(module).__name__,
            fix="pass an additive mask of shape [batch, 1, queries, context]",
        )
    if attention_mask is not None:
        # A single query has one mask row for all members of a group: it broadcasts.
        unfolded = scores if queries == 1 else scores.reshape(batch, heads, queries, -1)
        scores = (unfolded + attention_mask).reshape(batch, groups, rows, -1)
    if s_aux is not None:
        sinks = s_aux.reshape(1, groups, members, 1).repeat(batch, 1, 1, queries)
        scores = torch.cat([scores, sinks.reshape(batch, groups, rows, 1).to(scores.dtype)], -1)
    weights = torch.softmax(scores, -1)

    outputs, start = [], 0
    for part in values:
        end = start + int(part.shape[2])
        whole = len(values) == 1 and s_aux is None
        outputs.append(torch.matmul(weights if whole else weights[..., start:end], part))
        start = end
    output = sum(outputs[1:], start=outputs[0]).reshape(batch, heads, queries, -1)
    return output.transpose(1, 2).contiguous(), None


def repeated_attention(
    module: "nn.Module",
    query: Tensor,
    key: Tensor | Segments,
    value: Tensor | Segments,
    *arguments: Any,
    **others: Any,
) -> tuple[Tensor, None]:
    """`qfold_attention` after K and V were copied to all query heads, as transformers does."""
    members = query.shape[1] // _parts(key)[0].shape[1]
    return qfold_attention(
        module, query, _repeated(key, members), _repeated(value, members), *arguments, **others
    )


def register_attention_forms() -> None:
    """Make the forms of attention that an export has implementations of transformers.

    The eager mask function goes beside them: without one transformers would pass no mask at all.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    for form in FORMS.values():
        AttentionInterface.register(form.name, resolve_name(form.function))
        AttentionMaskInterface.register(form.name, eager_mask)


@contextmanager
def recorded_calls(name: str) -> Iterator[list[Call]]:
    """Record what models give to a registered attention implementation while the block runs.

    Args:
        name: of the implementation, which computes as ever.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[Call] = []
    function = ALL_ATTENTION_FUNCTIONS[name]

    def recorded(
        module: "nn.Module", query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, None]:
        calls.append(Call(type(module).__name__, key, value))
        result: tuple[Tensor, None] = function(module, query, key, value, *others, **named)
        return result

    AttentionInterface.register(name, recorded)
    try:
        yield calls
    finally:
        AttentionInterface.register(name, function)


def _parts(tensor: Tensor | Segments) -> tuple[Tensor, ...]:
    return tensor.parts if isinstance(tensor, Segments) else (tensor,)


def _joined(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def _repeated(tensor: Tensor | Segments, members: int) -> Segments:
    return Segments(*(_repeat_heads(part, members) for part in _parts(tensor)))


def _repeat_heads(part: Tensor, members: int) -> Tensor:
    if members == 1:
        return part
    batch, groups, length, dim = part.shape
    copies = part[:, :, None].expand(batch, groups, members, length, dim)
    return copies.reshape(batch, groups * members, length, dim)


def refuse_unknown(module: "nn.Module", others: dict[str, Any], dropout: float) -> None:
    """Refuse what a form of attention does not have.

    Args:
        module: the attention layer, named in the error.
        others: what the model passes by name beside what the form takes.
        dropout: what it passes as dropout.

    Raises:
        ExportError: one of them would have an effect.
    """
    unknown = sorted(
        name
        for name, value in others.items()
        if value is not None and value is not False and name not in _WITHOUT_EFFECT
    )
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise ExportError(
            f"the attention of this model uses {', '.join(unknown)}, which the export does not "
            "have",
            where=type(module).__name__,
            fix="export a model without it",
        )
