"""Causal attention by blocks in bf16 against PyTorch's own, and the masks that it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from upcycle.models.causal_blocks import causal_attention, is_causal, runs_in_bf16_on_cpu

LOWEST = torch.finfo(torch.float32).min


def causal_mask(length: int, rows: int = 1) -> torch.Tensor:
    mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1) > 0, LOWEST)
    return mask.expand(rows, 1, length, length)


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 3),
    members=st.integers(1, 3),
    length=st.integers(1, 300),
    widths=st.sampled_from([(8, 8), (16, 8), (6, 10)]),
    seed=st.integers(0, 99),
)
def test_it_is_attention(
    batch: int, groups: int, members: int, length: int, widths: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    query = torch.randn(batch, groups * members, length, widths[0])
    key = torch.randn(batch, groups, length, widths[0])
    value = torch.randn(batch, groups, length, widths[1])
    rounded = [each.bfloat16().double() for each in (query, key, value)]
    expected = scaled_dot_product_attention(*rounded, is_causal=True, scale=0.3, enable_gqa=True)
    found = causal_attention(query, key, value, 0.3)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() < 0.06  # 8 bits of scores, weights and values
    assert (found.double() - expected).norm() <= 0.02 * expected.norm()


def test_its_gradients_are_those_of_attention() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 200, 16, requires_grad=True) for heads in (6, 2, 2)]
    toward = torch.randn(2, 6, 200, 16)
    exact = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.25, enable_gqa=True)
    expected = torch.autograd.grad((exact * toward).sum(), inputs)
    found = torch.autograd.grad((causal_attention(*inputs, 0.25) * toward).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_masks_that_are_causal() -> None:
    assert is_causal(causal_mask(5))
    assert is_causal(causal_mask(5, rows=3))
    assert is_causal(causal_mask(5, rows=3).contiguous())
    assert is_causal(causal_mask(5).masked_fill(causal_mask(5) < 0, -torch.inf))


@pytest.mark.parametrize("place", [(0, 0, 4, 1), (0, 0, 0, 3)])
def test_masks_that_are_not(place: tuple[int, ...]) -> None:
    mask = causal_mask(5).clone()
    mask[place] = LOWEST - mask[place]  # one position more hidden, or one less
    assert not is_causal(mask)
    two = torch.cat((causal_mask(5), mask))
    assert not is_causal(two)
    biased = causal_mask(5).clone()
    biased[0, 0, 3, 1] = -0.5  # ALiBi's way
    assert not is_causal(biased)
    assert not is_causal(causal_mask(5)[..., :3, :])


def test_only_bf16_goes_this_way() -> None:
    query = torch.zeros(1, 1, 2, 2)
    assert not runs_in_bf16_on_cpu(query)
    assert runs_in_bf16_on_cpu(query.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_in_bf16_on_cpu(query)
    with torch.autocast("cpu", torch.float16):
        assert not runs_in_bf16_on_cpu(query)
