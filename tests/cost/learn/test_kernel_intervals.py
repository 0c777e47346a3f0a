"""Conformal intervals: coverage on exchangeable errors, serialisation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.learn._intervals import Intervals, Quantiles, bucketed, conformal, in_range_intervals
from perfmodel.ops import KernelKind


@given(st.integers(0, 2**31), st.floats(0.01, 1.0))
@settings(max_examples=30, deadline=None)
def test_conformal_bounds_cover_ninety_per_cent(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    low, high = conformal(scale * rng.standard_normal(2000))
    fresh = scale * rng.standard_normal(20_000)
    assert 0.87 <= np.mean((fresh >= low) & (fresh <= high)) <= 0.93
    assert low <= 0.0 <= high


def test_few_errors_give_their_extremes() -> None:
    assert conformal(np.array([-0.2, 0.1, 0.3])) == (-0.2, 0.3)


def test_buckets_follow_the_spread() -> None:
    rng = np.random.default_rng(0)
    log_time = np.sort(rng.uniform(-12, -6, 3000))
    error = rng.standard_normal(3000) * np.where(log_time < -10, 0.2, 0.02)
    quantiles = bucketed(error, log_time)
    _, high = quantiles.at(np.array([-11.5, -6.5]))
    assert high[0] > 4 * high[1]
    assert Quantiles.from_list(quantiles.to_list()) == quantiles


def test_small_groups_borrow_the_family() -> None:
    error, log_time = np.linspace(-1, 1, 300), np.zeros(300)
    groups, family = in_range_intervals(error, log_time, np.array([3] * 290 + [5] * 10))
    assert set(groups) == {3}
    intervals = Intervals({(3, KernelKind("half", "linear", "fwd")): groups[3]}, family, family, family, family)
    assert Intervals.from_dict(intervals.to_dict()) == intervals


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21])
def test_bounds_are_order_statistics(n: int) -> None:
    error = np.linspace(-1, 1, n)
    low, high = conformal(error)
    assert min(error.min(), 0) <= low <= high <= max(error.max(), 0)
