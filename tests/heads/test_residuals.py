"""Residual energies against what a conversion really loses."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given

from tests.heads.layers import (
    NORMS,
    ROPES,
    inputs,
    layers,
    map_heads,
    moments_of,
    random_layer,
)
from upcycle.attention import AttentionWeights
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.residuals import LayerResiduals

KINDS = {
    "plain": {},
    "gate": {"gate": True},
    "clip": {"clip": 1.0},
    **{f"{name} norm": {"norm": norm} for name, norm in NORMS.items()},
}


def residuals(weights: AttentionWeights, tokens: int = 60) -> LayerResiduals:
    x = inputs(tokens, weights.q.shape[-1])
    return LayerResiduals(weights, moments_of(weights, x))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_between_equal_heads(rope: object, kind: str) -> None:
    weights = map_heads(random_layer(8, 4, rope, **KINDS[kind]), lambda heads: heads[[0, 0, 2, 2]])
    found = residuals(weights).of_groups(2)
    assert found.keys == pytest.approx(0, abs=1e-10)
    assert found.values == pytest.approx(0, abs=1e-10)
    crossed = residuals(weights).of_groups(2, [0, 2, 1, 3])
    assert crossed.keys > 1e-3
    assert crossed.values > 1e-3


@given(layers())
def test_fewer_heads_lose_more_and_as_many_nothing(weights: AttentionWeights) -> None:
    found = residuals(weights)
    kv_heads = weights.num_key_value_heads
    lost = [found.of_groups(g) for g in range(kv_heads, 0, -1) if kv_heads % g == 0]
    assert lost[0].keys == pytest.approx(0, abs=1e-10)
    assert lost[0].values == pytest.approx(0, abs=1e-10)
    for more, fewer in pairwise(lost):
        assert more.keys <= fewer.keys + 1e-12 <= 1 + 1e-9
        assert more.values <= fewer.values + 1e-12 <= 1 + 1e-9


@pytest.mark.parametrize("bias", [False, True])
def test_the_residual_of_values_is_the_error_of_the_output(bias: bool) -> None:
    weights = random_layer(8, 4, hidden=40, bias=bias)
    x = inputs(90, 40)
    moments = moments_of(weights, x)
    merged = get_method("lowrank").merge(weights, MergeRequest(2, 0, 0, 0.02, moments))
    lost = energy = 0.0
    for head in range(8):
        before = values_of(weights, head // 2, x) @ weights.o[head].mT
        after = values_of(merged, head // 4, x) @ merged.o[head].mT
        if bias:  # the constant is the output bias's
            before, after = before - before.mean(0), after - after.mean(0)
        lost += float((before - after).square().sum())
        energy += float(before.square().sum())
    assert LayerResiduals(weights, moments).of_groups(2).values == pytest.approx(
        lost / energy, rel=1e-4
    )


def values_of(weights: AttentionWeights, head: int, x: torch.Tensor) -> torch.Tensor:
    v = x @ weights.v[head].mT
    return v if weights.v_bias is None else v + weights.v_bias[head]


def test_the_cost_is_the_sum_of_both_fractions() -> None:
    found = residuals(random_layer(8, 4))
    parts = [found.of_group([0, 1]), found.of_group([2, 3])]
    together = found.of_groups(2)
    assert together == replace(
        parts[0], keys=parts[0].keys + parts[1].keys, values=parts[0].values + parts[1].values
    )
    # Rounded, so that copies tie whatever their last bits are.
    assert found.cost([0, 1]) == pytest.approx(parts[0].keys + parts[0].values, abs=1e-6)
