"""An error is three lines, whatever the names in it hold."""

import pytest

from upcycle.errors import UpcycleError


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb\r\x0b\x85\u2028c", r"a\nb\r\x0b\x85\u2028c"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\ud800", r"\ud800"),
        ("ünï 模型 → \U0001f600", "ünï 模型 → \U0001f600"),
    ],
)
def test_an_error_is_three_lines(name: str, shown: str) -> None:
    text = str(UpcycleError(name, where=name, fix=name))
    assert text.splitlines() == [shown, f"  where: {shown}", f"  fix: {shown}"]
    text.encode()
