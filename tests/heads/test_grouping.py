"""The search for groups against every order, planted groups and scrambled heads."""

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.heads.layers import ROPES, inputs, map_heads, moments_of, random_layer, relative
from upcycle.heads.gauge import scramble
from upcycle.heads.grouping import Cost, search_groups
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.reference import attention_output
from upcycle.heads.residuals import LayerResiduals


def random_cost(seed: int) -> tuple[Cost, list[tuple[int, ...]]]:
    asked: list[tuple[int, ...]] = []

    def cost(group: Sequence[int]) -> float:
        asked.append(tuple(group))
        generator = torch.Generator().manual_seed(hash((seed, *group)) % 2**31)
        return float(torch.rand(1, generator=generator))

    return cost, asked


@given(st.sampled_from([(4, 2), (6, 3), (6, 2), (6, 1), (6, 6)]), st.integers(0, 1000))
def test_few_heads_are_searched_exhaustively(case: tuple[int, int], seed: int) -> None:
    kv_heads, groups = case
    size = kv_heads // groups
    cost, asked = random_cost(seed)

    def total(order: Sequence[int]) -> float:
        return sum(cost(sorted(order[i : i + size])) for i in range(0, kv_heads, size))

    order = search_groups(cost, kv_heads, groups)
    assert len(asked) == len(set(asked))  # each group is asked for once
    assert sorted(order) == list(range(kv_heads))
    assert total(order) == pytest.approx(min(map(total, permutations(range(kv_heads)))))


def planted(order: Sequence[int], size: int) -> Cost:
    """A cost of pairs that belong to different groups of a planted partition."""
    home = {head: place // size for place, head in enumerate(order)}

    def cost(group: Sequence[int]) -> float:
        return float(sum(home[a] != home[b] for a in group for b in group))

    return cost


@pytest.mark.parametrize(("kv_heads", "groups"), [(16, 4), (32, 8), (32, 4), (40, 20)])
def test_planted_groups_of_many_heads_are_found(kv_heads: int, groups: int) -> None:
    hidden = torch.randperm(kv_heads, generator=torch.Generator().manual_seed(1)).tolist()
    size = kv_heads // groups
    cost = planted(hidden, size)
    order = search_groups(cost, kv_heads, groups)
    assert sum(cost(order[i : i + size]) for i in range(0, kv_heads, size)) == 0
    assert order == search_groups(cost, kv_heads, groups)


@pytest.mark.parametrize(("kv_heads", "groups"), [(8, 4), (32, 8)])
def test_contiguous_groups_win_ties(kv_heads: int, groups: int) -> None:
    assert search_groups(lambda group: 1.0, kv_heads, groups) == list(range(kv_heads))


@pytest.mark.parametrize("rope", ROPES)
def test_scrambled_heads_are_found_and_merged_without_loss(rope: object) -> None:
    few = map_heads(random_layer(12, 6, rope, bias=True), lambda heads: heads[[0, 0, 2, 2, 4, 4]])
    x, calibration = inputs(30), inputs(40, seed=1)
    scrambled = scramble(few, torch.Generator().manual_seed(2))
    moments = moments_of(scrambled, calibration)
    order = search_groups(LayerResiduals(scrambled, moments).cost, 6, 3)
    ordered = permute_kv_heads(scrambled, order)
    request = MergeRequest(3, 0, 0, 0.02, moments.select(order))
    merged = get_method("lowrank").merge(ordered, request)
    expected = attention_output(few, x)
    assert relative(attention_output(merged, x), expected) < 1e-9
    mean = get_method("mean").merge(scrambled, MergeRequest(3, 0, 0, 0.02))
    assert relative(attention_output(mean, x), expected) > 0.3
