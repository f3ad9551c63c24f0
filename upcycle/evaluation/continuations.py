"""Where greedy continuations part."""

from collections.abc import Sequence
from typing import Any

from upcycle.data.tokens import decoded
from upcycle.evaluation.results import Continuation


def continuation(
    label: str, tokens: Sequence[int], source_tokens: Sequence[int], tokenizer: Any
) -> Continuation:
    """A continuation's text, split at the first token that differs from the source's."""
    at = first_divergence(source_tokens, tokens)
    text = decoded(tokenizer, tokens)
    if at is None:
        agreed, through = text, text
    else:
        # A token may end within a character, which decodes to a replacement sign until the next.
        agreed = _shared(decoded(tokenizer, tokens[:at]), text)
        through = _shared(decoded(tokenizer, tokens[: at + 1]), text)
    return Continuation(
        label=label,
        tokens=list(tokens),
        first_divergence=at,
        agreed=agreed,
        diverging=through[len(agreed) :],
        rest=text[len(through) :],
        repetition=repetition(tokens),
    )


def first_divergence(source: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None for equal sequences."""
    for index, (ours, theirs) in enumerate(zip(tokens, source, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(source) else min(len(tokens), len(source))


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before: seq-rep-n of Welleck et al. 2020 (1908.04319)."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _shared(start: str, text: str) -> str:
    """What two texts have in common from the left."""
    pairs = enumerate(zip(start, text, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(start), len(text)))
    return text[:length]
