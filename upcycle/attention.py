"""The canonical form of one attention layer's weights.

A family reads its own names and layout into it and writes it back; every conversion method is a
function from it to it. Letters: H query heads, K key/value heads, d key head_dim, e value
head_dim, D hidden size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

RopePairing = Literal["half", "interleaved", "none"]
NormKind = Literal["rms", "layer"]
NormSpan = Literal["shared", "head", "all"]


@dataclass(frozen=True)
class Rope:
    """How the d key channels pair up into rotary planes.

    Attributes:
        pairing: "half" pairs channel i with i + rotary_dim / 2, "interleaved" pairs 2i with 2i + 1,
            "none" has no rotary planes; positions then count in another way, or not at all.
        rotary_dim: the leading channels that rotate; the others pass through.
        clockwise: whether positions turn the planes by negative angles.
    """

    pairing: RopePairing
    rotary_dim: int
    clockwise: bool = False


@dataclass(frozen=True)
class QkNorm:
    """How queries and keys are normalised before their product.

    Attributes:
        kind: "rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016).
        span: "shared" normalises each head by itself with one weight [d] for all, "head" each head
            by itself with its own row of a weight [heads, d], "all" the channels of all heads
            together with a weight [heads, d].
        eps: added to the mean square or variance.
        offset: added to the weight, 1 where the stored weight is a deviation from 1.
        after_rope: whether it comes after the rotation.
    """

    kind: NormKind
    span: NormSpan
    eps: float = 1e-6
    offset: float = 0.0
    after_rope: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """The numbers of a model's attention, read from its configuration.

    Attributes:
        num_layers: layers with this attention.
        num_attention_heads: H.
        num_key_value_heads: K.
        head_dim: d, channels of a query or key head.
        value_head_dim: e, channels of a value head.
        hidden_size: D.
        rope: the rotary layout.
        qkv_bias: whether q, k and v have biases.
        output_bias: whether o has a bias.
        qk_norm: the norm of queries and keys, if any.
        clip_qkv: q, k and v are clamped to ± this, if any.
        multi_query_only: whether the class knows either H KV heads or one.
        layer_indices: which layers of the model these are; all from 0 on where empty.
        alibi: see `AttentionWeights`.
    """

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    hidden_size: int
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    qk_norm: QkNorm | None = None
    clip_qkv: float | None = None
    multi_query_only: bool = False
    layer_indices: tuple[int, ...] = ()
    alibi: bool = False

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have this attention."""
        return self.layer_indices or tuple(range(self.num_layers))

    @property
    def valid_kv_heads(self) -> list[int]:
        """Every number of KV heads that the model can be converted to, ascending."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        valid = valid_kv_heads(heads, kv_heads)
        return [g for g in valid if g in (1, heads)] if self.multi_query_only else valid


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention. Query head h reads KV head h // (H / K).

    Attributes:
        q: [H, d, D] query rows of each head.
        k: [K, d, D] key rows.
        v: [K, e, D] value rows.
        o: [H, D, e] output columns of each head.
        q_bias: [H, d] or None.
        k_bias: [K, d] or None.
        v_bias: [K, e] or None.
        o_bias: [D] or None.
        rope: the rotary layout.
        qk_norm: the norm of queries and keys, or None.
        q_norm: its weight for queries, [d] or [H, d] as its span says, or None without a weight.
        k_norm: its weight for keys, [d] or [K, d], or None.
        q_norm_bias: its bias for queries, [d], or None.
        k_norm_bias: its bias for keys, [d], or None.
        clip_qkv: q, k and v are clamped to ± this before everything else, or None.
        gate: [H, e, D] rows whose sigmoid multiplies the attended values, or None.
        sinks: [H] logits that join the softmax and attend to nothing, or None.
        alibi: whether scores fall with the distance of tokens by a slope that each query head has
            from its place among all of them (Press et al. 2022), and not from its weights.
    """

    q: "Tensor"
    k: "Tensor"
    v: "Tensor"
    o: "Tensor"
    rope: Rope
    q_bias: "Tensor | None" = None
    k_bias: "Tensor | None" = None
    v_bias: "Tensor | None" = None
    o_bias: "Tensor | None" = None
    qk_norm: QkNorm | None = None
    q_norm: "Tensor | None" = None
    k_norm: "Tensor | None" = None
    q_norm_bias: "Tensor | None" = None
    k_norm_bias: "Tensor | None" = None
    clip_qkv: float | None = None
    gate: "Tensor | None" = None
    sinks: "Tensor | None" = None
    alibi: bool = False

    @property
    def num_attention_heads(self) -> int:
        """H, the number of query heads."""
        return self.q.shape[0]

    @property
    def num_key_value_heads(self) -> int:
        """K, the number of key/value heads."""
        return self.k.shape[0]


def valid_kv_heads(num_attention_heads: int, num_key_value_heads: int) -> list[int]:
    """Every number of KV heads that a model can be converted to, ascending.

    The divisors of K merge whole groups (K itself copies); the multiples of K that divide H repeat
    heads, which is exact.
    """
    heads, kv_heads = num_attention_heads, num_key_value_heads
    return [
        g
        for g in range(1, heads + 1)
        if kv_heads % g == 0 or (g % kv_heads == 0 and heads % g == 0)
    ]
