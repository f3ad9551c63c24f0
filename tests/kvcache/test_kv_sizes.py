"""Memory sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upcycle.byte_sizes import parse_bytes
from upcycle.errors import UpcycleError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("140 gb", 140 * 10**9),
        ("13.5GB", 13_500_000_000),
        ("0.1GB", 100_000_000),
        ("1TiB", 2**40),
        ("2KiB", 2048),
        ("2KB", 2000),
        ("512", 512),
        ("512B", 512),
        ("0", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, where="--weights") == expected


@given(st.integers(0, 2**60))
def test_plain_bytes_are_themselves(count: int) -> None:
    assert parse_bytes(str(count), where="--weights") == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80G", "80 gigabytes", "1e9", "1,000", "nan"])
def test_what_is_no_size_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(UpcycleError, match="is not a memory size") as caught:
        parse_bytes(text, where="--gpu-memory")
    assert caught.value.where == "--gpu-memory"
