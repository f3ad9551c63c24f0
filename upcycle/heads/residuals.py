"""What sharing one KV head costs a group, before anything is converted.

The energy of keys and values that no shared head can carry, in the metric of the queries and of the
output projections that read them: what the closed forms of `lowrank` leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.heads.blocks import channel_signals, diagonal_blocks, per_kv_head
from upcycle.heads.gauge import freedom
from upcycle.heads.lowrank import treatment
from upcycle.heads.moments import LayerMoments, regularised
from upcycle.heads.procrustes import key_rotations, rotate_moments
from upcycle.heads.subspace import (
    mean_residual,
    mean_signal_residual,
    rank_one,
    shared_subspace,
)

# Of a cost: enough for the ridge to tell copies from others on the poorest text, too few for the
# rounding of copies.
_DIGITS = 9


@dataclass(frozen=True)
class Residual:
    """Lost energy as fractions of that of all heads of the layer.

    Attributes:
        keys: of the keys, as the queries weigh them.
        values: of the values, as the output projections weigh them.
    """

    keys: float
    values: float

    def __add__(self, other: "Residual") -> "Residual":
        return Residual(self.keys + other.keys, self.values + other.values)


class LayerResiduals:
    """The residuals of any groups of one layer's KV heads.

    Args:
        weights: the layer.
        moments: of the layer.
    """

    def __init__(self, weights: AttentionWeights, moments: LayerMoments) -> None:
        moments = replace(regularised(moments, weights), attended=None, attended_mean=None)
        if weights.o_bias is not None and weights.sinks is None and weights.gate is None:
            # The bias of the output makes up for the mean, see `lowrank`.
            mean = moments.value_mean
            moments = replace(moments, values=moments.values - mean[:, None] * mean)
        o = weights.o.double()
        self._kv_heads = weights.num_key_value_heads
        self._moments = moments
        self._metric = per_kv_head(o.mT @ o, self._kv_heads)
        self._treatment = treatment(weights)
        self._turns = freedom(weights).keys == "rotation"
        self._total = self._energies(moments, self._metric)

    def of_group(self, heads: Sequence[int]) -> Residual:
        """What these KV heads lose by sharing one."""
        moments, metric = self._moments.select(heads), self._metric[list(heads)]
        total_keys, total_values = self._total
        return Residual(
            float(self._keys(moments)) / total_keys,
            float(self._values(moments.values, metric)) / total_values,
        )

    def of_groups(self, groups: int, order: Sequence[int] | None = None) -> Residual:
        """What the layer loses with `groups` KV heads, contiguous in `order`."""
        heads = list(range(self._kv_heads)) if order is None else list(order)
        size = len(heads) // groups
        parts = [self.of_group(heads[i : i + size]) for i in range(0, len(heads), size)]
        return sum(parts, Residual(0.0, 0.0))

    def cost(self, heads: Sequence[int]) -> float:
        """The two fractions together: the cost of a group for `search_groups`.

        Rounded, so that groups of copies tie whatever the last bits of the moments are.
        """
        residual = self.of_group(heads)
        return round(residual.keys + residual.values, _DIGITS)

    def _keys(self, moments: LayerMoments) -> Tensor:
        kv_heads, way = moments.num_key_value_heads, self._treatment.keys
        energy = per_kv_head(moments.queries, kv_heads).mT  # [P, n]
        metric = per_kv_head(moments.passing_queries, kv_heads)  # [n, p, p]
        if self._turns:
            moments = rotate_moments(moments, *key_rotations(moments, 1))
        keys, passing = moments.keys, moments.passing_keys
        if way == "complex":
            lost = rank_one(keys, energy).residual.sum()
            return lost + shared_subspace(passing, metric).residual if passing.numel() else lost
        if way == "real":
            signals = channel_signals(passing, metric.diagonal(dim1=1, dim2=2), 1)
            return rank_one(keys.real, energy).residual.sum() + rank_one(*signals).residual.sum()
        return mean_signal_residual(keys.real, energy).sum() + mean_residual(passing, metric)

    def _values(self, values: Tensor, metric: Tensor) -> Tensor:
        way = self._treatment.values
        if way == "subspace":
            return shared_subspace(values, metric).residual
        if way == "channels":
            signals = channel_signals(values, metric.diagonal(dim1=1, dim2=2), 1)
            return rank_one(*signals).residual.sum()
        return mean_residual(values, metric)

    def _energies(self, moments: LayerMoments, metric: Tensor) -> tuple[float, float]:
        """All that there is to lose, of keys and of values."""
        heads = self._kv_heads
        energy = per_kv_head(moments.queries, heads)
        sizes = moments.keys.real.diagonal(dim1=1, dim2=2).mT  # [K, P]
        queries = per_kv_head(moments.passing_queries, heads)
        keys = (energy * sizes).sum()
        keys = keys + (queries * diagonal_blocks(moments.passing_keys, heads)).sum()
        values = (metric * diagonal_blocks(moments.values, heads)).sum()
        return float(keys), float(values)
