"""The numbers of a comparison from planted per-token scores."""

import numpy as np
import pytest

from upcycle.evaluation.scoring import Scores
from upcycle.evaluation.statistics import divergence, document_bootstrap, spread


def planted(difference: np.ndarray, document: np.ndarray) -> Scores:
    tokens = len(difference)
    rng = np.random.default_rng(1)
    base = rng.exponential(3, tokens).astype(np.float32)
    return Scores(
        document=document,
        window=document,
        position=np.arange(tokens) % 40 + 1,
        source_nll=base,
        model_nll=(base + difference).astype(np.float32),
        kl=np.abs(difference).astype(np.float32),
        agree=difference < 0.5,
    )


def documents(count: int, length: int) -> np.ndarray:
    return np.repeat(np.arange(count), length)


def test_the_interval_covers_a_planted_difference_and_not_zero() -> None:
    rng = np.random.default_rng(0)
    per_document = 0.1 + 0.05 * rng.standard_normal(60)
    document = documents(60, 30)
    difference = per_document[document] + 0.5 * rng.standard_normal(len(document))
    interval = document_bootstrap(difference, document)
    assert interval is not None
    assert 0 < interval.low < difference.mean() < interval.high
    standard_error = np.std(difference.reshape(60, 30).mean(1), ddof=1) / np.sqrt(60)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * standard_error, rel=0.1)


def test_no_difference_gives_an_interval_of_nothing() -> None:
    interval = document_bootstrap(np.zeros(50), documents(5, 10))
    assert interval is not None
    assert (interval.low, interval.high) == (0, 0)


def test_a_document_keeps_its_own_token_count_in_every_resample() -> None:
    """A constant difference is certain, however unlike the documents' lengths are."""
    document = np.repeat(np.arange(6), [3, 500, 40, 1, 90, 7])
    interval = document_bootstrap(np.full(len(document), 0.25), document)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.25, 0.25))


def test_documents_count_and_not_tokens() -> None:
    """Tokens that repeat their document's value add no evidence: the interval stays as wide."""
    values = np.random.default_rng(0).standard_normal(12)
    short = document_bootstrap(np.repeat(values, 10), documents(12, 10))
    long = document_bootstrap(np.repeat(values, 1000), documents(12, 1000))
    assert short is not None
    assert long is not None
    assert (short.low, short.high) == pytest.approx((long.low, long.high))


def test_one_document_has_no_interval() -> None:
    assert document_bootstrap(np.ones(10), np.full(10, 7)) is None


def test_the_same_scores_give_the_same_numbers() -> None:
    difference = np.random.default_rng(0).standard_normal(400)
    first = divergence(planted(difference, documents(8, 50)), [])
    assert first == divergence(planted(difference, documents(8, 50)), [])


def test_spread_is_what_numpy_says() -> None:
    values = np.random.default_rng(0).exponential(1, 1001)
    found = spread(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.median == pytest.approx(np.median(values))
    assert found.p99 == pytest.approx(np.percentile(values, 99))
    assert found.max == values.max()


def test_buckets_and_histogram_count_every_token() -> None:
    difference = np.random.default_rng(0).standard_normal(400) * 3
    found = divergence(planted(difference, documents(8, 50)), [])
    assert [(b.first, b.last) for b in found.by_position] == [
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
        (32, 40),
    ]
    assert sum(bucket.tokens for bucket in found.by_position) == 400
    total = sum(bucket.tokens * bucket.kl_mean for bucket in found.by_position)
    assert total / 400 == pytest.approx(found.kl.mean)
    histogram = found.nll_histogram
    assert sum(histogram.counts) == 400
    assert histogram.counts[-1] == (difference >= histogram.edges[-2]).sum()
    assert found.top1_agreement == pytest.approx((difference < 0.5).mean())
