"""The exact reordering of heads: the first of the transforms that change no output."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.heads.pool import norm_is_per_head


def can_reorder(weights: AttentionWeights) -> tuple[bool, str]:
    """Whether another order of KV heads gives the same output, and why."""
    if weights.alibi:
        return False, "ALiBi's slope of a query head goes by its place, and stays there"
    return True, "the sum over heads does not depend on their order"


def permute_kv_heads(weights: AttentionWeights, order: Sequence[int]) -> AttentionWeights:
    """Put KV head `order[i]` at place i, each with its own query heads and output columns.

    Exact, since the sum over heads does not depend on their order (E1 of the gauge group); what
    belongs to a head, such as its norm weight, gate or sink, goes with it.

    Raises:
        PlanError: it would change the output, see `can_reorder`.
    """
    exact, reason = can_reorder(weights)
    if not exact and list(order) != list(range(weights.num_key_value_heads)):
        raise PlanError(
            f"another order of heads would change the layer's output: {reason}",
            where="the attention's weights",
            fix="keep the heads in their order",
        )
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
