"""The exact transforms change no output, and are refused where they would."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.heads.layers import NORMS, ROPES, inputs, layers, random_layer, relative
from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.heads.gauge import (
    fold_value_bias,
    freedom,
    scramble,
    stored_like,
    transform_keys,
    transform_values,
)
from upcycle.heads.reference import attention_output

LIMIT = 1e-10


def even(weights: AttentionWeights) -> AttentionWeights:
    """The layer with a norm weight that is one number per head."""
    q_norm, k_norm = (w[..., :1].expand(w.shape) for w in (weights.q_norm, weights.k_norm))
    return replace(weights, q_norm=q_norm, k_norm=k_norm)


def planes_of(weights: AttentionWeights, value: complex = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads, rotary = weights.num_key_value_heads, weights.rope.rotary_dim
    planes = torch.full((kv_heads, rotary // 2), value, dtype=torch.complex128)
    passing = torch.eye(weights.k.shape[1] - rotary, dtype=torch.float64)
    return planes, passing.expand(kv_heads, -1, -1)


@given(layers(), st.integers(0, 100))
def test_every_transform_at_once_keeps_the_output(weights: AttentionWeights, seed: int) -> None:
    x = inputs(20)
    expected = attention_output(weights, x)
    scrambled = scramble(weights, torch.Generator().manual_seed(seed))
    assert relative(scrambled.v, weights.v) > 0.1
    assert relative(scrambled.k, weights.k) > 0.1
    assert relative(attention_output(scrambled, x), expected) < LIMIT
    planted = replace(scrambled, v=scrambled.v * (1 + 1e-8))
    assert relative(attention_output(planted, x), expected) > LIMIT


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("rope", ROPES)
def test_behind_a_norm_only_what_is_exact_is_free(name: str, rope: object) -> None:
    norm, x = NORMS[name], inputs(20)
    uneven = random_layer(8, 4, rope, norm=norm, bias=True)
    weights = even(uneven)
    assert freedom(uneven).keys == "none"
    assert freedom(weights).keys == ("rotation" if norm.kind == "rms" else "none")
    for layer in (uneven, weights):
        scrambled = scramble(layer, torch.Generator().manual_seed(0))
        expected = attention_output(layer, x)
        assert relative(attention_output(scrambled, x), expected) < LIMIT


def test_a_weight_free_norm_leaves_rotations() -> None:
    weights = replace(random_layer(norm=NORMS["after"]), q_norm=None, k_norm=None)
    assert freedom(weights).keys == "rotation"
    turned = transform_keys(weights, *planes_of(weights, 1j))
    x = inputs(20)
    assert relative(attention_output(turned, x), attention_output(weights, x)) < LIMIT


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (even(random_layer(norm=NORMS["shared"])), "keeps rotations and nothing else"),
        (random_layer(norm=NORMS["shared"]), "differs inside a rotary plane"),
        (random_layer(norm=NORMS["head"]), "LayerNorm"),
        (random_layer(clip=2.0), "clamped to ±2"),
    ],
)
def test_a_key_scale_that_would_change_the_output_is_refused(
    layer: AttentionWeights, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        transform_keys(layer, *planes_of(layer, 2.0))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(random_layer(clip=2.0), "clamped"), (random_layer(gate=True), "gate")],
)
def test_a_value_map_that_would_change_the_output_is_refused(
    layer: AttentionWeights, reason: str
) -> None:
    matrices = torch.randn(4, 8, 8, dtype=torch.float64)
    with pytest.raises(PlanError, match=reason):
        transform_values(layer, matrices)


def test_a_gate_leaves_a_factor_per_channel() -> None:
    weights, x = random_layer(8, 4, gate=True, bias=True), inputs(20)
    scaled = transform_values(weights, (torch.rand(4, 8, dtype=torch.float64) + 1).diag_embed())
    assert freedom(weights).values == "scale"
    assert relative(attention_output(scaled, x), attention_output(weights, x)) < LIMIT


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (random_layer(), "do not both have a bias"),
        (random_layer(bias=True, sinks=True), "sink"),
        (random_layer(bias=True, gate=True), "gate"),
        (random_layer(bias=True, clip=1.0), "clamped"),
    ],
)
def test_a_value_bias_that_must_stay_is_refused(layer: AttentionWeights, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        fold_value_bias(layer)


def test_a_value_bias_moves_into_the_output() -> None:
    weights, x = random_layer(8, 4, bias=True), inputs(20)
    folded = fold_value_bias(weights)
    assert folded.v_bias is not None
    assert torch.count_nonzero(folded.v_bias) == 0
    assert relative(attention_output(folded, x), attention_output(weights, x)) < LIMIT


def test_tensors_return_to_the_dtype_of_the_source() -> None:
    weights = random_layer(bias=True)
    half = replace(weights, v=weights.v.half(), o=weights.o.bfloat16())
    stored = stored_like(scramble(half, torch.Generator().manual_seed(0)), half)
    assert (stored.v.dtype, stored.o.dtype, stored.q.dtype) == (
        torch.float16,
        torch.bfloat16,
        torch.float64,
    )
