"""Keys are set in place; no other byte moves."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upcycle.checkpoint.sidecars import set_top_level

NAMES = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(NAMES, VALUES, min_size=1, max_size=5),
    NAMES,
    st.integers(),
    st.sampled_from([None, 2, 4]),
)
def test_the_result_is_the_object_with_that_key_set(
    document: dict[str, object], key: str, value: int, indent: int | None
) -> None:
    text = json.dumps(document, indent=indent)
    edited = set_top_level(text, key, value, after=next(iter(document)))
    assert json.loads(edited) == {**document, key: value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1,\n  "n": 8\n}', '{\n  "a": 1,\n  "n": 2\n}'),
        ('{"n":8,"x":{"n":4}}', '{"n":2,"x":{"n":4}}'),
        ('{"x": {"n": 4}, "n" : 8}', '{"x": {"n": 4}, "n" : 2}'),
        ('{\r\n\t"a": 1e-05\r\n}', '{\r\n\t"a": 1e-05,\r\n\t"n": 2\r\n}'),
        ('{"x": "\\"n\\": 8", "a": null}', '{"x": "\\"n\\": 8", "a": null, "n": 2}'),
        ('{"b": 1}', '{"b": 1,"n": 2}'),
    ],
)
def test_layout_is_kept(text: str, expected: str) -> None:
    assert set_top_level(text, "n", 2, after="a") == expected
