"""Align the heads of each group by exact transforms, then take their mean.

Source: Jin et al. 2025, "Align Attention Heads Before Merging Them: An Effective Way for Converting
MHA to GQA" (arXiv 2412.20677): generalised orthogonal Procrustes, with a rotation per rotary plane
for keys.
"""

from dataclasses import replace

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.heads.blocks import diagonal_blocks, head_blocks
from upcycle.heads.gauge import freedom, stored_like, transform_keys, transform_values
from upcycle.heads.methods import MergeRequest, MergeSteps
from upcycle.heads.moments import LayerMoments, regularised, white_moments
from upcycle.heads.pool import mean
from upcycle.heads.subspace import phase

_SWEEPS = 100
_GAIN = 1e-6


def procrustes_steps(weights: AttentionWeights) -> MergeSteps:
    """What `procrustes` does to these weights."""
    free = freedom(weights)
    aligned = "aligned by rotations, then their mean"
    return MergeSteps(
        keys=f"mean ({free.keys_reason})" if free.keys == "none" else aligned,
        values=aligned if free.values == "linear" else f"mean ({free.values_reason})",
    )


def procrustes(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """Each new KV head is the mean of its group after its members were turned onto each other.

    Activations say what to align where there is calibration text, else the weights themselves.
    """
    groups = request.num_key_value_heads
    kv_heads = weights.num_key_value_heads
    if groups == kv_heads:
        return weights
    moments = regularised(request.moments or white_moments(weights), weights, groups)
    free, turned = freedom(weights), weights
    if free.keys != "none":
        turned = transform_keys(turned, *key_rotations(moments, groups))
    if free.values == "linear":
        turned = transform_values(turned, _by_group(moments.values, kv_heads, groups))
    return stored_like(mean(turned, request), weights)


def key_rotations(moments: LayerMoments, groups: int) -> tuple[Tensor, Tensor]:
    """What `transform_keys` needs to turn each group's keys onto each other.

    Args:
        moments: of the layer.
        groups: g.

    Returns:
        [K, P] unit complex factors and [K, p, p] orthogonal matrices.
    """
    kv_heads = moments.num_key_value_heads
    planes = align_planes(diagonal_blocks(moments.keys, groups)).mT.flatten(0, 1)
    return planes, _by_group(moments.passing_keys, kv_heads, groups)


def align_planes(moment: Tensor) -> Tensor:
    """Unit factors z that bring the signals z_h k_h of each plane as near to their mean as can be.

    Args:
        moment: [..., n, n] E[k kᴴ].

    Returns:
        [..., n].
    """
    factors = phase(moment[..., :, 0]).conj()
    agreement = -torch.inf
    for _ in range(_SWEEPS):
        with_mean = (moment * factors.conj()[..., None, :]).mean(-1)  # E[k_h μ̄]
        factors = phase(with_mean).conj()
        reached = float(with_mean.abs().sum())
        if reached <= agreement * (1 + _GAIN):
            break
        agreement = reached
    return factors


def align_channels(moment: Tensor, heads: int) -> Tensor:
    """Orthogonal R that bring R_h x_h as near to their mean as can be (Gower 1975).

    Args:
        moment: [n m, n m] E[x xᵀ] of the stacked heads.
        heads: n.

    Returns:
        [n, m, m].
    """
    blocks = head_blocks(moment, heads)
    turns, agreement = _nearest_rotation(blocks[:, :, 0])[0], -torch.inf
    for _ in range(_SWEEPS):
        with_mean = torch.einsum("iajb,jcb->iac", blocks, turns) / heads  # E[x_h μᵀ]
        turns, reached = _nearest_rotation(with_mean)
        if reached <= agreement * (1 + _GAIN):
            break
        agreement = reached
    return turns


def _nearest_rotation(cross: Tensor) -> tuple[Tensor, float]:
    """The orthogonal R that maximise Σ tr(R_h cross_h), and the sum."""
    u, levels, vh = torch.linalg.svd(cross)
    return vh.mT @ u.mT, float(levels.sum())


def _by_group(moment: Tensor, kv_heads: int, groups: int) -> Tensor:
    """[K, m, m] of `align_channels`, group by group, for a moment [K m, K m]."""
    blocks = diagonal_blocks(moment, groups)
    return torch.cat([align_channels(block, kv_heads // groups) for block in blocks])


def rotate_moments(moments: LayerMoments, planes: Tensor, passing: Tensor) -> LayerMoments:
    """The moments after `transform_keys` with the factors and matrices of `key_rotations`.

    Args:
        moments: of the layer before.
        planes: [K, P] unit complex factors.
        passing: [K, p, p] orthogonal matrices.
    """
    flat: Tensor = torch.block_diag(*passing)  # type: ignore[no-untyped-call]
    factors = planes.mT
    queries = passing.repeat_interleave(len(moments.queries) // len(planes), 0)
    return replace(
        moments,
        keys=factors[:, :, None] * moments.keys * factors.conj()[:, None, :],
        passing_keys=flat @ moments.passing_keys @ flat.mT,
        passing_queries=queries @ moments.passing_queries @ queries.mT,
    )
