import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from perfmodel.errors import PerfModelError
from perfmodel.measure import median_interval


@settings(deadline=None)
@given(st.integers(1, 200), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_takes_the_narrowest_interval_that_the_binomial_law_allows(n: int, confidence: float):
    interval = median_interval([float(v) for v in range(n)], confidence)
    below = int(binom.ppf((1 - confidence) / 2, n, 0.5))
    while below >= 0 and 2 * binom.cdf(below, n, 0.5) > (1 - confidence) * (1 + 1e-12):
        below -= 1
    assert interval == (None if below < 0 else (float(below), float(n - 1 - below)))


def test_no_interval_at_95_percent_below_six_values():
    assert median_interval([1.0] * 5) is None
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)


def test_covers_the_true_median_of_a_skewed_law():
    draws = np.random.default_rng(0).lognormal(size=(4000, 21))
    intervals = [median_interval(row.tolist()) for row in draws]
    assert np.mean([interval is not None and interval[0] <= 1.0 <= interval[1] for interval in intervals]) >= 0.945


def test_refuses_an_impossible_confidence():
    with pytest.raises(PerfModelError, match="confidence"):
        median_interval([1.0], 1.0)
