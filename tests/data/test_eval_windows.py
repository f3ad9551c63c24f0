"""Evaluation windows: each token scored once, no two documents in one, an even subset."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import byte_tokenizer
from upcycle.data.ledger import Document
from upcycle.data.tokens import tokenise_documents
from upcycle.data.windows import eval_rows
from upcycle.errors import DataError

TOKENIZER = byte_tokenizer()


def windows(lengths: list[int], size: int, most: int) -> list:  # type: ignore[type-arg]
    texts = [chr(97 + index % 26) * length for index, length in enumerate(lengths)]
    documents = [Document("d", text=text) for text in texts]
    return eval_rows(tokenise_documents(documents, TOKENIZER), size, most)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once(lengths: list[int], size: int) -> None:
    found = windows(lengths, size, 10**9)
    assert sum(len(window.ids) - 1 for window in found) == sum(length + 1 for length in lengths)
    assert all(2 <= len(window.ids) <= size for window in found)
    for index, length in enumerate(lengths):
        own = [window.ids.tolist() for window in found if window.document == index]
        joined = own[0] + [token for ids in own[1:] for token in ids[1:]]
        letter = TOKENIZER(chr(97 + index % 26))["input_ids"]
        assert joined == [0, *letter * length, 0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_subset_keeps_the_limit(lengths: list[int], most: int) -> None:
    found = windows(lengths, 8, most)
    scored = sum(len(window.ids) - 1 for window in found)
    total = sum(length + 1 for length in lengths)
    assert 1 <= scored <= most
    assert scored >= min(total, most - 7)
    assert [w.ids.tolist() for w in found] == [w.ids.tolist() for w in windows(lengths, 8, most)]


def test_a_subset_is_spread_over_the_documents() -> None:
    found = windows([100] * 10, 11, 500)
    assert {window.document for window in found} == set(range(10))


def test_no_text() -> None:
    with pytest.raises(DataError, match="no text to score"):
        eval_rows([], 8, 100)
