"""Per-token scores to the numbers of a comparison."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle.data.tokens import decoded
from upcycle.data.windows import EvalRow
from upcycle.evaluation.results import Bucket, Divergence, Histogram, Interval, Spread, WorstToken
from upcycle.evaluation.scoring import Scores

RESAMPLES = 2000
WORST = 10
_CONTEXT_TOKENS = 24
_HISTOGRAM_EDGES = np.linspace(-4, 4, 33)
Values = NDArray[np.float64]


def divergence(scores: Scores, worst: list[WorstToken]) -> Divergence:
    """How the model of a scored pair differs from the source, its worst tokens among it."""
    difference = scores.model_nll.astype(np.float64) - scores.source_nll
    return Divergence(
        kl=spread(scores.kl.astype(np.float64)),
        top1_agreement=float(scores.agree.mean()),
        nll_difference=float(difference.mean()),
        nll_interval=document_bootstrap(difference, scores.document),
        by_position=_by_position(scores, difference),
        nll_histogram=_histogram(difference),
        worst_tokens=worst,
    )


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


def spread(values: Values) -> Spread:
    """Mean, quantiles and maximum of values [N]."""
    median, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return Spread(float(values.mean()), float(median), float(p90), float(p99), float(values.max()))


def document_bootstrap(
    difference: Values, document: NDArray[np.int64], resamples: int = RESAMPLES
) -> Interval | None:
    """A 95 % interval for the mean per-token difference, resampling whole documents.

    Tokens of a document are not independent, documents are. Each document brings the difference
    between two models on the same tokens, which is what makes the test paired: how hard a
    document is cancels. Percentile interval of `sum(difference) / sum(tokens)`; the same input
    gives the same interval.

    Args:
        difference: [N] per-token difference.
        document: [N] index of each token's document.
        resamples: bootstrap resamples.

    Returns:
        The interval, or None where there is only one document.
    """
    from scipy.stats import bootstrap

    _, index = np.unique(document, return_inverse=True)
    tokens = np.bincount(index).astype(np.float64)
    sums = np.bincount(index, weights=difference)
    if len(tokens) < 2:
        return None
    found = bootstrap(
        (sums, tokens),
        lambda total, count, axis: total.sum(axis) / count.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def _by_position(scores: Scores, difference: Values) -> list[Bucket]:
    """Means over positions 1, 2-3, 4-7, … of the window."""
    power = np.floor(np.log2(scores.position)).astype(np.int64)
    buckets = []
    for exponent in range(int(power.max()) + 1):
        chosen = power == exponent
        if not chosen.any():
            continue
        buckets.append(
            Bucket(
                first=2**exponent,
                last=min(2 ** (exponent + 1) - 1, int(scores.position[chosen].max())),
                tokens=int(chosen.sum()),
                kl_mean=float(scores.kl[chosen].mean(dtype=np.float64)),
                nll_difference=float(difference[chosen].mean()),
            )
        )
    return buckets


def _histogram(difference: Values) -> Histogram:
    edges = _HISTOGRAM_EDGES
    counts, _ = np.histogram(difference.clip(edges[0], edges[-1]), edges)
    return Histogram(edges.tolist(), counts.tolist())
