"""Methods that make a new KV head without looking at activations.

Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from
Multi-Head Checkpoints", section 2.1 and figure 4 (arXiv 2305.13245).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.heads.blocks import grouped
from upcycle.heads.methods import MergeRequest

Pool = Callable[[Tensor], Tensor]
_BLOCK = 1 << 18  # elements; of fp64, a core's cache


def mean(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """Each new KV head is the mean of its group.

    Biases, and the weights of a key norm that belong to heads, are pooled with the same
    coefficients.
    """

    def pool(heads: Tensor) -> Tensor:  # [K, ...] -> [g, ...]
        groups = grouped(heads, request.num_key_value_heads)
        merged = heads.new_empty(groups.shape[0], *groups.shape[2:])
        for group, new in zip(groups, merged, strict=True):
            # A block at a time: in fp64 a whole layer would be four times its bf16 bytes.
            rows = max(1, _BLOCK // group[:, 0].numel())
            for part, place in zip(group.split(rows, 1), new.split(rows), strict=True):
                place.copy_(torch.mean(part, 0, dtype=torch.float64))
        return merged

    return _map_kv(weights, pool)


def first(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """Each new KV head is the first of its group."""

    def pool(heads: Tensor) -> Tensor:  # [K, ...] -> [g, ...]
        return grouped(heads, request.num_key_value_heads)[:, 0]

    return _map_kv(weights, pool)


def random(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """K and V are drawn anew at the source class's initial scale.

    Their biases become zero and weights of a norm that belong to heads become one.
    """
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + request.layer)
    heads = request.num_key_value_heads

    def draw(old: Tensor) -> Tensor:  # [K, d, D] -> [g, d, D]
        values = torch.randn((heads, *old.shape[1:]), generator=generator, dtype=torch.float64)
        return (values * request.initializer_range).to(old.dtype)

    def zero(old: Tensor | None) -> Tensor | None:  # [K, d] -> [g, d]
        return None if old is None else old.new_zeros((heads, *old.shape[1:]))

    def one(old: Tensor | None) -> Tensor | None:  # [K, d] -> [g, d]
        return None if old is None else old.new_ones((heads, *old.shape[1:]))

    return replace(
        weights,
        k=draw(weights.k),
        v=draw(weights.v),
        k_bias=zero(weights.k_bias),
        v_bias=zero(weights.v_bias),
        k_norm=one(weights.k_norm) if norm_is_per_head(weights) else weights.k_norm,
    )


def repeat(weights: AttentionWeights, num_key_value_heads: int) -> AttentionWeights:
    """Raise K to a multiple of it by repeating each KV head: exact, the inverse of a merge."""
    times = num_key_value_heads // weights.num_key_value_heads
    return _map_kv(weights, lambda heads: heads.repeat_interleave(times, 0))


def norm_is_per_head(weights: AttentionWeights) -> bool:
    """Whether the weight of the key norm has a row for each KV head."""
    norm = weights.qk_norm
    return weights.k_norm is not None and norm is not None and norm.span != "shared"


def _map_kv(weights: AttentionWeights, function: Pool) -> AttentionWeights:
    """Apply one function of the head axis to keys, values, their biases and their norm."""

    def optional(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else function(heads)

    return replace(
        weights,
        k=function(weights.k),
        v=function(weights.v),
        k_bias=optional(weights.k_bias),
        v_bias=optional(weights.v_bias),
        k_norm=optional(weights.k_norm) if norm_is_per_head(weights) else weights.k_norm,
    )
