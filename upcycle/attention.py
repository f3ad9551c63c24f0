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


@dataclass(frozen=True)
class Rope:
    """How the d key channels pair up into rotary planes.

    Attributes:
        pairing: "half" pairs channel i with i + rotary_dim / 2, "interleaved" pairs 2i with 2i + 1,
            "none" has no rotary planes.
        rotary_dim: the leading channels that rotate; the others pass through.
    """

    pairing: RopePairing
    rotary_dim: int


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
        q_norm: query norm weight in the family's own shape, or None.
        k_norm: key norm weight in the family's own shape, or None.
        rope: the rotary layout.
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
    q_norm: "Tensor | None" = None
    k_norm: "Tensor | None" = None

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
