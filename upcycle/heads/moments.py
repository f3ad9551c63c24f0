"""Second moments of one layer's queries, keys and values over calibration tokens.

They are all that the calibrated methods need of a text. They live in the space of the activations
(K e channels at most), never as a D x D matrix per head. Letters: P rotary planes of a head, p
position-free key channels, the others as in `attention.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights, QkNorm
from upcycle.heads.blocks import clean_groups, grouped, select_blocks, split_planes, with_bias
from upcycle.heads.reference import normalise, project

RIDGE = 1e-6
_ROWS_AT_ONCE = 256  # of a sum of products
_SQUARES = ("passing_keys", "values")  # the large ones


@dataclass(frozen=True)
class LayerMoments:
    """Uncentred second moments, fp64, of what enters the attention product, before RoPE.

    Biases are included, and clipping. Keys and queries are normalised and weighted if their norm
    comes before RoPE; if it comes after, they are normalised without its weight, since the RMS
    does not change under rotation but its weight does not commute with it.

    Attributes:
        tokens: how many tokens they are the mean over.
        input_energy: mean square of an input channel.
        keys: [P, K, K] complex, E[k kᴴ] of the heads' keys in each rotary plane.
        passing_keys: [K p, K p], E[k kᵀ] of the position-free channels of all heads.
        key_factor: [K], the mean factor by which the norm scales a key, 1 without a norm.
        queries: [H, P], E|q|² in each rotary plane.
        passing_queries: [H, p, p], E[q qᵀ] of each head's position-free channels.
        values: [K e, K e], E[v vᵀ] of all heads.
        value_mean: [K e], E[v].
        attended: [H, m, m], E[y yᵀ] of the values of a block of m / e neighbouring KV heads, the
            block of query head h's own one, under the attention of h; None if not collected.
        attended_mean: [H, m], E[y], or None.
    """

    tokens: int
    input_energy: float
    keys: Tensor
    passing_keys: Tensor
    key_factor: Tensor
    queries: Tensor
    passing_queries: Tensor
    values: Tensor
    value_mean: Tensor
    attended: Tensor | None = None
    attended_mean: Tensor | None = None

    @property
    def num_key_value_heads(self) -> int:
        """K."""
        return self.keys.shape[1]

    def select(self, order: Sequence[int]) -> "LayerMoments":
        """The moments of KV heads `order` with their query heads: of `permute_kv_heads`' weights.

        Attended moments of blocks smaller than K are dropped, as other blocks arise.
        """
        kv_heads, picked = self.num_key_value_heads, list(order)
        group = self.queries.shape[0] // kv_heads
        queries = [head * group + member for head in order for member in range(group)]
        attended, mean = self.attended, self.attended_mean
        if attended is not None and mean is not None:
            whole = attended.shape[-1] == self.values.shape[-1]
            attended = select_blocks(attended[queries], picked, kv_heads) if whole else None
            mean = grouped(mean[queries].mT, kv_heads)[picked].flatten(0, 1).mT
            mean = mean if whole else None
        return replace(
            self,
            keys=self.keys[:, picked][:, :, picked],
            passing_keys=select_blocks(self.passing_keys, picked, kv_heads),
            key_factor=self.key_factor[picked],
            queries=self.queries[queries],
            passing_queries=self.passing_queries[queries],
            values=select_blocks(self.values, picked, kv_heads),
            value_mean=grouped(self.value_mean, kv_heads)[picked].flatten(),
            attended=attended,
            attended_mean=mean,
        )


class MomentCollector:
    """Accumulates a layer's moments batch by batch, each in the dtype of its input.

    Args:
        weights: the layer, on the device of the inputs.
        attended_heads: of how many neighbouring KV heads (a divisor of K) the attended values are
            wanted, 0 for none; the n heads of a group serve conversions to K / n heads or more.
    """

    def __init__(self, weights: AttentionWeights, *, attended_heads: int = 0) -> None:
        self.attended_heads = attended_heads
        self._weights = weights
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0
        self._attended_tokens = 0

    def add(self, x: Tensor) -> None:
        """Count the attention inputs x [N, D], as they come out of the layer's norm."""
        # One after the other: what each of them needs is gone before the next.
        self._add_keys(x)
        self._add_queries(x)
        self._add_values(x)
        self._add("input_energy", x.square().mean(-1).sum().view(1))
        self._tokens += x.shape[0]

    def _add_keys(self, x: Tensor) -> None:
        weights = self._weights
        k = project(weights.k, weights.k_bias, x)  # [K, N, d]
        self._add("key_factor", _norm_factor(k, weights.qk_norm).sum(-1))
        k = self._before_rope(k, weights.k_norm, weights.k_norm_bias)
        planes, passing = split_planes(k.mT, weights.rope)  # [K, P, N], [K, p, N]
        by_plane, flat = planes.transpose(0, 1), passing.flatten(0, 1)
        self._add("keys", _products(by_plane))
        self._add_square("passing_keys", flat)

    def _add_queries(self, x: Tensor) -> None:
        weights = self._weights
        q = project(weights.q, weights.q_bias, x)  # [H, N, d]
        q = self._before_rope(q, weights.q_norm, weights.q_norm_bias)
        planes, passing = split_planes(q.mT, weights.rope)
        self._add("queries", planes.abs().square().sum(-1))
        self._add("passing_queries", _products(passing))

    def _add_values(self, x: Tensor) -> None:
        v = self._values(x).flatten(0, 1)  # [K e, N]
        self._add_square("values", v)
        self._add("value_mean", _wide(v).sum(-1))

    def _before_rope(self, heads: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Queries or keys [heads, N, d], see `LayerMoments`."""
        norm = self._weights.qk_norm
        if norm is not None and norm.after_rope:
            heads = normalise(heads, norm, None, None)
        elif norm is not None:
            heads = normalise(heads, norm, weight, bias)
        return _clip(self._weights, heads)

    def add_attended(self, x: Tensor, probabilities: Tensor) -> None:
        """Count one sequence x [T, D] under attention probabilities [H, T, T] (query, key)."""
        assert self.attended_heads, "attended moments were not asked for"
        values = self._values(x)  # [K, e, T]
        group = self._weights.num_attention_heads // self._weights.num_key_value_heads
        moments, sums = [], []
        for head, weights in enumerate(probabilities):
            start = head // group // self.attended_heads * self.attended_heads
            attended = (
                values[start : start + self.attended_heads].flatten(0, 1) @ weights.mT
            )  # [m, T]
            moments.append(_products(attended).cpu())
            sums.append(attended.sum(-1))
        self._add("attended", torch.stack(moments))
        self._add("attended_mean", torch.stack(sums))
        self._attended_tokens += x.shape[0]

    def moments(self) -> LayerMoments:
        """The means over all tokens so far."""
        assert self._tokens, "no tokens were counted"
        means = {name: total / self._tokens_of(name) for name, total in self._sums.items()}
        for name in _SQUARES:
            _mirror(means[name])
        return LayerMoments(
            tokens=self._tokens, input_energy=float(means.pop("input_energy")), **means
        )

    def _tokens_of(self, name: str) -> int:
        return self._attended_tokens if name.startswith("attended") else self._tokens

    def _values(self, x: Tensor) -> Tensor:
        return _clip(self._weights, project(self._weights.v, self._weights.v_bias, x)).mT

    def _add_square(self, name: str, rows: Tensor) -> None:
        """Add X Xᵀ of rows [c, N]: its lower triangle, and never a second matrix of that size."""
        if name not in self._sums:
            self._sums[name] = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        wide = _wide(rows.detach())
        for block in _blocks(len(rows)):
            part = _products(wide[block], wide[: block.stop])
            self._sums[name][block, : block.stop] += part.cpu()

    def _add(self, name: str, batch: Tensor) -> None:
        batch = batch.detach().cpu().to(_wide_dtype(batch))
        if name in self._sums:
            self._sums[name] += batch
        else:
            self._sums[name] = batch


def white_moments(weights: AttentionWeights) -> LayerMoments:
    """The moments under inputs of unit covariance and no mean: what the weights alone tell."""
    hidden = weights.q.shape[-1]
    collector = MomentCollector(weights)
    x = torch.eye(hidden, dtype=torch.float64) * hidden**0.5
    collector.add(x)
    collector.add(-x)
    return collector.moments()


def regularised(
    moments: LayerMoments,
    weights: AttentionWeights,
    groups: int | None = None,
    *,
    ridge: float = RIDGE,
) -> LayerMoments:
    """The moments as if every input channel had a little noise of its own.

    Directions that no calibration token excited then count as the weights have them, and heads
    that are copies of one another stay copies. Keys behind a norm are taken for linear, with its
    mean factor; queries behind one are left as they are. Heads that were pruned, whose output is 0
    whatever they attend to, get no queries, so that the others' keys are not bent towards theirs.

    Args:
        moments: of the layer.
        weights: the layer.
        groups: g; what the heads of a group have with each other is then freed of rounding, see
            `within_copies`.
        ridge: the noise's energy as a fraction of the mean energy of an input channel.
    """
    noise = ridge * moments.input_energy
    kv_heads = weights.num_key_value_heads
    value_noise = _value_noise(weights, noise)
    changed: dict[str, Any] = {}
    if moments.attended is not None:
        block = moments.attended.shape[-1] // weights.v.shape[1]
        group = weights.num_attention_heads // kv_heads
        noises = [
            select_blocks(value_noise, range(start, start + block), kv_heads)
            for start in (head // group // block * block for head in range(len(weights.q)))
        ]
        changed["attended"] = moments.attended + torch.stack(noises)
    changed["values"] = value_noise.add_(moments.values)
    keys, key_constants = _linear_keys(weights, moments.key_factor)
    planes, passing = split_planes(keys, weights.rope)
    by_plane, flat = planes.transpose(0, 1), passing.flatten(0, 1)
    changed["keys"] = moments.keys + noise * (by_plane @ by_plane.mH)
    changed["passing_keys"] = moments.passing_keys + noise * (flat @ flat.mT)
    if weights.qk_norm is None and moments.passing_queries.numel():
        still = split_planes(weights.q.double(), weights.rope)[1]
        changed["passing_queries"] = moments.passing_queries + noise * (still @ still.mT)
    if bool((silent := _silent_heads(weights)).any()):
        for name in ("queries", "passing_queries"):
            changed[name] = changed.get(name, getattr(moments, name)).clone()
            changed[name][silent] = 0
    if groups is not None and weights.clip_qkv is None:
        constants = split_planes(key_constants, weights.rope)[1]
        clean_groups(changed["passing_keys"], groups, torch.cat((passing, constants), -1))
        clean_groups(changed["values"], groups, with_bias(weights.v, weights.v_bias))
    return replace(moments, **changed)


def _linear_keys(weights: AttentionWeights, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [K, d, D] and constants [K, d, c] of the keys that moments are of, in fp64.

    A norm is taken for its mean factor [K].
    """
    rows = weights.k.double()
    shift = rows[..., :0] if weights.k_bias is None else weights.k_bias.double()[..., None]
    norm = weights.qk_norm
    if norm is None:
        return rows, shift
    both = torch.cat((rows, shift), -1)
    if norm.kind == "layer":
        both = both - both.mean(1, keepdim=True)
    both = both * factor[:, None, None]
    if not norm.after_rope:
        if weights.k_norm is not None:
            both = both * (weights.k_norm.double() + norm.offset)[..., None]
        if weights.k_norm_bias is not None:
            bias = weights.k_norm_bias.double().expand(rows.shape[:2])
            both = torch.cat((both, bias[..., None]), -1)
    width = rows.shape[-1]
    return both[..., :width], both[..., width:]


def _silent_heads(weights: AttentionWeights) -> Tensor:
    """[H] whether a query head's output is 0: its values are, or the projection that reads them."""
    values = weights.v.flatten(1).any(1)
    if weights.v_bias is not None:
        values = values | weights.v_bias.any(1)
    group = weights.num_attention_heads // weights.num_key_value_heads
    return ~(values.repeat_interleave(group) & weights.o.flatten(1).any(1))


def _value_noise(weights: AttentionWeights, noise: float) -> Tensor:
    """[K e, K e] what noise of this energy in every input channel adds to the values' moments."""
    values = weights.v.double().flatten(0, 1)
    return (values @ values.mT).mul_(noise)


def _products(x: Tensor, y: Tensor | None = None) -> Tensor:
    """X Yᴴ of rows [..., c, N], of X with itself without Y, in fp64.

    In fp32 their last bits would hide the ridge: directions without energy look as if they had
    some, of either sign, and of another size on each processor.
    """
    wide = _wide(x)
    return wide @ (wide if y is None else _wide(y)).mH


def _wide(x: Tensor) -> Tensor:
    return (x.cpu() if x.device.type == "mps" else x).to(_wide_dtype(x))  # which has no fp64


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, size))


def _mirror(square: Tensor) -> None:
    """Fill the upper triangle [c, c] by the lower one, in place."""
    for block in _blocks(len(square)):
        own = square[block, block]
        own.copy_(own.tril() + own.tril(-1).mT)
        square[block, block.stop :] = square[block.stop :, block].mT


def _clip(weights: AttentionWeights, heads: Tensor) -> Tensor:
    limit = weights.clip_qkv
    return heads if limit is None else heads.clamp(-limit, limit)


def _norm_factor(k: Tensor, norm: QkNorm | None) -> Tensor:
    """[K, N] by how much the norm scales the keys [K, N, d], its weight aside."""
    if norm is None:
        return k.new_ones(k.shape[:2])
    if norm.kind == "layer":
        k = k - k.mean(-1, keepdim=True)
    dims = (0, 2) if norm.span == "all" else (2,)
    return torch.rsqrt(k.square().mean(dims, keepdim=True) + norm.eps)[..., 0].expand(k.shape[:2])
