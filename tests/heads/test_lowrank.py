"""The closed forms against known answers, brute force and their fall-backs."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from upcycle.attention import AttentionWeights, Rope
from upcycle.errors import PlanError
from upcycle.heads.gauge import scramble
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.moments import LayerMoments
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.reference import attention_output

METHOD = get_method("lowrank")
KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "sinks": {"bias": True, "sinks": True},
    "gate": {"gate": True},
    "clip": {"clip": 1.0, "bias": True},
    **{f"{name} norm": {"norm": norm} for name, norm in NORMS.items()},
}


def merge(weights: AttentionWeights, groups: int, moments: LayerMoments) -> AttentionWeights:
    return METHOD.merge(weights, MergeRequest(groups, 0, 0, 0.02, moments))


def pairs_of_equal_heads(weights: AttentionWeights) -> AttentionWeights:
    return map_heads(weights, lambda heads: heads[[0, 0, 2, 2]])


def unpermuted_scramble(weights: AttentionWeights, seed: int = 0) -> AttentionWeights:
    """`scramble` without a new order of heads."""
    scrambled = scramble(weights, torch.Generator().manual_seed(seed))
    x = inputs(6)

    # The order is found by the output of one head at a time, which no exact transform changes.
    def signature(layer: AttentionWeights, head: int) -> torch.Tensor:
        one = permute_kv_heads(replace(layer, o_bias=None), [head])
        return attention_output(replace(one, v_bias=None), x)

    heads = range(weights.num_key_value_heads)
    order = [
        min(heads, key=lambda b: relative(signature(scrambled, b), signature(weights, a)))
        for a in heads
    ]
    return permute_kv_heads(scrambled, order)


def test_without_text_it_is_refused() -> None:
    with pytest.raises(PlanError, match="needs calibration text") as caught:
        METHOD.merge(random_layer(), MergeRequest(2, 0, 0, 0.02))
    assert "--calibration" in caught.value.fix
    assert METHOD.needs_calibration


@given(layers(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_as_many_heads_as_before_are_the_same_bits(
    weights: AttentionWeights, dtype: torch.dtype
) -> None:
    stored = replace(weights, k=weights.k.to(dtype), v=weights.v.to(dtype))
    merged = merge(stored, stored.num_key_value_heads, moments_of(weights, inputs(8)))
    for field in fields(AttentionWeights):
        assert getattr(merged, field.name) is getattr(stored, field.name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES)
def test_equal_heads_merge_without_loss(kind: str, rope: Rope) -> None:
    weights = pairs_of_equal_heads(random_layer(8, 4, rope, **KINDS[kind]))
    x, calibration = inputs(30), inputs(10, seed=1)  # fewer tokens than channels
    merged = merge(weights, 2, moments_of(weights, calibration))
    assert merged.num_key_value_heads == 2
    found, expected = attention_output(merged, x), attention_output(weights, x)
    assert relative(found, expected) < 1e-10


def test_equal_heads_merge_without_loss_in_single_precision() -> None:
    weights = pairs_of_equal_heads(random_layer(8, 4, bias=True))
    single = replace(
        weights,
        **{n: getattr(weights, n).float() for n in ("q", "k", "v", "o")},
    )
    x = inputs(30)
    merged = merge(single, 2, moments_of(single, x.float()))
    assert merged.q.dtype == merged.v.dtype == torch.float32
    assert relative(attention_output(merged, x), attention_output(single, x)) < 1e-5


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["plain", "bias", "sinks", "gate"])
@pytest.mark.parametrize("attended", [False, True])
def test_other_gauges_of_one_head_are_recovered(rope: Rope, kind: str, attended: bool) -> None:
    copies = unpermuted_scramble(pairs_of_equal_heads(random_layer(8, 4, rope, **KINDS[kind])))
    x = inputs(30)
    attended = attended and kind in ("plain", "bias")
    merged = merge(copies, 2, moments_of(copies, inputs(10, seed=1), attended=attended))
    assert relative(attention_output(merged, x), attention_output(copies, x)) < 1e-9
    mean = get_method("mean").merge(copies, MergeRequest(2, 0, 0, 0.02))
    assert relative(attention_output(mean, x), attention_output(copies, x)) > 0.1


def expected_logit_error(
    old: AttentionWeights, new: AttentionWeights, moments: LayerMoments, x: torch.Tensor
) -> float:
    """Σ over heads and planes of E|q|² E|k - c k'|², with c read off the queries."""
    group = len(old.q) // len(old.k)
    readers = len(new.q) // len(new.k)
    total, half = 0.0, old.rope.rotary_dim // 2

    def plane(rows: torch.Tensor, p: int) -> torch.Tensor:
        return (rows[p] + 1j * rows[p + half]) @ x.mT.to(torch.complex128)

    for head in range(len(old.q)):
        for p in range(half):
            before, after = plane(old.q[head], p), plane(new.q[head], p)
            factor = ((before.conj() * after).sum() / before.abs().square().sum()).conj()
            lost = plane(old.k[head // group], p) - factor * plane(new.k[head // readers], p)
            total += float(moments.queries[head, p] * lost.abs().square().mean())
    return total


def test_no_other_shared_key_has_a_smaller_logit_error() -> None:
    weights, x = random_layer(8, 4), inputs(60)
    moments = moments_of(weights, x)
    merged = merge(weights, 2, moments)
    best = expected_logit_error(weights, merged, moments, x)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        noise = torch.randn(merged.k.shape, generator=generator, dtype=torch.float64)
        nearby = replace(merged, k=merged.k + 1e-3 * noise)
        assert expected_logit_error(weights, nearby, moments, x) > best * (1 - 1e-6)
    for rival in ("mean", "procrustes"):
        other = get_method(rival).merge(weights, MergeRequest(2, 0, 0, 0.02, moments))
        assert expected_logit_error(weights, other, moments, x) > best


def output_error(old: AttentionWeights, new: AttentionWeights, x: torch.Tensor) -> float:
    """Σ over query heads of E|o v - o' v'|², values taken as they are."""
    group, readers = len(old.q) // len(old.v), len(new.q) // len(new.v)
    total = 0.0
    for head in range(len(old.q)):
        before = old.o[head] @ (old.v[head // group] @ x.mT)
        after = new.o[head] @ (new.v[head // readers] @ x.mT)
        total += float((before - after).square().sum()) / len(x)
    return total


@pytest.mark.parametrize("value_dim", [8, 6])
def test_no_other_shared_value_has_a_smaller_output_error(value_dim: int) -> None:
    weights, x = random_layer(8, 4, value_dim=value_dim, hidden=40), inputs(90, 40)
    moments = moments_of(weights, x)
    merged = merge(weights, 2, moments)
    best = output_error(weights, merged, x)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-2):
        for _ in range(20):
            noise = torch.randn(merged.v.shape, generator=generator, dtype=torch.float64) * scale
            shaken = torch.randn(merged.o.shape, generator=generator, dtype=torch.float64) * scale
            for nearby in (
                replace(merged, v=merged.v + noise),
                replace(merged, o=merged.o + shaken),
                replace(merged, v=merged.v + noise, o=merged.o + shaken),
            ):
                assert output_error(weights, nearby, x) > best * (1 - 1e-5)


def test_attended_values_give_a_better_output_on_their_tokens() -> None:
    weights, x = random_layer(8, 4, hidden=40, bias=True), inputs(200, 40)
    moments = moments_of(weights, x, attended=True)

    def error(found: AttentionWeights) -> float:
        # The keys are kept, so that the attention weights are those of the moments.
        kept = replace(
            found,
            **{n: getattr(weights, n) for n in ("q", "q_bias", "k", "k_bias")},
            v=found.v.repeat_interleave(4, 0),
            v_bias=found.v_bias.repeat_interleave(4, 0),  # type: ignore[union-attr]
        )
        return relative(attention_output(kept, x), attention_output(weights, x))

    plain = replace(moments, attended=None, attended_mean=None)
    assert error(merge(weights, 1, moments)) < error(merge(weights, 1, plain)) * 0.95


def test_a_bias_of_the_output_takes_the_mean() -> None:
    weights = random_layer(8, 4, hidden=40, bias=True)
    weights = replace(weights, v_bias=10 * weights.v_bias)  # type: ignore[operator]
    x = inputs(90, 40)
    moments = moments_of(weights, x)
    with_bias, without = (
        merge(layer, 2, moments) for layer in (weights, replace(weights, o_bias=None))
    )
    expected = attention_output(weights, x)
    kept = attention_output(replace(without, o_bias=weights.o_bias), x)
    assert relative(attention_output(with_bias, x), expected) < relative(kept, expected)


@given(layers(), st.integers(0, 50))
def test_magnitudes_stay_healthy(weights: AttentionWeights, seed: int) -> None:
    x = inputs(50, seed=seed)
    # A gauge in which one head's keys and values are a thousand times larger.
    kv_heads = weights.num_key_value_heads
    size = torch.ones(kv_heads, 1, 1, dtype=torch.float64)
    size[0] = 1000
    group = len(weights.q) // kv_heads
    readers = size.repeat_interleave(group, 0)
    odd = replace(
        weights,
        q=weights.q / readers,
        q_bias=None if weights.q_bias is None else weights.q_bias / readers[:, 0],
        o=weights.o / readers,
        k=weights.k * size,
        v=weights.v * size,
        k_bias=None if weights.k_bias is None else weights.k_bias * size[:, 0],
        v_bias=None if weights.v_bias is None else weights.v_bias * size[:, 0],
    )
    merged = merge(odd, 1, moments_of(odd, x))
    for name in ("k", "v"):
        assert float(getattr(merged, name).abs().max()) <= 20 * float(
            getattr(odd, name).abs().max()
        )
    assert bool(torch.isfinite(merged.q).all())
    assert bool(torch.isfinite(merged.o).all())


@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [
        ("plain", "lowrank", "lowrank"),
        ("clip", "mean (queries and keys are clamped", "mean (values are clamped"),
        ("gate", "lowrank", "lowrank channel by channel (a gate"),
        ("all norm", "lowrank with real factors (the weight", "lowrank"),
        ("head norm", "lowrank with real factors (a LayerNorm", "lowrank"),
        ("shared norm", "mean of normalised keys (the weight", "lowrank"),
    ],
)
def test_steps_say_what_a_norm_a_clamp_or_a_gate_leaves(kind: str, keys: str, values: str) -> None:
    assert METHOD.steps is not None
    found = METHOD.steps(random_layer(**KINDS[kind]))
    assert found.keys.startswith(keys)
    assert found.values.startswith(values)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_deterministic(kind: str) -> None:
    weights, x = random_layer(8, 4, ROPES[1], **KINDS[kind]), inputs(30)
    first, again = (merge(weights, 2, moments_of(weights, x)) for _ in range(2))
    for field in fields(AttentionWeights):
        a, b = getattr(first, field.name), getattr(again, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    "kind", ["all norm", "head norm", "shared norm", "offset norm", "layer norm"]
)
@pytest.mark.parametrize("rope", ROPES[:3])
def test_normed_keys_of_different_size_merge_better_than_their_mean(kind: str, rope: Rope) -> None:
    better = 0
    for seed in range(8):
        weights = random_layer(8, 4, rope, **KINDS[kind], seed=seed)
        noise = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(seed)).double()
        # Similar heads, whose norms undo that one has larger keys.
        near = map_heads(weights, lambda heads: heads[[0, 0, 2, 2]])
        sizes = torch.tensor([1.0, 5.0, 1.0, 5.0]).double()[:, None, None]
        sizes = sizes if weights.qk_norm.span != "all" else torch.ones_like(sizes)  # type: ignore[union-attr]
        near = replace(near, k=(near.k + 0.1 * noise) * sizes, v=weights.v[[0, 0, 2, 2]])
        x = inputs(40, seed=seed)
        expected = attention_output(near, x)
        found = relative(attention_output(merge(near, 2, moments_of(near, x)), x), expected)
        mean = get_method("mean").merge(near, MergeRequest(2, 0, 0, 0.02))
        better += found < relative(attention_output(mean, x), expected)
    assert better >= 7
