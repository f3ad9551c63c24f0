"""The tokens that a model lost most, with the text before them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from upcycle.data.tokens import decoded
from upcycle.data.windows import EvalRow
from upcycle.evaluation.results import WorstToken
from upcycle.evaluation.scoring import Scores

WORST = 10
_CONTEXT_TOKENS = 24


def worst_tokens(
    scores: Scores, rows: Sequence[EvalRow], tokenizer: Any, count: int = WORST
) -> list[WorstToken]:
    """The tokens whose NLL rose most over the source's, the worst first; only such that rose.

    Args:
        scores: the scored pair.
        rows: the windows, which `scores.window` counts.
        tokenizer: for the text.
        count: tokens at most.
    """
    rise = scores.model_nll.astype(np.float64) - scores.source_nll
    found = []
    for index in np.argsort(-rise, kind="stable")[:count]:
        if rise[index] <= 0:
            break
        ids, position = rows[scores.window[index]].ids, int(scores.position[index])
        start = max(0, position - _CONTEXT_TOKENS)
        before, through = (decoded(tokenizer, ids[start:end]) for end in (position, position + 1))
        found.append(
            WorstToken(
                before=before,
                # Decoded in place, since some tokenizers drop the space of a first token.
                token=through[len(before) :] if through.startswith(before) else through,
                source_nll=float(scores.source_nll[index]),
                model_nll=float(scores.model_nll[index]),
            )
        )
    return found
