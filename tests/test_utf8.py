"""Text that UTF-8 can hold, and JSON that every parser takes."""

import json
import math
import os

from hypothesis import given
from hypothesis import strategies as st

from upcycle.utf8 import repaired, shown, strict, to_json

ANY = st.text(alphabet=st.characters(exclude_categories=()), max_size=40)  # surrogates too


def test_bytes_of_a_name_and_halves_of_characters() -> None:
    assert shown(os.fsdecode(b"a\xffb\x80\n\xe2\x82\xac")) == "a\\xffb\\x80\n€"
    assert shown("a\ud800b") == "a\\ud800b"
    assert repaired(os.fsdecode(b"a\xff")) == "a\N{REPLACEMENT CHARACTER}"
    assert repaired({"a\ud800": ["\ud83d\ude00", 5]}) == {
        "a\N{REPLACEMENT CHARACTER}": ["\U0001f600", 5]
    }


@given(ANY)
def test_whatever_the_text_utf8_holds_it(text: str) -> None:
    for found in (repaired(text), shown(text), to_json({text: [text]})):
        found.encode("utf-8")
    assert json.loads(to_json([text])) == [shown(text)]
    assert shown(shown(text)) == shown(text)
    if "\ufffd" not in repaired(text):
        assert repaired(text) == text


def test_numbers_that_json_has_no_words_for_are_null() -> None:
    data = {"a": math.nan, "b": (math.inf, 1.5), "c": {1: -math.inf}, "d": True}
    assert strict(data) == {"a": None, "b": [None, 1.5], "c": {1: None}, "d": True}
    assert to_json(data) == '{"a": null, "b": [null, 1.5], "c": {"1": null}, "d": true}'
