"""Random layers of every kind, and attention weights for their moments."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from upcycle.attention import AttentionWeights, QkNorm, Rope
from upcycle.heads.moments import LayerMoments, MomentCollector
from upcycle.heads.reference import project, rotate

HIDDEN = 12
ROPES = [Rope("half", 8), Rope("half", 4), Rope("interleaved", 8), Rope("interleaved", 4, True)]
ROPES += [Rope("none", 0)]
NORMS = {
    "shared": QkNorm("rms", "shared"),
    "offset": QkNorm("rms", "shared", offset=1.0),
    "after": QkNorm("rms", "shared", after_rope=True),
    "all": QkNorm("rms", "all"),
    "head": QkNorm("layer", "head"),
    "layer": QkNorm("layer", "shared"),
}


def random_layer(
    heads: int = 4,
    kv_heads: int = 4,
    rope: Rope = ROPES[0],
    *,
    head_dim: int = 8,
    value_dim: int | None = None,
    hidden: int = HIDDEN,
    bias: bool = False,
    norm: QkNorm | None = None,
    clip: float | None = None,
    gate: bool = False,
    sinks: bool = False,
    seed: int = 0,
) -> AttentionWeights:
    """A layer of fp64 noise; norms have weights around 1, differing inside every plane."""
    generator = torch.Generator().manual_seed(seed)
    width = value_dim or head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def norm_weight(count: int) -> Tensor | None:
        if norm is None:
            return None
        shape = (head_dim,) if norm.span == "shared" else (count, head_dim)
        return 1 + draw(*shape) / 4 - norm.offset

    return AttentionWeights(
        q=draw(heads, head_dim, hidden) / 2,
        k=draw(kv_heads, head_dim, hidden) / 2,
        v=draw(kv_heads, width, hidden),
        o=draw(heads, hidden, width),
        rope=rope,
        q_bias=draw(heads, head_dim) if bias else None,
        k_bias=draw(kv_heads, head_dim) if bias else None,
        v_bias=draw(kv_heads, width) if bias else None,
        o_bias=draw(hidden) if bias else None,
        qk_norm=norm,
        q_norm=norm_weight(heads),
        k_norm=norm_weight(kv_heads),
        clip_qkv=clip,
        gate=draw(heads, width, hidden) if gate else None,
        sinks=draw(heads) if sinks else None,
    )


def inputs(tokens: int = 40, hidden: int = HIDDEN, seed: int = 0) -> Tensor:
    """[T, D] fp64 noise whose channels differ in size."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.1, 2, hidden, dtype=torch.float64)


def probabilities(weights: AttentionWeights, x: Tensor) -> Tensor:
    """[H, T, T] causal attention of a layer without norms, clamps and sinks."""
    group = weights.num_attention_heads // weights.num_key_value_heads
    q = rotate(project(weights.q, weights.q_bias, x), weights.rope, 1e4)
    k = rotate(project(weights.k, weights.k_bias, x), weights.rope, 1e4)
    scores = q @ k.repeat_interleave(group, 0).mT / math.sqrt(q.shape[-1])
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def moments_of(weights: AttentionWeights, x: Tensor, *, attended: bool = False) -> LayerMoments:
    collector = MomentCollector(
        weights, attended_heads=weights.num_key_value_heads if attended else 0
    )
    collector.add(x)
    if attended:
        collector.add_attended(x, probabilities(weights, x))
    return collector.moments()


def map_heads(weights: AttentionWeights, function: Callable[[Tensor], Tensor]) -> AttentionWeights:
    """The KV side of a layer with a function of the head axis applied."""
    names = ["k", "v", "k_bias", "v_bias"]
    if weights.qk_norm is not None and weights.qk_norm.span != "shared":
        names.append("k_norm")
    changed = {n: function(getattr(weights, n)) for n in names if getattr(weights, n) is not None}
    return replace(weights, **changed)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@st.composite
def layers(draw: st.DrawFn) -> AttentionWeights:
    """Layers of any shape, rotation and biases, without norms, clamps and gates."""
    kv_heads = draw(st.integers(1, 4))
    return random_layer(
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(st.sampled_from(ROPES)),
        value_dim=draw(st.sampled_from([8, 6])),
        bias=draw(st.booleans()),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
