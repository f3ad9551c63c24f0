"""Moments against loops over tokens."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tests.heads.layers import NORMS, ROPES, inputs, moments_of, probabilities, random_layer
from upcycle.attention import AttentionWeights, Rope
from upcycle.heads.moments import MomentCollector, regularised, white_moments
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.reference import normalise


def heads_of(rows: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """[heads, d] of one token."""
    out = torch.stack([row @ x for row in rows])
    return out if bias is None else out + bias


def planes(head: Tensor, rope: Rope) -> list[complex]:
    half = rope.rotary_dim // 2
    if rope.pairing == "interleaved":
        return [complex(head[2 * i], head[2 * i + 1]) for i in range(half)]
    return [complex(head[i], head[i + half]) for i in range(half)]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("norm", [None, "shared", "offset", "all", "head"])
def test_moments_equal_loops_over_tokens(rope: Rope, norm: str | None) -> None:
    kind = NORMS[norm] if norm else None
    weights, x = random_layer(4, 2, rope, bias=True, norm=kind, value_dim=6), inputs(7)
    found = moments_of(weights, x)
    keys = torch.zeros_like(found.keys)
    queries, passing_queries = torch.zeros_like(found.queries), []
    passing, values, mean = [], [], []
    for token in x:
        q = heads_of(weights.q, weights.q_bias, token)
        k = heads_of(weights.k, weights.k_bias, token)
        if kind is not None:
            q = normalise(q[:, None], kind, weights.q_norm, None)[:, 0]
            k = normalise(k[:, None], kind, weights.k_norm, None)[:, 0]
        for p in range(rope.rotary_dim // 2):
            for a in range(2):
                for b in range(2):
                    pair = planes(k[a], rope)[p], planes(k[b], rope)[p]
                    keys[p, a, b] += pair[0] * pair[1].conjugate() / 7
            for head in range(4):
                queries[head, p] += abs(planes(q[head], rope)[p]) ** 2 / 7
        rest = k[:, rope.rotary_dim :].reshape(-1)
        passing.append(torch.outer(rest, rest))
        passing_queries.append(torch.stack([torch.outer(r, r) for r in q[:, rope.rotary_dim :]]))
        v = heads_of(weights.v, weights.v_bias, token).reshape(-1)
        values.append(torch.outer(v, v))
        mean.append(v)
    torch.testing.assert_close(found.keys, keys)
    torch.testing.assert_close(found.queries, queries)
    torch.testing.assert_close(found.passing_keys, torch.stack(passing).mean(0))
    torch.testing.assert_close(found.passing_queries, torch.stack(passing_queries).mean(0))
    torch.testing.assert_close(found.values, torch.stack(values).mean(0))
    torch.testing.assert_close(found.value_mean, torch.stack(mean).mean(0))
    assert found.tokens == 7
    assert found.input_energy == pytest.approx(float(x.square().mean()))


def test_a_norm_after_the_rotation_is_counted_without_its_weight() -> None:
    weights, x = random_layer(norm=NORMS["after"]), inputs(30)
    found = moments_of(weights, x)
    # Every head has mean square 1 on every token.
    energy = found.keys.real.diagonal(dim1=1, dim2=2).sum(0)
    torch.testing.assert_close(energy, torch.full_like(energy, 8), rtol=1e-4, atol=0)


def test_clamped_values_are_counted_clamped() -> None:
    found = moments_of(random_layer(clip=0.5), inputs(30))
    assert float(found.values.diagonal().max()) <= 0.25
    assert float(found.keys.real.diagonal(dim1=1, dim2=2).max()) <= 0.5


def test_the_key_factor_is_the_mean_of_the_norm() -> None:
    weights, x = random_layer(norm=NORMS["shared"]), inputs(30)
    keys = torch.einsum("kdD,tD->ktd", weights.k, x)
    expected = (1 / (keys.square().mean(-1) + 1e-6).sqrt()).mean(1)
    torch.testing.assert_close(moments_of(weights, x).key_factor, expected)
    assert torch.equal(moments_of(random_layer(), x).key_factor, torch.ones(4).double())


@pytest.mark.parametrize("block", [4, 2, 1])
def test_attended_moments_equal_loops_over_heads(block: int) -> None:
    weights, x = random_layer(8, 4, bias=True), inputs(9)
    attention = probabilities(weights, x)
    collector = MomentCollector(weights, attended_heads=block)
    collector.add(x)
    collector.add_attended(x, attention)
    found = collector.moments()
    assert found.attended is not None
    assert found.attended_mean is not None
    for head in range(8):
        start = head // 2 // block * block
        seen = [
            sum(
                attention[head, t, s]
                * heads_of(weights.v, weights.v_bias, x[s])[start : start + block].reshape(-1)
                for s in range(9)
            )
            for t in range(9)
        ]
        expected = torch.stack([torch.outer(y, y) for y in seen]).mean(0)
        torch.testing.assert_close(found.attended[head], expected)
        torch.testing.assert_close(found.attended_mean[head], torch.stack(seen).mean(0))


def test_batches_add_up() -> None:
    weights, x = random_layer(8, 4, ROPES[1]), inputs(40)
    collector = MomentCollector(weights)
    for batch in (x[:7], x[7:30], x[30:]):
        collector.add(batch)
    one, many = moments_of(weights, x), collector.moments()
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(many, field.name)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_single_precision_batches_are_summed_in_double() -> None:
    weights, x = random_layer(), inputs(40)
    collector = MomentCollector(weights)
    collector.add(x.float())
    found = collector.moments()
    assert (found.values.dtype, found.keys.dtype) == (torch.float64, torch.complex128)
    torch.testing.assert_close(found.values, moments_of(weights, x).values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [3, 1]])
def test_selected_moments_are_those_of_the_selected_heads(order: list[int]) -> None:
    weights, x = random_layer(8, 4, ROPES[1], bias=True), inputs(20)
    picked: AttentionWeights = permute_kv_heads(weights, order)
    found = moments_of(weights, x, attended=True).select(order)
    expected = moments_of(picked, x, attended=True)
    for field in fields(found):
        torch.testing.assert_close(getattr(found, field.name), getattr(expected, field.name))


def test_attended_moments_of_smaller_blocks_do_not_survive_a_new_order() -> None:
    weights, x = random_layer(8, 4), inputs(9)
    collector = MomentCollector(weights, attended_heads=2)
    collector.add(x)
    collector.add_attended(x, probabilities(weights, x))
    picked = collector.moments().select([0, 2, 1, 3])
    assert picked.attended is None
    assert picked.attended_mean is None


def test_white_moments_are_those_of_the_weights() -> None:
    weights = random_layer(bias=True, rope=ROPES[4])
    found = white_moments(weights)
    flat = weights.v.flatten(0, 1)
    assert weights.v_bias is not None
    bias = weights.v_bias.flatten()
    torch.testing.assert_close(found.values, flat @ flat.mT + torch.outer(bias, bias))
    torch.testing.assert_close(found.value_mean, bias)


def test_the_ridge_is_the_noise_of_every_input_channel() -> None:
    weights, x = random_layer(8, 4, ROPES[1]), inputs(20)
    moments = moments_of(weights, x, attended=True)
    noise = white_moments(weights)
    found = regularised(moments, weights, ridge=0.5)
    level = 0.5 * moments.input_energy
    torch.testing.assert_close(found.keys, moments.keys + level * noise.keys)
    torch.testing.assert_close(
        found.passing_keys, moments.passing_keys + level * noise.passing_keys
    )
    torch.testing.assert_close(
        found.passing_queries, moments.passing_queries + level * noise.passing_queries
    )
    torch.testing.assert_close(found.values, moments.values + level * noise.values)
    assert found.attended is not None
    assert moments.attended is not None
    for head in range(8):
        torch.testing.assert_close(
            found.attended[head], moments.attended[head] + level * noise.values
        )
