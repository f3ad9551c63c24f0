"""Evaluation windows: stretches of one document each, every token scored once."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from upcycle.data.tokens import Tokens
from upcycle.errors import DataError


class EvalRow(NamedTuple):
    """One window.

    Attributes:
        ids: [T] int64 with 2 <= T <= sequence_length; all but the first are scored.
        document: the index of its document.
    """

    ids: torch.Tensor
    document: int


def eval_rows(documents: Iterable[Tokens], sequence_length: int, max_tokens: int) -> list[EvalRow]:
    """Windows of at most `sequence_length` tokens, no two documents in one.

    Consecutive windows of a document share one token, so that every token but a document's first
    is scored exactly once. Where there is more than `max_tokens` to score, windows are left out
    evenly over the whole text.

    Raises:
        DataError: no document has two tokens.
    """
    windows: list[EvalRow] = []
    for index, tokens in enumerate(documents):
        ids = torch.from_numpy(tokens.ids).long()
        windows += [
            EvalRow(ids[start : start + sequence_length], index)
            for start in range(0, len(ids) - 1, sequence_length - 1)
        ]
    if not windows:
        raise DataError(
            "there is no text to score", where="the evaluation text", fix="give longer documents"
        )
    total = sum(len(window.ids) - 1 for window in windows)
    if total <= max_tokens:
        return windows
    chosen, budget = [], 0.0
    for window in windows:
        scored = len(window.ids) - 1
        budget += scored * max_tokens / total
        if budget >= scored:
            budget -= scored
            chosen.append(window)
    return chosen or [EvalRow(windows[0].ids[: max_tokens + 1], windows[0].document)]
