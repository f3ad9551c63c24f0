"""The exact reordering of heads: the first of the transforms that change no output."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.heads.pool import norm_is_per_head


def permute_kv_heads(weights: AttentionWeights, order: Sequence[int]) -> AttentionWeights:
    """Put KV head `order[i]` at place i, each with its own query heads and output columns.

    Exact, since the sum over heads does not depend on their order (E1 of the gauge group); what
    belongs to a head, such as its norm weight, gate or sink, goes with it.
    """
    group = weights.num_attention_heads // weights.num_key_value_heads
    queries = [kv_head * group + member for kv_head in order for member in range(group)]

    def pick(tensor: Tensor | None, heads: Sequence[int]) -> Tensor | None:
        return None if tensor is None else tensor[list(heads)]

    per_head = norm_is_per_head(weights)
    return replace(
        weights,
        q=weights.q[queries],
        k=weights.k[list(order)],
        v=weights.v[list(order)],
        o=weights.o[queries],
        q_bias=pick(weights.q_bias, queries),
        k_bias=pick(weights.k_bias, order),
        v_bias=pick(weights.v_bias, order),
        q_norm=pick(weights.q_norm, queries) if per_head else weights.q_norm,
        k_norm=pick(weights.k_norm, order) if per_head else weights.k_norm,
        gate=pick(weights.gate, queries),
        sinks=pick(weights.sinks, queries),
    )
