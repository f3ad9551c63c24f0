"""EleutherAI/lm-evaluation-harness#3831: two models on the same items, tested as if unrelated.

Correlated results differ clearly item by item; an unpaired test does not see it.
"""

import numpy as np
from scipy.stats import ttest_ind

from upcycle.evaluation.statistics import document_bootstrap

ITEMS = 220


def test_the_paired_interval_sees_what_an_unpaired_test_misses() -> None:
    rng = np.random.default_rng(0)
    right = rng.random(ITEMS) < 0.6
    other = right.copy()
    other[rng.choice(np.flatnonzero(right), 18, replace=False)] = False
    other[rng.choice(np.flatnonzero(~right), 4, replace=False)] = True
    difference = right.astype(float) - other.astype(float)
    interval = document_bootstrap(difference, np.arange(ITEMS))
    assert interval is not None
    assert interval.low > 0
    assert ttest_ind(right, other).pvalue > 0.05
