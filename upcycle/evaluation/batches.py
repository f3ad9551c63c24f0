"""Evaluation windows in padded batches, the same for every model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from upcycle.data.windows import EvalRow

# Logits of one batch in float32. Two models and a chunk of temporaries take about thrice that.
LOGITS_BYTES = 256 << 20
LARGEST_BATCH = 16


@dataclass(frozen=True)
class Batch:
    """Windows of like length, padded to the right.

    Attributes:
        ids: [B, T] int64. Padding is any token: under a causal mask nothing to its left sees it.
        lengths: real tokens of each row.
        windows: index of each row's window in the text.
        documents: index of each row's document.
    """

    ids: torch.Tensor
    lengths: list[int]
    windows: list[int]
    documents: list[int]

    @property
    def num_scored(self) -> int:
        """Tokens scored: all but the first of each row."""
        return sum(self.lengths) - len(self.lengths)


def batch_size_for(vocabulary: int, sequence_length: int) -> int:
    """Windows per batch whose logits stay within `LOGITS_BYTES`, from 2 to `LARGEST_BATCH`."""
    fitting = LOGITS_BYTES // (4 * vocabulary * sequence_length)
    return max(2, min(LARGEST_BATCH, fitting))


def make_batches(rows: Sequence[EvalRow], size: int) -> list[Batch]:
    """Batches of `size` windows, the longest first, so that little is padded."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    return [_padded(rows, order[start : start + size]) for start in range(0, len(order), size)]


def _padded(rows: Sequence[EvalRow], chosen: Sequence[int]) -> Batch:
    windows = [rows[index] for index in chosen]
    return Batch(
        ids=torch.nn.utils.rnn.pad_sequence([row.ids for row in windows], batch_first=True),
        lengths=[len(row.ids) for row in windows],
        windows=list(chosen),
        documents=[row.document for row in windows],
    )
