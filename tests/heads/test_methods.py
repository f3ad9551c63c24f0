"""Merge methods against slow, obvious references."""

from dataclasses import fields, replace
from operator import attrgetter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.heads.layers import inputs, map_heads, moments_of, random_layer, relative
from upcycle.attention import AttentionWeights, Rope, valid_kv_heads
from upcycle.errors import PlanError
from upcycle.heads.methods import METHODS, MergeRequest, Method, get_method, method, method_help
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.pool import repeat
from upcycle.heads.reference import attention_output

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


def random_weights(
    heads: int, kv_heads: int, head_dim: int, *, bias: bool, dtype: torch.dtype, seed: int = 0
) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden = 12
    return AttentionWeights(
        q=draw(heads, head_dim, hidden),
        k=draw(kv_heads, head_dim, hidden),
        v=draw(kv_heads, head_dim, hidden),
        o=draw(heads, hidden, head_dim),
        rope=Rope("half", head_dim // 2 * 2),
        q_bias=draw(heads, head_dim) if bias else None,
        k_bias=draw(kv_heads, head_dim) if bias else None,
        v_bias=draw(kv_heads, head_dim) if bias else None,
        o_bias=draw(hidden) if bias else None,
    )


@st.composite
def merges(draw: st.DrawFn) -> tuple[AttentionWeights, int]:
    """Weights of any shape with a number of KV heads that they can be merged to."""
    kv_heads = draw(st.integers(1, 6))
    group = draw(st.integers(1, 3))
    target = draw(st.sampled_from([g for g in range(1, kv_heads + 1) if kv_heads % g == 0]))
    weights = random_weights(
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([2, 4])),
        bias=draw(st.booleans()),
        dtype=draw(DTYPES),
        seed=draw(st.integers(0, 1000)),
    )
    return weights, target


def request(kv_heads: int, layer: int = 0, seed: int = 0) -> MergeRequest:
    return MergeRequest(kv_heads, layer, seed, initializer_range=0.02)


@given(merges())
def test_mean_is_the_mean_of_each_contiguous_group(case: tuple[AttentionWeights, int]) -> None:
    weights, target = case
    merged = get_method("mean").merge(weights, request(target))
    size = weights.num_key_value_heads // target
    for name in ("k", "v", "k_bias", "v_bias"):
        old, new = getattr(weights, name), getattr(merged, name)
        if old is None:
            assert new is None
            continue
        assert new.dtype == old.dtype
        for head in range(target):
            group = [old[head * size + i].double() for i in range(size)]
            assert torch.equal(new[head], (sum(group) / size).to(old.dtype))


@given(merges(), st.sampled_from([each for each in METHODS if each.only_kv]))
def test_queries_and_outputs_stay(case: tuple[AttentionWeights, int], pool: Method) -> None:
    weights, target = case
    merged = pool.merge(weights, request(target))
    assert merged.num_key_value_heads == target
    for kept in ("q", "o", "q_bias", "o_bias"):
        assert getattr(merged, kept) is getattr(weights, kept)


@given(merges(), st.sampled_from([each for each in METHODS if each.only_kv]))
def test_equal_heads_are_kept_bit_by_bit(case: tuple[AttentionWeights, int], pool: Method) -> None:
    assume(pool.lossless_on_equal_heads)
    few, target = case
    many = repeat(few, few.num_attention_heads)
    merged = pool.merge(many, request(few.num_key_value_heads))
    for field in fields(AttentionWeights):
        old, new = getattr(few, field.name), getattr(merged, field.name)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, field.name
    assert target <= few.num_key_value_heads


def test_first_keeps_the_first_head_of_each_group() -> None:
    weights = random_weights(8, 8, 4, bias=True, dtype=torch.float32)
    merged = get_method("first").merge(weights, request(2))
    assert torch.equal(merged.k, weights.k[[0, 4]])
    assert merged.v_bias is not None
    assert torch.equal(merged.v_bias, weights.v_bias[[0, 4]])  # type: ignore[index]


