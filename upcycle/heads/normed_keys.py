"""Merging keys that a norm stands behind.

A norm cancels the size of a key, so that heads are merged by what they are after it. No factor of a
head can pass the norm of the queries into their projection; only the weight of that norm, where
each head has a row of its own, takes one real factor per plane.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights, Rope
from upcycle.heads.blocks import channel_signals, diagonal_blocks, grouped, join_planes, per_kv_head
from upcycle.heads.gauge import freedom, map_rows, transform_keys
from upcycle.heads.moments import LayerMoments
from upcycle.heads.procrustes import key_rotations, rotate_moments
from upcycle.heads.subspace import rank_one

_SMALLEST = 1e-30
Signals = list[tuple[Tensor, Tensor]]


def norm_takes_factors(weights: AttentionWeights) -> bool:
    """Whether each head has norm weights of its own, before RoPE."""
    norm = weights.qk_norm
    has_rows = weights.q_norm is not None and weights.k_norm is not None
    return norm is not None and norm.span != "shared" and not norm.after_rope and has_rows


def merge_normed_keys(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """Keys (and queries) of `merged` replaced by the best shared ones behind the norm.

    Where rotations are exact, heads are first turned onto each other. A norm's scale over tokens is
    taken for its mean; what the shared keys lack in size, as heads disagree, the weight of their
    norm has less.
    """
    if freedom(weights).keys == "rotation":
        turns = key_rotations(moments, groups)
        weights, moments = transform_keys(weights, *turns), rotate_moments(moments, *turns)
        merged = replace(merged, q=weights.q, q_bias=weights.q_bias)
    if norm_takes_factors(weights):
        return _merge_rank_one(merged, weights, moments, groups)
    return _merge_directions(merged, weights, moments, groups)


def _merge_rank_one(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """Rank one per plane and position-free channel, its real factors in the queries' norm."""
    norm, q_norm, k_norm = weights.qk_norm, weights.q_norm, weights.k_norm
    assert norm is not None
    assert q_norm is not None
    assert k_norm is not None
    kv_heads = weights.num_key_value_heads
    group = weights.num_attention_heads // kv_heads
    signals = _signals(moments, kv_heads, groups)
    shared = [rank_one(moment, energy) for moment, energy in signals]
    read = _by_channel([s.read for s in shared], weights.rope)
    write = _by_channel([s.write for s in shared], weights.rope)
    live = _live(signals)
    counted = torch.ones_like(live) if norm.span == "all" else live  # whose size the norm sees
    kept = _kept_size(signals, [s.read for s in shared], counted)  # [g]
    if norm.span == "all":
        kept = kept.square().mean().sqrt().expand(groups)
    scale = k_norm.double() + norm.offset
    by_group = grouped(scale, groups)
    new_scale = by_group.square().mean(1).sqrt().copysign(by_group.sum(1))  # [g, d]
    ratio = by_group / new_scale[:, None]
    ratio = torch.where(new_scale[:, None] == 0, torch.ones_like(ratio), ratio)
    factor = _equal_size(moments, live) / kept[:, None]
    coefficients = (grouped(read, groups) * ratio * factor[..., None]).flatten(0, 1)

    def keys(rows: Tensor) -> Tensor:
        # A LayerNorm takes the mean off each head, before the heads' weights mix with it.
        centred = rows - rows.mean(1, keepdim=True) if norm.kind == "layer" else rows
        return grouped(coefficients[..., None] * centred, groups).sum(1)

    k, k_bias = map_rows(keys, weights.k, weights.k_bias)
    factors = write.repeat_interleave(group, 0)
    return replace(
        merged,
        k=k,
        k_bias=k_bias,
        k_norm=new_scale * kept[:, None] - norm.offset,
        q_norm=(q_norm.double() + norm.offset) * factors - norm.offset,
    )


def _merge_directions(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """The mean of keys that are first brought to equal size, on average over tokens."""
    norm = weights.qk_norm
    assert norm is not None
    signals = _signals(moments, weights.num_key_value_heads, groups)
    live = _live(signals)
    weight = live / live.sum(1, keepdim=True)
    share = (weight * _equal_size(moments, live))[..., None, None]

    def keys(rows: Tensor) -> Tensor:
        return (share * grouped(rows, groups)).sum(1)

    k, k_bias = map_rows(keys, weights.k, weights.k_bias)
    k_norm = merged.k_norm
    if k_norm is not None:
        equal = [weight[:, None].expand_as(energy) for _, energy in signals]
        kept = _kept_size(signals, equal, live).square().mean().sqrt()
        k_norm = (k_norm.double() + norm.offset) * kept - norm.offset
    return replace(merged, k=k, k_bias=k_bias, k_norm=k_norm)


def _signals(moments: LayerMoments, kv_heads: int, groups: int) -> Signals:
    """Moments [g, P or p, n, n] and query energies [g, P or p, n] of planes and other channels."""
    planes = grouped(per_kv_head(moments.queries, kv_heads), groups).mT
    passing = per_kv_head(moments.passing_queries.diagonal(dim1=1, dim2=2), kv_heads)
    return [
        (diagonal_blocks(moments.keys.real, groups), planes),
        channel_signals(moments.passing_keys, passing, groups),
    ]


def _by_channel(factors: Sequence[Tensor], rope: Rope) -> Tensor:
    """Real factors [g, P, n] and [g, p, n] as one per channel of each head, [K, d]."""
    planes, passing = factors
    return join_planes(torch.complex(planes, planes), passing, rope).mT.flatten(0, 1)


def _live(signals: Signals) -> Tensor:
    """[g, n] 1 for heads that have queries and keys at all and 0 for pruned ones; 1 if none has."""
    keys = torch.stack([m.diagonal(dim1=2, dim2=3).sum(1) for m, _ in signals]).sum(0)
    queries = torch.stack([energy.sum(1) for _, energy in signals]).sum(0)
    live = (keys > 0) & (queries > 0)
    return torch.where(live.any(1, keepdim=True), live, True).to(keys)


def _equal_size(moments: LayerMoments, live: Tensor) -> Tensor:
    """[g, n] factors that bring keys to one size, that of a live head and not of a pruned one.

    A norm does not see the size, as long as it stays far above the norm's epsilon.
    """
    factor = grouped(moments.key_factor, len(live))
    return factor * ((live / factor).sum(1) / live.sum(1))[:, None]


def _kept_size(signals: Signals, read: Sequence[Tensor], counted: Tensor) -> Tensor:
    """[g] how long the shared keys are, relative to the mean of those `counted` [g, n], 0 or 1."""
    kept: Tensor | float = 0.0
    whole: Tensor | float = 0.0
    for (moment, _), factors in zip(signals, read, strict=True):
        kept += torch.einsum("gpn,gpnm,gpm->g", factors, moment, factors)
        own = moment.diagonal(dim1=2, dim2=3)  # [g, P or p, n]
        whole += ((own * counted[:, None]).sum(-1) / counted.sum(-1, keepdim=True)).sum(-1)
    whole = torch.as_tensor(whole)
    of_it = torch.where(whole > 0, kept / whole, torch.ones_like(whole))  # all may be pruned
    return of_it.clamp_min(_SMALLEST).sqrt()
