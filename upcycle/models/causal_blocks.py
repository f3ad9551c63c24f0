"""Causal attention by blocks of queries with folded heads: bf16 matrix products on a CPU.

PyTorch's own kernel for CPUs computes bf16 attention hardly faster than fp32, while plain products
of matrices are several times as fast. By blocks next to nothing is computed that the mask hides:
the n query heads of a group become n rows against their shared KV head, and a block of queries
sees the keys up to its end.
"""

import torch
from torch import Tensor

_BLOCK = 128  # queries: the scores of one block stay in the cache of a core


def is_causal(mask: Tensor) -> bool:
    """Whether an additive mask [B or 1, 1, T, T] hides later positions and nothing else."""
    if mask.shape[-1] != mask.shape[-2]:
        return False
    rows = mask[:1] if mask.stride(0) == 0 else mask
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    hidden = rows <= torch.finfo(mask.dtype).min / 2
    return bool((hidden == later).all() and (rows.masked_fill(later, 0) == 0).all())


def runs_in_bf16_on_cpu(query: Tensor) -> bool:
    """Whether products with a query are bf16 ones of a CPU, by its dtype or by autocast."""
    if query.device.type != "cpu":
        return False
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return cast or query.dtype == torch.bfloat16


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of every position to itself and those before it, in bf16.

    Args:
        query: [B, H, T, d]; query head h reads KV head h // (H / K).
        key: [B, K, T, d].
        value: [B, K, T, e].
        scaling: factor of the scores.

    Returns:
        [B, H, T, e], in bf16.
    """
    with torch.autocast("cpu", enabled=False):
        query, key, value = (each.to(torch.bfloat16) for each in (query * scaling, key, value))
        batch, heads, length, _ = query.shape
        groups = key.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(length, length, dtype=query.dtype).masked_fill(later, -torch.inf)
        blocks = []
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            folded = query[:, :, start:end].reshape(batch, groups, -1, query.shape[-1])
            scores = (folded @ key[:, :, :end].mT).view(batch, heads, end - start, end)
            weights = (scores + mask[start:end, :end]).softmax(-1)
            attended = weights.view(batch, groups, -1, end) @ value[:, :, :end]
            blocks.append(attended.view(batch, heads, end - start, -1))
        return torch.cat(blocks, 2)
