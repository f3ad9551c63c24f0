"""Packed rows: every token once, positions from zero, no label across a border."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upcycle.data.packing import IGNORED, pack
from upcycle.data.tokens import Tokens
from upcycle.errors import DataError


def documents(lengths: list[int], masked: bool = False) -> list[Tokens]:
    found, start = [], 1
    for length in lengths:
        ids = np.arange(start, start + length, dtype=np.int32)
        found.append(Tokens(ids, ids % 2 == 0 if masked else None, "d"))
        start += length
    return found


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 16), st.booleans())
@settings(max_examples=200, deadline=None)
def test_rows(lengths: list[int], size: int, masked: bool) -> None:
    total = sum(lengths)
    if total < size:
        with pytest.raises(DataError, match="too little text"):
            pack(documents(lengths, masked), size)
        return
    starts = {sum(lengths[:i]) for i in range(len(lengths))} | {total} | set(range(0, total, size))
    scored = {i for i in range(total) if i not in starts and (not masked or (i + 1) % 2 == 0)}
    if not scored:
        with pytest.raises(DataError, match="carries a loss"):
            pack(documents(lengths, masked), size)
        return
    rows = pack(documents(lengths, masked), size)
    ids, positions, labels = (t.flatten() for t in (rows.input_ids, rows.position_ids, rows.labels))
    assert rows.input_ids.shape == (-(-total // size), size)
    assert ids[:total].tolist() == list(range(1, total + 1))
    assert ids[total:].eq(0).all()
    expected_position = 0
    for index in range(len(ids)):
        expected_position = 0 if index in starts else expected_position + 1
        assert positions[index] == expected_position
        assert labels[index] == (ids[index] if index in scored else IGNORED)
    assert rows.num_targets == len(scored)


def test_too_little_text_says_how_little() -> None:
    with pytest.raises(DataError) as caught:
        pack(documents([3, 4]), 16)
    assert "2 documents with 7 tokens" in caught.value.what


def test_a_batch_is_int64_and_parts_are_views() -> None:
    rows = pack(documents([40]), 8)
    batch = rows.batch(torch.tensor([4, 0]))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert batch["input_ids"][0].tolist() == list(range(33, 41))
    part = rows.part(1, 3)
    assert len(part) == 2
    assert part.input_ids.data_ptr() == rows.input_ids[1:].data_ptr()


def test_the_hash_sees_every_array() -> None:
    base = pack(documents([20, 20]), 8)
    assert base.content_hash() == pack(documents([20, 20]), 8).content_hash()
    others = [pack(documents([21, 19]), 8), pack(documents([20, 20], masked=True), 8)]
    others.append(pack(documents([20, 20]), 10))
    assert len({rows.content_hash() for rows in [base, *others]}) == 4
