"""How long requests are: a table of lengths and how often each occurs."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from upcycle.errors import UpcycleError
from upcycle.utf8 import shown


def parse_lengths(text: str, *, where: str = "--lengths") -> Mapping[int, int]:
    """The table that "512:70,8192:30" or a file of one length a line stands for.

    Args:
        text: tokens and weight of each length, or the name of a file.
        where: the option that it came from, for the error.

    Returns:
        The weight of each length in tokens, shortest first.

    Raises:
        UpcycleError: it is neither, or a number is below 1.
    """
    if os.path.isfile(text):  # also of a text too long for a name
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
        counts = Counter(_positive(word, where=f"{where}, {text}") for word in words)
    else:
        counts = Counter()
        for pair in text.split(","):
            length, _, weight = pair.partition(":")
            counts[_positive(length, where=where)] += _positive(weight, where=where)
    if not counts:
        raise _nonsense(text, where)
    return dict(sorted(counts.items()))


def _positive(word: str, *, where: str) -> int:
    if not word.strip().isascii() or not word.strip().isdigit() or int(word) < 1:
        raise _nonsense(word, where)
    return int(word)


def _nonsense(word: str, where: str) -> UpcycleError:
    return UpcycleError(
        f"'{shown(word)}' is not a length in tokens, or not how often it occurs",
        where=where,
        fix="give 512:70,8192:30 (tokens:weight), or a file with the length of a request a line",
    )
