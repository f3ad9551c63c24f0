"""Grouped-query attention that never copies K or V (Q-fold).

The n query heads of a group become n rows against their shared KV head: for a query of shape
[B, H, T, d], row-major order over (group, member, position) makes [B, H, T, d] and [B, g, n*T, d]
the same memory, so a reshape folds the members into the rows and another unfolds the scores.
The ranks stay at 4, and no `repeat_kv` (Core ML: `tile`) is left.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from upcycle.errors import ExportError

if TYPE_CHECKING:
    from torch import nn

QFOLD = "qfold"
# Passed along by transformers' models. They have no effect over a ready mask and cache: what a
# sliding window hides, the mask hides.
_WITHOUT_EFFECT = {"position_ids", "sliding_window", "use_cache"}


def qfold_attention(
    module: "nn.Module",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' `AttentionInterface`; query head h reads KV head h // (H / g).

    Args:
        module: the attention layer, named in errors.
        query: [B, H, T, d].
        key: [B, g, C, d].
        value: [B, g, C, e].
        attention_mask: additive, [B or 1, 1, T, C]; may be None only for T = 1.
        scaling: factor of the scores.
        dropout: must be 0: this is for inference.
        softcap: bound of the scores by softcap * tanh(scores / softcap), or None (Gemma 2).
        others: what the model passes beside; only arguments without effect are accepted.

    Returns:
        [B, T, H, e], and no attention weights.

    Raises:
        ExportError: the model's attention has a feature that is not expressed here, or no mask
            came with more than one query (attention would silently see the future).
    """
    _refuse_unknown(module, others, dropout)
    batch, heads, queries, _ = query.shape
    groups, context = key.shape[1], key.shape[2]
    rows = heads // groups * queries

    # Scaling the query instead of the scores keeps them in the range of fp16.
    folded = (query * scaling).reshape(batch, groups, rows, -1)
    scores = torch.matmul(folded, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if queries == 1:
        # A single query has one mask row for all members of a group: it broadcasts.
        weights = torch.softmax(scores if attention_mask is None else scores + attention_mask, -1)
    elif attention_mask is None:
        raise ExportError(
            f"attention over {int(queries)} queries got no mask and would see the future",
            where=type(module).__name__,
            fix="pass an additive mask of shape [batch, 1, queries, context]",
        )
    else:
        unfolded = scores.reshape(batch, heads, queries, context) + attention_mask
        weights = torch.softmax(unfolded, -1).reshape(batch, groups, rows, context)
    output = torch.matmul(weights, value).reshape(batch, heads, queries, -1)
    return output.transpose(1, 2), None


def register_qfold() -> None:
    """Make "qfold" an attention implementation of transformers, with the eager mask beside it.

    Without a registered mask function transformers would pass no mask at all.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(QFOLD, qfold_attention)
    AttentionMaskInterface.register(QFOLD, eager_mask)


def _refuse_unknown(module: "nn.Module", others: dict[str, Any], dropout: float) -> None:
    unknown = sorted(
        name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT
    )
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise ExportError(
            f"the attention of this model uses {', '.join(unknown)}, which Q-fold does not have",
            where=type(module).__name__,
            fix="export with --attention repeat-kv, which keeps the model's own attention",
        )
