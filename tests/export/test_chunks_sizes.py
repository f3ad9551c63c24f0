"""Where a model is cut, so that each chunk stays within a budget."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upcycle.errors import ExportError
from upcycle.export.chunks.sizes import Sizes, share_layers

SIZES = st.builds(
    Sizes,
    layers=st.lists(st.integers(1, 100), min_size=1, max_size=7).map(tuple),
    before=st.integers(0, 150),
    behind=st.integers(50, 150),
    throughout=st.integers(0, 20),
    shared=st.integers(0, 50),
)


def least(sizes: Sizes) -> int:
    """The smallest budget that works."""
    return max(sizes.of(range(i, i + 1)) for i in range(len(sizes.layers)))


def fewest(sizes: Sizes, budget: int) -> int:
    """The fewest chunks, of all ways to cut."""
    total = len(sizes.layers)
    found = []
    for choice in range(1 << total - 1):
        cuts = [0, *(i for i in range(1, total) if choice >> i - 1 & 1), total]
        if all(sizes.of(range(*pair)) <= budget for pair in pairwise(cuts)):
            found.append(len(cuts) - 1)
    return min(found)


@given(sizes=SIZES, more=st.integers(0, 300))
def test_the_fewest_chunks_within_the_budget(sizes: Sizes, more: int) -> None:
    budget = least(sizes) + more
    parts = share_layers(sizes, budget)
    assert [layer for part in parts for layer in part] == list(range(len(sizes.layers)))
    assert max(map(sizes.of, parts)) <= budget
    assert len(parts) == fewest(sizes, budget)


@given(sizes=SIZES, less=st.integers(1, 10**6))
def test_a_budget_below_the_largest_layer_is_refused(sizes: Sizes, less: int) -> None:
    with pytest.raises(ExportError) as caught:
        share_layers(sizes, least(sizes) - less)
    assert caught.value.where == "--chunk-size"
    assert caught.value.fix == f"pass --chunk-size {least(sizes)} or more"


def test_the_refusal_names_what_is_too_large() -> None:
    sizes = Sizes((10, 30, 10), before=40, behind=60, throughout=1)
    with pytest.raises(ExportError, match=r"layer 2 and the output head have 71 B, .* 70 B"):
        share_layers(sizes, 70)
    with pytest.raises(ExportError, match=r"layer 0 and the embedding and the output head"):
        share_layers(Sizes((10,), before=40, behind=60), 70)
    with pytest.raises(ExportError, match=r"^the weights of layer 1 have"):
        share_layers(Sizes((10, 30, 10)), 20)
