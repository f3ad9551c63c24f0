"""Methods that make a new KV head without looking at activations.

Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from
Multi-Head Checkpoints", section 2.1 and figure 4 (arXiv 2305.13245).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.heads.methods import MergeRequest, method

Pool = Callable[[Tensor], Tensor]
PAPER = "Ainslie et al. 2023, arXiv 2305.13245, section 2.1"


@method("mean", reference=PAPER)
def mean(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """Each new KV head is the mean of its group; biases are pooled with the same coefficients."""

    def pool(heads: Tensor) -> Tensor:  # [K, ...] -> [g, ...]
        return _groups(heads.double(), request).mean(1).to(heads.dtype)

    return _map_kv(weights, pool)


@method("first", reference=PAPER)
def first(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """Each new KV head is the first of its group."""

    def pool(heads: Tensor) -> Tensor:  # [K, ...] -> [g, ...]
        return _groups(heads, request)[:, 0]

    return _map_kv(weights, pool)


@method("random", reference=PAPER)
def random(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """K and V are drawn anew at the source class's initial scale; their biases become zero."""
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + request.layer)
    heads = request.num_key_value_heads

    def draw(old: Tensor) -> Tensor:  # [K, d, D] -> [g, d, D]
        values = torch.randn((heads, *old.shape[1:]), generator=generator, dtype=torch.float64)
        return (values * request.initializer_range).to(old.dtype)

    def zero(old: Tensor | None) -> Tensor | None:  # [K, d] -> [g, d]
        return None if old is None else old.new_zeros((heads, *old.shape[1:]))

    return replace(
        weights,
        k=draw(weights.k),
        v=draw(weights.v),
        k_bias=zero(weights.k_bias),
        v_bias=zero(weights.v_bias),
    )


def repeat(weights: AttentionWeights, num_key_value_heads: int) -> AttentionWeights:
    """Raise K to a multiple of it by repeating each KV head: exact, the inverse of a merge."""
    times = num_key_value_heads // weights.num_key_value_heads
    return _map_kv(weights, lambda heads: heads.repeat_interleave(times, 0))


def _groups(heads: Tensor, request: MergeRequest) -> Tensor:
    """[K, ...] as [g, K / g, ...]: groups are contiguous."""
    return heads.reshape(request.num_key_value_heads, -1, *heads.shape[1:])


def _map_kv(weights: AttentionWeights, function: Pool) -> AttentionWeights:
    """Apply one function of the head axis to keys, values and their biases."""

    def optional(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else function(heads)

    return replace(
        weights,
        k=function(weights.k),
        v=function(weights.v),
        k_bias=optional(weights.k_bias),
        v_bias=optional(weights.v_bias),
    )
