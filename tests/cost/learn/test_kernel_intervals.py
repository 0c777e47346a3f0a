"""Conformal intervals: coverage on exchangeable errors, serialisation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.learn.intervals import (
    Intervals,
    Quantiles,
    absolute_percent,
    bucketed,
    conformal,
    conformal_quantile,
    figures_of_errors,
    in_range_intervals,
    summary,
)
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
    intervals = Intervals(
        {(3, KernelKind("half", "linear", "fwd")): groups[3]}, family, family, family, family
    )
    assert Intervals.from_dict(intervals.to_dict()) == intervals


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21])
def test_bounds_are_order_statistics(n: int) -> None:
    error = np.linspace(-1, 1, n)
    low, high = conformal(error)
    assert min(error.min(), 0) <= low <= high <= max(error.max(), 0)


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("n", [1, 5, 8, 9, 10, 18, 19, 20, 100])
def test_a_conformal_quantile_is_an_order_statistic_of_one_residual_more(
    n: int, level: float
) -> None:
    """The ceil((n + 1) level)-th smallest of n absolute residuals; the largest where there are too
    few."""
    residual = np.array([(-1) ** i * (i + 1.0) for i in range(n)])
    tenths = round(10 * level)
    assert conformal_quantile(residual, level) == min(n, -(-tenths * (n + 1) // 10))
    assert np.isnan(conformal_quantile(np.zeros(0), level))


@pytest.mark.parametrize("n", [1, 18, 19, 20, 39, 40, 400])
def test_each_tail_of_an_interval_holds_five_per_cent(n: int) -> None:
    """The ceil((n + 1) 0.95)-th smallest of n errors and the one as far from the other end; 0 lies
    inside."""
    error = np.arange(n) - n / 2
    rank = min(n, -(-19 * (n + 1) // 20))
    low, high = conformal(error[::-1])
    assert (low, high) == (min(0.0, error[n - rank]), max(0.0, error[rank - 1]))
    assert conformal(np.abs(error) + 1)[0] == 0.0
    assert conformal(-np.abs(error) - 1)[1] == 0.0


@pytest.mark.parametrize(
    ("n", "buckets"), [(10, 1), (299, 1), (300, 2), (449, 2), (450, 3), (5000, 3)]
)
def test_buckets_have_150_errors_at_least_and_are_three_at_most(n: int, buckets: int) -> None:
    rng = np.random.default_rng(1)
    error, log_time = rng.standard_normal(n), rng.uniform(-12, -6, n)
    quantiles = bucketed(error, log_time)
    assert (len(quantiles.low), len(quantiles.high), len(quantiles.edges)) == (
        buckets,
        buckets,
        buckets - 1,
    )
    inside = [((quantiles.edges[i - 1] if i else -np.inf) < log_time) for i in range(buckets)]
    for i in range(buckets):
        below = log_time <= quantiles.edges[i] if i < buckets - 1 else np.ones(n, bool)
        assert (inside[i] & below).sum() == pytest.approx(n / buckets, abs=1)
        assert (quantiles.low[i], quantiles.high[i]) == conformal(error[inside[i] & below])


@pytest.mark.parametrize(("few", "own"), [(39, False), (40, True)])
def test_a_group_has_40_errors_at_least_to_stand_by_itself(few: int, own: bool) -> None:
    rng = np.random.default_rng(2)
    group = np.array([1] * 60 + [2] * few)
    error, log_time = rng.standard_normal(len(group)), np.zeros(len(group))
    groups, family = in_range_intervals(error, log_time, group)
    assert set(groups) == ({1, 2} if own else {1})
    # pooled: what no group has, or all of it where that is too little
    assert family == bucketed(error, log_time)
    pooled = in_range_intervals(
        error, log_time, np.array([1] * 59 + list(range(10, 10 + few + 1)))
    )[1]
    assert pooled == (
        bucketed(error[59:], log_time[59:]) if few + 1 >= 40 else bucketed(error, log_time)
    )


def test_errors_are_told_in_per_cent_of_what_was_measured() -> None:
    """Of log(true / predicted): twice the truth is 100 % off, half of it 50 %."""
    told = figures_of_errors(np.log(np.array([1 / 2, 2.0, 1.0])))
    assert told == {"n": 3, "mean_ape": 50.0, "median_ape": 50.0, "p90_ape": 90.0, "bias": 0.0}
    assert figures_of_errors(np.log(np.array([1 / 1.1, 1 / 1.1])))["bias"] == 10.0
    assert figures_of_errors(np.zeros(0)) == {"n": 0}


@given(measured=st.floats(1e-6, 1e3), factor=st.floats(0.01, 100.0))
def test_an_error_is_relative_to_what_was_measured(measured: float, factor: float) -> None:
    """A time predicted a hundred times too long is 9,900 % off, one predicted a hundred times too
    short 99 %."""
    predicted = measured * factor
    error = np.log(np.array([measured / predicted]))
    per_cent = 100 * (predicted - measured) / measured
    assert absolute_percent(error)[0] == pytest.approx(abs(per_cent), rel=1e-6, abs=1e-9)
    told = figures_of_errors(error)
    assert (
        told["mean_ape"]
        == told["median_ape"]
        == told["p90_ape"]
        == pytest.approx(abs(per_cent), abs=0.0051)
    )
    assert told["bias"] == pytest.approx(per_cent, abs=0.0051)


def test_bounds_go_with_the_predicted_time() -> None:
    quantiles = Quantiles(edges=(-8.0, -4.0), low=(-0.3, -0.2, -0.1), high=(0.4, 0.5, 0.6))
    low, high = quantiles.at(np.array([-9.0, -6.0, -1.0]))
    assert (low.tolist(), high.tolist()) == ([-0.3, -0.2, -0.1], [0.4, 0.5, 0.6])
    assert Quantiles.from_list(quantiles.to_list()) == quantiles


def test_a_summary_divides_errors_by_dtype_device_and_source() -> None:
    """Each group by itself, all of them together, in whatever order the rows are asked for."""

    class Figures:
        def __init__(self, name: str) -> None:
            self.name = name

    class Stack:
        def __init__(self, device: str, source: str) -> None:
            self.figures, self.source = Figures(device), source

    class Rows:
        stacks = (Stack("A100", "x"), Stack("H100", "x"), Stack("H100", "y"))
        stack = np.array([0, 0, 1, 2, 2])
        dtypes = np.array(["half", "float", "half", "half", "float"], object)

    index = np.array([4, 3, 2, 0])
    error = np.log(np.array([1.1, 1.2, 1.3, 1.4]))
    told = summary(Rows(), index, error)  # pyright: ignore[reportArgumentType]
    places = {
        "by_dtype": {"half": [1, 2, 3], "float": [0]},
        "by_device": {"A100": [3], "H100": [0, 1, 2]},
        "by_source": {"x": [2, 3], "y": [0, 1]},
    }
    for name, groups in places.items():
        assert told.pop(name) == {
            label: figures_of_errors(error[rows]) for label, rows in groups.items()
        }
    assert told == figures_of_errors(error)
