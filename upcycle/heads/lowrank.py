"""Closed forms for a group's shared head, in the metric of what reads it.

Keys: per rotary plane the heads are complex signals, and the best single signal with a complex
factor per head is their first principal component, weighted by the energy of the queries that meet
it; the factors move into the queries, exactly. Values: the group's heads, measured by the output
projections that read them, are replaced by the best subspace of one head's width, and each
projection is rewritten in it. Both contain the mean and Procrustes alignment as special cases.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.heads.blocks import (
    channel_signals,
    diagonal_blocks,
    grouped,
    join_planes,
    per_kv_head,
    span_of_copies,
    split_planes,
    with_bias,
)
from upcycle.heads.gauge import freedom, map_rows, stored_like
from upcycle.heads.methods import MergeRequest, MergeSteps
from upcycle.heads.moments import LayerMoments, regularised
from upcycle.heads.normed_keys import merge_normed_keys, norm_takes_factors
from upcycle.heads.pool import mean
from upcycle.heads.subspace import rank_one, shared_subspace

_REFIT_RIDGE = 1e-3  # of an output's fit to its attended values, relative to their mean energy


@dataclass(frozen=True)
class Treatment:
    """The closed form that a layer's norms, clamps and gates leave.

    Attributes:
        keys: "complex" is rank one per plane with factors in the queries' projection, "real" the
            same with real factors in the weight of their norm, "directions" the mean of normalised
            keys, "mean" that of the weights.
        values: "subspace" of all channels, "channels" is rank one channel by channel, "mean".
    """

    keys: Literal["complex", "real", "directions", "mean"]
    values: Literal["subspace", "channels", "mean"]


def treatment(weights: AttentionWeights) -> Treatment:
    """How `lowrank` merges these weights."""
    free = freedom(weights)
    values: Literal["subspace", "channels", "mean"] = "mean"
    if free.values != "none":
        values = "subspace" if free.values == "linear" else "channels"
    if weights.clip_qkv is not None:
        return Treatment("mean", values)
    if free.keys == "scale":
        return Treatment("complex", values)
    return Treatment("real" if norm_takes_factors(weights) else "directions", values)


def lowrank_steps(weights: AttentionWeights) -> MergeSteps:
    """What `lowrank` does to these weights, in words."""
    free, chosen = freedom(weights), treatment(weights)
    keys = {
        "complex": "lowrank",
        "real": f"lowrank with real factors ({free.keys_reason})",
        "directions": f"mean of normalised keys ({free.keys_reason})",
        "mean": f"mean ({free.keys_reason})",
    }
    values = {
        "subspace": "lowrank",
        "channels": f"lowrank channel by channel ({free.values_reason})",
        "mean": f"mean ({free.values_reason})",
    }
    return MergeSteps(keys[chosen.keys], values[chosen.values])


def lowrank(weights: AttentionWeights, request: MergeRequest) -> AttentionWeights:
    """The least expected squared error of logits and outputs that one shared head allows.

    Raises:
        PlanError: there are no moments; statistics of the weights alone fail on real models.
    """
    if request.moments is None:
        raise PlanError(
            "lowrank needs calibration text",
            where="--method lowrank",
            fix="add --calibration FILE or --calibration builtin",
        )
    groups = request.num_key_value_heads
    if groups == weights.num_key_value_heads:
        return weights
    moments, chosen = regularised(request.moments, weights, groups), treatment(weights)
    merged = mean(weights, request)  # for whatever has no closed form
    if chosen.keys == "complex":
        merged = _merge_keys(merged, weights, moments, groups)
    elif chosen.keys != "mean":
        merged = merge_normed_keys(merged, weights, moments, groups)
    if chosen.values == "subspace":
        merged = _merge_values(merged, weights, moments, groups)
    elif chosen.values == "channels":
        merged = _merge_value_channels(merged, weights, moments, groups)
    return stored_like(merged, weights)


def _merge_keys(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """Rank one per plane, and a shared subspace of the position-free channels."""
    kv_heads = weights.num_key_value_heads
    group = weights.num_attention_heads // kv_heads
    energy = grouped(per_kv_head(moments.queries, kv_heads), groups).mT  # [g, P, n]
    planes = rank_one(diagonal_blocks(moments.keys, groups), energy)
    write_planes = planes.write.mT.flatten(0, 1)  # [K, P]
    metric = per_kv_head(moments.passing_queries, kv_heads)
    passing = split_planes(with_bias(weights.k, weights.k_bias), weights.rope)[1]
    read_passing, write_passing = _subspaces(moments.passing_keys, metric, passing, groups)

    def keys(rows: Tensor) -> Tensor:
        turning, still = split_planes(rows, weights.rope)
        shared = torch.einsum("gpn,gnpx->gpx", planes.read, grouped(turning, groups))
        return join_planes(shared, _sum_groups(read_passing @ still, groups), weights.rope)

    def queries(rows: Tensor) -> Tensor:
        turning, still = split_planes(rows, weights.rope)
        factors = write_planes.conj().repeat_interleave(group, 0)[..., None]
        maps = write_passing.mT.repeat_interleave(group, 0)
        return join_planes(turning * factors, maps @ still, weights.rope)

    k, k_bias = map_rows(keys, weights.k, weights.k_bias)
    q, q_bias = map_rows(queries, weights.q, weights.q_bias)
    return replace(merged, k=k, k_bias=k_bias, q=q, q_bias=q_bias)


def _merge_values(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """A shared subspace of the values in the metric of the output projections.

    Where attended values were collected they replace the values themselves (an output reads
    averages over tokens, which vary less), and every query head's output is fitted to its own.
    With a bias in the output the moments are centred, and the bias takes over what the mean loses.
    """
    kv_heads = weights.num_key_value_heads
    group, size = weights.num_attention_heads // kv_heads, kv_heads // groups
    o = weights.o.double()
    metric = per_kv_head(o.mT @ o, kv_heads)
    own = torch.arange(size).repeat_interleave(group)  # of a group's query heads
    reads, outputs, bias = [], [], weights.o_bias
    for index in range(groups):
        old = grouped(o, groups)[index]
        seen = _seen_values(weights, moments, groups, index)
        own_bias = None if seen.mean is not None else weights.v_bias
        own_bias = None if own_bias is None else grouped(own_bias, groups)[index]
        span = span_of_copies(with_bias(grouped(weights.v, groups)[index], own_bias))
        shared = shared_subspace(seen.moment.mean(0), grouped(metric, groups)[index], span)
        new = old @ shared.write[own]
        if seen.attended:
            new = _refit(old, new, seen.moment, shared.read, own)
        if bias is not None and seen.mean is not None:
            before = seen.mean.expand(len(old), -1, -1)[torch.arange(len(old)), own]
            after = torch.einsum("hab,ihb->ia", shared.read, seen.mean).expand(len(old), -1)
            bias = bias.double() + (old @ before[..., None] - new @ after[..., None]).sum((0, 2))
        reads.append(shared.read)
        outputs.append(new)
    read = torch.cat(reads)
    v, v_bias = map_rows(lambda rows: _sum_groups(read @ rows, groups), weights.v, weights.v_bias)
    return replace(merged, v=v, v_bias=v_bias, o=torch.cat(outputs), o_bias=bias)


@dataclass(frozen=True)
class _Seen:
    """What a group's query heads see of its values.

    Attributes:
        moment: [n r, n e, n e] per query head, or [1, n e, n e] for all of them; centred if there
            is a mean.
        mean: the same heads' mean [..., n, e], where a constant of the output can make up for it.
        attended: whether it is of attended values.
    """

    moment: Tensor
    mean: Tensor | None
    attended: bool


def _seen_values(
    weights: AttentionWeights, moments: LayerMoments, groups: int, index: int
) -> _Seen:
    kv_heads, width = weights.v.shape[:2]
    group, size = weights.num_attention_heads // kv_heads, kv_heads // groups
    channels = slice(index * size * width, (index + 1) * size * width)
    moment = moments.values[None, channels, channels]
    mean = moments.value_mean[None, channels]
    constant = weights.o_bias is not None
    attended = False
    if moments.attended is not None and moments.attended_mean is not None:
        block = moments.attended.shape[-1] // width
        attended = block % size == 0
    if attended:
        assert moments.attended is not None
        assert moments.attended_mean is not None
        queries = slice(index * size * group, (index + 1) * size * group)
        start = index * size % block * width
        inside = slice(start, start + size * width)
        moment = moments.attended[queries, inside, inside]
        mean = moments.attended_mean[queries, inside]
    else:
        # Attention weights beside a sink do not sum to 1: the mean is no constant of the output.
        constant = constant and weights.sinks is None
    if constant:
        moment = moment - mean[:, :, None] * mean[:, None, :]
    return _Seen(moment, torch.unflatten(mean, 1, (size, width)) if constant else None, attended)


def _refit(old: Tensor, new: Tensor, moment: Tensor, read: Tensor, own: Tensor) -> Tensor:
    """Each output B_h ≈ o_h y_h[own] on the shared attended value A y_h, by ridge regression.

    B_h = (o_h E[y_own yᵀ] Aᵀ + λ B_h⁰) (A E[y yᵀ] Aᵀ + λ)⁻¹: towards the outputs B⁰ = `new` that
    serve all heads of the group, so that few tokens cannot do harm.
    """
    size, width = read.shape[:2]
    rows = read.mT.flatten(0, 1)  # Aᵀ, [n e, e]
    read_moment = moment @ rows  # E[y (A y)ᵀ], [n r, n e, e]
    own_cross = torch.unflatten(read_moment, 1, (size, width))[torch.arange(len(own)), own]
    square = rows.mT @ read_moment
    level = _REFIT_RIDGE * square.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    ridge = level * torch.eye(width, dtype=square.dtype)
    fitted: Tensor = torch.linalg.solve(square + ridge, old @ own_cross + level * new, left=False)
    return fitted


def _merge_value_channels(
    merged: AttentionWeights, weights: AttentionWeights, moments: LayerMoments, groups: int
) -> AttentionWeights:
    """Rank one per channel, where a gate keeps channels apart: its factors move into o."""
    kv_heads = weights.num_key_value_heads
    group = weights.num_attention_heads // kv_heads
    o = weights.o.double()
    energy = per_kv_head(o.square().sum(1), kv_heads)
    shared = rank_one(*channel_signals(moments.values, energy, groups))
    write = shared.write.mT.flatten(0, 1).repeat_interleave(group, 0)  # [H, e]

    def values(rows: Tensor) -> Tensor:
        return torch.einsum("gen,gnex->gex", shared.read, grouped(rows, groups))

    v, v_bias = map_rows(values, weights.v, weights.v_bias)
    return replace(merged, v=v, v_bias=v_bias, o=o * write[:, None, :])


def _subspaces(moment: Tensor, metric: Tensor, rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`shared_subspace` of each group: its maps to the shared head, and back, [K, m, m] each."""
    if not moment.numel():  # every channel rotates
        return metric, metric
    parts = (diagonal_blocks(moment, groups), metric.chunk(groups), rows.chunk(groups))
    shared = [
        shared_subspace(part, own, span_of_copies(made_by))
        for part, own, made_by in zip(*parts, strict=True)
    ]
    return torch.cat([s.read for s in shared]), torch.cat([s.write for s in shared])


def _sum_groups(heads: Tensor, groups: int) -> Tensor:
    """[K, ...] -> [g, ...]."""
    return grouped(heads, groups).sum(1)
