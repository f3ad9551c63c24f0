"""Alignment of heads against brute force and known answers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.heads.layers import (
    NORMS,
    ROPES,
    inputs,
    layers,
    map_heads,
    moments_of,
    random_layer,
    relative,
)
from upcycle.attention import AttentionWeights
from upcycle.heads.gauge import transform_keys, transform_values
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.moments import LayerMoments
from upcycle.heads.procrustes import align_channels, align_planes
from upcycle.heads.reference import attention_output

METHOD = get_method("procrustes")


def request(groups: int, moments: LayerMoments | None = None) -> MergeRequest:
    return MergeRequest(groups, 0, 0, 0.02, moments)


def rotated_copies(weights: AttentionWeights, seed: int = 0) -> AttentionWeights:
    """Another gauge of a layer, by rotations alone."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, width, rotary = *weights.v.shape[:2], weights.rope.rotary_dim
    still = weights.k.shape[1] - rotary

    def turns(size: int) -> Tensor:
        noise = torch.randn(kv_heads, size, size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise).Q

    angles = torch.randn(kv_heads, rotary // 2, generator=generator, dtype=torch.float64) * 3
    turned = transform_keys(weights, torch.polar(torch.ones_like(angles), angles), turns(still))
    return transform_values(turned, turns(width))


@given(layers(), st.booleans())
def test_equal_heads_give_what_the_mean_gives(weights: AttentionWeights, text: bool) -> None:
    group = weights.num_key_value_heads
    equal = map_heads(weights, lambda heads: heads[:1].repeat_interleave(group, 0))
    moments = moments_of(equal, inputs(5)) if text else None
    found = METHOD.merge(equal, request(1, moments))
    mean = get_method("mean").merge(equal, request(1))
    for name in ("q", "k", "v", "o"):
        torch.testing.assert_close(getattr(found, name), getattr(mean, name), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("text", [True, False])
def test_turned_copies_of_a_head_are_brought_back(rope: object, text: bool) -> None:
    single = random_layer(8, 4, rope, bias=True)
    copies = rotated_copies(map_heads(single, lambda heads: heads[[0, 0, 2, 2]]))
    x = inputs(30)
    moments = moments_of(copies, x) if text else None
    found = attention_output(METHOD.merge(copies, request(2, moments)), x)
    expected = attention_output(copies, x)
    assert relative(found, expected) < 1e-10
    assert (
        relative(attention_output(get_method("mean").merge(copies, request(2)), x), expected) > 0.1
    )


def test_rotations_pass_a_norm_of_even_weight() -> None:
    weights = random_layer(8, 4, norm=NORMS["shared"])
    even = replace(weights, q_norm=torch.ones(8).double(), k_norm=torch.ones(8).double())
    copies = rotated_copies(map_heads(even, lambda heads: heads[[0, 0, 2, 2]]))
    x = inputs(30)
    found = METHOD.merge(copies, request(2, moments_of(copies, x)))
    assert relative(attention_output(found, x), attention_output(copies, x)) < 1e-10


def test_no_small_turn_brings_aligned_signals_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(3, 4, 9, generator=generator, dtype=torch.complex128)
    moment = factor @ factor.mH

    def agreement(turns: Tensor) -> Tensor:
        return torch.einsum("pa,pab,pb->p", turns, moment, turns.conj()).real

    turns = align_planes(moment)
    torch.testing.assert_close(turns.abs(), torch.ones(3, 4).double())
    assert bool((agreement(turns) >= agreement(torch.ones_like(turns))).all())
    for _ in range(50):
        angles = torch.randn(3, 4, generator=generator, dtype=torch.float64) * 1e-2
        nearby = turns * torch.polar(torch.ones_like(angles), angles)
        assert bool((agreement(nearby) <= agreement(turns) * (1 + 1e-5)).all())


def test_no_small_turn_brings_aligned_heads_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    signals = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64)
    stacked = signals.flatten(0, 1)

    def spread(turns: Tensor) -> float:
        turned = turns @ signals
        return float((turned - turned.mean(0)).square().sum())

    turns = align_channels(stacked @ stacked.mT, 3)
    identity = torch.eye(5, dtype=torch.float64).expand(3, -1, -1)
    torch.testing.assert_close(turns @ turns.mT, identity)
    assert spread(turns) < spread(identity)
    for _ in range(50):
        noise = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64) * 1e-2
        nearby = torch.linalg.matrix_exp(noise - noise.mT) @ turns
        assert spread(nearby) >= spread(turns) * (1 - 1e-5)


def test_steps_name_what_stays_unaligned_and_why() -> None:
    assert METHOD.steps is not None
    plain = METHOD.steps(random_layer())
    assert plain.keys == plain.values == "aligned by rotations, then their mean"
    normed = METHOD.steps(random_layer(norm=NORMS["shared"], gate=True))
    assert normed.keys.startswith("mean (the weight of the RMS norm differs")
    assert normed.values.startswith("mean (a gate")


@pytest.mark.parametrize("kind", [{"clip": 1.0}, {"gate": True}, {"norm": NORMS["head"]}])
def test_what_cannot_be_aligned_is_pooled(kind: dict[str, object]) -> None:
    weights, x = random_layer(8, 4, **kind), inputs(20)
    found = METHOD.merge(weights, request(2, moments_of(weights, x)))
    mean = get_method("mean").merge(weights, request(2))
    if "gate" not in kind:
        assert torch.equal(found.k, mean.k)
    if "norm" not in kind:
        assert torch.equal(found.v, mean.v)


def test_as_many_heads_as_before_are_the_same_tensors() -> None:
    weights = random_layer()
    assert METHOD.merge(weights, request(4)) is weights
