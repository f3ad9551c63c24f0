"""The transforms of one layer that change nothing, and when each of them is exact.

Attention reads keys only through q·k and values only through o v. Whatever is done to keys (or
values) and undone in queries (or outputs) therefore leaves the layer's output as it is, unless a
norm, a clamp or a gate stands between. Reordering heads is in `permute.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.heads.blocks import join_planes, split_planes
from upcycle.heads.permute import can_reorder, permute_kv_heads

RowMap = Callable[[Tensor], Tensor]
_UNIT = 1e-9  # how far a factor's modulus may be from 1


@dataclass(frozen=True)
class Freedom:
    """Which transforms of a layer's weights are exact.

    Attributes:
        keys: "scale" is any complex factor per head and rotary plane and any invertible map of
            each head's position-free channels; "rotation" is the factors of modulus 1 and the
            orthogonal maps among them; "none".
        keys_reason: why no more, or what makes them exact.
        values: "linear" is any invertible map of each head; "scale" is a factor per channel;
            "none".
        values_reason: the same for values.
        value_bias: whether the bias of the values can move into the bias of the output.
        value_bias_reason: the same for it.
    """

    keys: Literal["scale", "rotation", "none"]
    keys_reason: str
    values: Literal["linear", "scale", "none"]
    values_reason: str
    value_bias: bool
    value_bias_reason: str


def freedom(weights: AttentionWeights) -> Freedom:
    """The exact transforms of these weights, each with the reason."""
    return Freedom(*_keys(weights), *_values(weights), *_value_bias(weights))


def transform_keys(weights: AttentionWeights, planes: Tensor, passing: Tensor) -> AttentionWeights:
    """Multiply keys and undo it in their queries; both become fp64.

    A real 2 x 2 matrix commutes with every rotation of its plane only if it is a complex factor,
    and planes of different frequencies cannot be mixed: k ← c k, q ← q / c̄ per plane. Channels
    without position take any matrix: k ← B k, q ← B⁻ᵀ q.

    Args:
        weights: one layer.
        planes: [K, P] complex factors c, none 0.
        passing: [K, p, p] invertible matrices B.

    Raises:
        PlanError: it would change the output, see `freedom`.
    """
    allowed = freedom(weights)
    rotations = torch.allclose(planes.abs(), planes.abs().new_ones(()), atol=_UNIT) and (
        torch.allclose(passing @ passing.mT, torch.eye(passing.shape[-1]).to(passing), atol=_UNIT)
    )
    _require(
        allowed.keys == "scale" or (allowed.keys == "rotation" and rotations),
        "this transform of the keys",
        allowed.keys_reason,
    )
    group = weights.num_attention_heads // weights.num_key_value_heads

    def keys(rows: Tensor) -> Tensor:
        turning, still = split_planes(rows, weights.rope)
        return join_planes(turning * planes[..., None], passing @ still, weights.rope)

    def queries(rows: Tensor) -> Tensor:
        turning, still = split_planes(rows, weights.rope)
        undone = torch.linalg.inv(passing).mT.repeat_interleave(group, 0)
        factors = planes.conj().repeat_interleave(group, 0)[..., None]
        return join_planes(turning / factors, undone @ still, weights.rope)

    k, k_bias = map_rows(keys, weights.k, weights.k_bias)
    q, q_bias = map_rows(queries, weights.q, weights.q_bias)
    return replace(weights, q=q, k=k, q_bias=q_bias, k_bias=k_bias)


def transform_values(weights: AttentionWeights, matrices: Tensor) -> AttentionWeights:
    """V ← A v per KV head and o ← o A⁻¹ in its query heads; both become fp64.

    Args:
        weights: one layer.
        matrices: [K, e, e] invertible matrices A.

    Raises:
        PlanError: it would change the output, see `freedom`.
    """
    allowed = freedom(weights)
    diagonal = bool((matrices == torch.diag_embed(matrices.diagonal(dim1=1, dim2=2))).all())
    _require(
        allowed.values == "linear" or (allowed.values == "scale" and diagonal),
        "this transform of the values",
        allowed.values_reason,
    )
    group = weights.num_attention_heads // weights.num_key_value_heads
    v, v_bias = map_rows(lambda rows: matrices @ rows, weights.v, weights.v_bias)
    undone = torch.linalg.inv(matrices).repeat_interleave(group, 0)
    return replace(weights, v=v, v_bias=v_bias, o=weights.o.double() @ undone)


def fold_value_bias(weights: AttentionWeights) -> AttentionWeights:
    """Move the bias of the values into the bias of the output, in fp64.

    Attention weights sum to 1, so that the bias passes through them unchanged.

    Raises:
        PlanError: it would change the output, see `freedom`.
    """
    allowed = freedom(weights)
    _require(allowed.value_bias, "folding the bias of the values", allowed.value_bias_reason)
    assert weights.v_bias is not None
    assert weights.o_bias is not None
    group = weights.num_attention_heads // weights.num_key_value_heads
    bias = weights.v_bias.double().repeat_interleave(group, 0)
    return replace(
        weights,
        v_bias=torch.zeros_like(weights.v_bias),
        o_bias=weights.o_bias.double() + torch.einsum("hDe,he->D", weights.o.double(), bias),
    )


def scramble(weights: AttentionWeights, generator: torch.Generator) -> AttentionWeights:
    """Every exact transform at once, drawn at random: other weights for the same output."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    allowed = freedom(weights)
    kv_heads, width = weights.v.shape[:2]
    turning, still = split_planes(weights.k[..., :1].double(), weights.rope)
    if allowed.keys != "none":
        # Singular values between 1/2 and 2, so that fp64 keeps its digits.
        size = draw(kv_heads, turning.shape[1]).tanh().exp2()
        free = size if allowed.keys == "scale" else torch.ones_like(size)
        planes = torch.polar(free, 3 * draw(kv_heads, turning.shape[1]))
        passing = _random_maps(draw, kv_heads, still.shape[1], allowed.keys == "scale")
        weights = transform_keys(weights, planes, passing)
    if allowed.values == "linear":
        weights = transform_values(weights, _random_maps(draw, kv_heads, width, True))
    if allowed.values == "scale":
        weights = transform_values(weights, draw(kv_heads, width).tanh().exp2().diag_embed())
    if allowed.value_bias:
        weights = fold_value_bias(weights)
    if not can_reorder(weights)[0]:
        return weights
    return permute_kv_heads(weights, torch.randperm(kv_heads, generator=generator).tolist())