def test_random_is_seeded_by_seed_and_layer_at_the_initial_scale() -> None:
    weights = random_weights(8, 8, 4, bias=True, dtype=torch.float32)
    merge = get_method("random").merge
    again = merge(weights, request(2, layer=1, seed=3))
    assert torch.equal(merge(weights, request(2, layer=1, seed=3)).k, again.k)
    assert not torch.equal(merge(weights, request(2, layer=2, seed=3)).k, again.k)
    assert not torch.equal(merge(weights, request(2, layer=1, seed=4)).k, again.k)
    assert not torch.equal(again.k, again.v)
    assert again.k.std().item() == pytest.approx(0.02, rel=0.15)
    assert again.k_bias is not None
    assert torch.count_nonzero(again.k_bias) == 0


def test_repeating_reverses_equal_heads_and_keeps_the_output() -> None:
    weights = random_weights(8, 2, 4, bias=True, dtype=torch.float64)
    raised = repeat(weights, 8)
    assert torch.equal(raised.k, weights.k[[0, 0, 0, 0, 1, 1, 1, 1]])
    x = torch.randn(9, 12, dtype=torch.float64)
    assert torch.equal(attention_output(raised, x), attention_output(weights, x))


@given(merges(), st.randoms())
def test_permuted_heads_give_the_same_output(
    case: tuple[AttentionWeights, int], random: "st.random.Random"
) -> None:
    weights, _ = case
    order = list(range(weights.num_key_value_heads))
    random.shuffle(order)
    x = torch.randn(7, 12, dtype=torch.float64)
    expected = attention_output(weights, x)
    found = attention_output(permute_kv_heads(weights, order), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("each", METHODS, ids=attrgetter("name"))
def test_every_method_does_what_it_promises(each: Method) -> None:
    weights = map_heads(random_layer(8, 4, bias=True), lambda heads: heads[[0, 0, 2, 2]])
    x = inputs(30)
    asked = replace(request(2), moments=moments_of(weights, inputs(10, seed=1)))
    merged = each.merge(weights, asked)
    assert merged.num_key_value_heads == 2
    again = each.merge(weights, asked)
    reseeded = each.merge(weights, replace(asked, seed=5))
    for name in "qkvo":
        assert torch.equal(getattr(merged, name), getattr(again, name))
        assert each.draws or torch.equal(getattr(merged, name), getattr(reseeded, name))
    loss = relative(attention_output(merged, x), attention_output(weights, x))
    assert loss < 1e-10 if each.lossless_on_equal_heads else loss > 0.1
    stored = replace(weights, **{name: getattr(weights, name).bfloat16() for name in "qkvo"})
    made = each.merge(stored, asked)
    assert {getattr(made, name).dtype for name in "qkvo"} == {torch.bfloat16}
    if each.needs_calibration:
        with pytest.raises(PlanError, match="needs calibration text"):
            each.merge(weights, request(2))
    assert each.reference


def test_the_help_tells_each_method_with_its_reference() -> None:
    told = method_help()
    for each in METHODS:
        assert f"{each.name}: {each.does} ({each.reference})" in told


def test_an_unknown_method_is_refused_with_the_list() -> None:
    with pytest.raises(PlanError, match="no method 'median'") as caught:
        get_method("median")
    assert ", ".join(METHODS.names()) in caught.value.fix


def test_a_name_can_be_taken_once() -> None:
    get_method("mean")
    with pytest.raises(ValueError, match="registered twice"):
        method("mean", reference="")(lambda weights, request: weights)
    assert METHODS.names() == sorted(each.name for each in METHODS)


@given(st.integers(1, 64), st.integers(1, 64))
def test_valid_kv_heads_are_divisors_and_dividing_multiples(kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    valid = valid_kv_heads(heads, kv_heads)
    assert valid == sorted(set(valid))
    assert {1, kv_heads, heads} <= set(valid)
    for g in range(1, heads + 1):
        lowering = g <= kv_heads and kv_heads % g == 0
        raising = g > kv_heads and g % kv_heads == 0 and heads % g == 0
        assert (g in valid) == (lowering or raising)
