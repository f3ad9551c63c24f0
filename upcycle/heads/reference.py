"""Attention computed straight from AttentionWeights: the oracle of the exactness checks."""

import math

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights, QkNorm, Rope


def attention_output(weights: AttentionWeights, x: Tensor, *, theta: float = 1e4) -> Tensor:
    """Causal attention of one sequence in the dtype of `x`; use fp64 for proofs.

    Softmax(Q Kᵀ / sqrt(d)) V per head with rotary positions 0..T-1 (Su et al. 2021, equation 34),
    or ALiBi, with q/k norms, clipping, output gates and sinks. Details that do not touch head
    structure (scaling variants, windows) are left out: the result serves to compare two sets of
    weights, not to reproduce a model.

    Args:
        weights: one layer.
        x: [T, D] the attention's input.
        theta: the rotary base.

    Returns:
        [T, D].
    """
    dtype = x.dtype
    group = weights.num_attention_heads // weights.num_key_value_heads
    q = project(weights.q, weights.q_bias, x)  # [H, T, d]
    k = project(weights.k, weights.k_bias, x)  # [K, T, d]
    v = project(weights.v, weights.v_bias, x)  # [K, T, e]
    norm, clip = weights.qk_norm, weights.clip_qkv
    if norm is not None and not norm.after_rope:
        q = normalise(q, norm, weights.q_norm, weights.q_norm_bias)
        k = normalise(k, norm, weights.k_norm, weights.k_norm_bias)
    if clip is not None:
        q, k, v = (tensor.clamp(-clip, clip) for tensor in (q, k, v))
    q, k = rotate(q, weights.rope, theta), rotate(k, weights.rope, theta)
    if norm is not None and norm.after_rope:
        q = normalise(q, norm, weights.q_norm, weights.q_norm_bias)
        k = normalise(k, norm, weights.k_norm, weights.k_norm_bias)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if weights.alibi:
        # The distance to the key, but for a number that all scores of a token have in common.
        scores = scores + alibi_slopes(len(q), dtype)[:, None, None] * torch.arange(x.shape[0])
    future = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    if weights.sinks is not None:
        sinks = weights.sinks.to(dtype)[:, None, None].expand(-1, x.shape[0], 1)
        scores = torch.cat((scores, sinks), -1)
    attended = scores.softmax(-1)[..., : x.shape[0]] @ v  # [H, T, e]
    if weights.gate is not None:
        attended = attended * project(weights.gate, None, x).sigmoid()
    output = torch.einsum("hte,hDe->tD", attended, weights.o.to(dtype))
    return output if weights.o_bias is None else output + weights.o_bias.to(dtype)


def alibi_slopes(heads: int, dtype: torch.dtype) -> Tensor:
    """[H] by how much the scores of each query head fall with every token of distance.

    2^(-8 h / H) for h = 1..H where H is a power of two; otherwise those of the next smaller power
    of two, and every other one of the next larger (Press et al. 2022, section 3).
    """
    power = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8 * torch.arange(1, count + 1, dtype=dtype) / count)

    return torch.cat((geometric(power), geometric(2 * power)[::2]))[:heads]


def normalise(x: Tensor, norm: QkNorm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of queries or keys [heads, T, d], with a weight [d] or [heads, d], if any."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    dims = (0, 2) if norm.span == "all" else (2,)
    x = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + norm.eps)
    if weight is not None:
        rows = weight.to(x.dtype) + norm.offset
        x = x * (rows if norm.span == "shared" else rows[:, None, :])
    return x if bias is None else x + bias.to(x.dtype)


def rotate(x: Tensor, rope: Rope, theta: float) -> Tensor:
    """Rotate the leading `rotary_dim` channels of [heads, T, d] by their positions."""
    if rope.pairing == "none":
        return x
    planes = rope.rotary_dim // 2
    frequencies = theta ** (-torch.arange(planes, dtype=x.dtype) / planes)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies  # [T, planes]
    cos, sin = angles.cos(), -angles.sin() if rope.clockwise else angles.sin()
    rotary, passing = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.pairing == "half":
        real, imaginary = rotary[..., :planes], rotary[..., planes:]
    else:
        real, imaginary = rotary[..., 0::2], rotary[..., 1::2]
    new = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = torch.cat(new, -1) if rope.pairing == "half" else torch.stack(new, -1).flatten(-2)
    return torch.cat((turned, passing), -1)


def project(rows: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Rows [heads, d, D] and their bias [heads, d] applied to x [T, D]: [heads, T, d]."""
    out = torch.einsum("hdD,tD->htd", rows.to(x.dtype), x)
    return out if bias is None else out + bias.to(x.dtype)[:, None, :]