def map_rows(function: RowMap, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A linear map of the channels of rows [heads, d, D] and their bias [heads, d], in fp64.

    The bias is the column of a constant input, so that one map serves both.
    """
    if bias is None:
        return function(rows.double()), None
    both = function(torch.cat((rows.double(), bias.double()[..., None]), -1))
    return both[..., :-1], both[..., -1]


def stored_like(weights: AttentionWeights, source: AttentionWeights) -> AttentionWeights:
    """The weights with every tensor in the dtype that it has in `source`."""
    changed: dict[str, Any] = {}
    for field in fields(AttentionWeights):
        new, old = getattr(weights, field.name), getattr(source, field.name)
        if isinstance(new, Tensor) and isinstance(old, Tensor) and new.dtype != old.dtype:
            changed[field.name] = new.to(old.dtype)
    return replace(weights, **changed)


def _keys(weights: AttentionWeights) -> tuple[Literal["scale", "rotation", "none"], str]:
    norm = weights.qk_norm
    if weights.clip_qkv is not None:
        return "none", f"queries and keys are clamped to ±{weights.clip_qkv:g}"
    if norm is None:
        return "scale", "nothing stands between the projections and their product"
    if norm.kind == "layer":
        return "none", "a LayerNorm subtracts the mean of a head's channels"
    for weight in (weights.q_norm, weights.k_norm):
        if weight is not None and not _even(weight, weights):
            return "none", "the weight of the RMS norm differs inside a rotary plane"
    return "rotation", "the RMS norm keeps rotations and nothing else"


def _even(weight: Tensor, weights: AttentionWeights) -> bool:
    """Whether a norm's weight is one number in each plane and over the other channels."""
    planes, passing = split_planes(weight.double().reshape(-1, weight.shape[-1]), weights.rope)
    return bool((planes.real == planes.imag).all() and (passing == passing[:, :1]).all())


def _values(weights: AttentionWeights) -> tuple[Literal["linear", "scale", "none"], str]:
    if weights.clip_qkv is not None:
        return "none", f"values are clamped to ±{weights.clip_qkv:g}"
    if weights.gate is not None:
        return "scale", "a gate multiplies each channel of the attended values"
    return "linear", "nothing stands between the values and the output projection"


def _value_bias(weights: AttentionWeights) -> tuple[bool, str]:
    if weights.v_bias is None or weights.o_bias is None:
        return False, "values and output do not both have a bias"
    if weights.clip_qkv is not None:
        return False, f"values are clamped to ±{weights.clip_qkv:g}"
    if weights.gate is not None:
        return False, "a gate multiplies each channel of the attended values"
    if weights.sinks is not None:
        return False, "attention weights beside a sink do not sum to 1"
    return True, "attention weights sum to 1"


def _require(exact: bool, what: str, reason: str) -> None:
    if not exact:
        raise PlanError(
            f"{what} would change the layer's output: {reason}",
            where="the attention's weights",
            fix="use only the transforms that `freedom` allows",
        )


def _random_maps(draw: Callable[..., Tensor], heads: int, size: int, stretched: bool) -> Tensor:
    """[heads, size, size] random orthogonal matrices, or well-conditioned invertible ones."""
    left: Tensor = torch.linalg.qr(draw(heads, size, size)).Q
    if not stretched:
        return left
    right: Tensor = torch.linalg.qr(draw(heads, size, size)).Q
    return left * draw(heads, 1, size).tanh().exp2() @ right
