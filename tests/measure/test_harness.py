"""The harness on a made-up clock, where no real time passes; and the median's confidence
interval."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from perfmodel.errors import PerfModelError
from perfmodel.measure.timing import (
    MIN_CLEAN,
    MachineMeter,
    Sample,
    StoppingRule,
    Timing,
    measuring_s,
    median_interval,
    run_for,
    time_calls,
)

RULE = StoppingRule(half_width=0.02, min_repeats=8, max_repeats=50, max_s=100.0, min_sample_s=0.01)


class FakeMachine:
    """Calls that take the given seconds in turn (the last for ever), with the given
    interference."""

    def __init__(
        self, call_s: list[float], interference: Callable[[int], float] = lambda index: 0.0
    ) -> None:
        self.calls: list[int] = []
        self._call_s, self._interference = call_s, interference

    def __call__(self, calls: int) -> Sample:
        index = len(self.calls)
        self.calls.append(calls)
        return Sample(
            calls,
            calls * self._call_s[min(index, len(self._call_s) - 1)],
            self._interference(index),
        )


def timed(machine: FakeMachine, rule: StoppingRule = RULE) -> Timing:
    return time_calls(machine, rule)


def test_steady_calls_stop_at_the_fewest_repeats():
    timing = timed(FakeMachine([1e-3]))
    assert (timing.n_repeats, timing.std_s, timing.half_width) == (
        8,
        pytest.approx(0, abs=1e-15),
        0.0,
    )
    assert timing.median_s == pytest.approx(1e-3)


def test_short_calls_are_bundled_above_the_clocks_resolution():
    machine = FakeMachine([1e-6])
    timed(machine)
    assert machine.calls[:3] == [1, 1, 1]  # warm-up, then a first look
    assert set(machine.calls[3:]) in ({10_000}, {10_001})


def test_a_loaded_device_has_worked_for_so_long_before():
    machine = FakeMachine([1e-3])
    run_for(machine, 2.0, 0.01)
    assert sum(machine.calls) * 1e-3 == pytest.approx(2.0, abs=0.02)
    assert set(machine.calls[1:]) == {10}


def test_a_slow_start_does_not_leave_samples_too_short():
    # the first calls take as long as a whole sample should, the later ones a thousandth of that
    machine = FakeMachine([0.01, 0.01, 0.01, 0.01, 1e-5])
    timing = timed(machine)
    assert machine.calls[-RULE.min_repeats :] == [1000] * RULE.min_repeats
    assert timing.median_s == pytest.approx(1e-5)


def test_spread_calls_go_on_until_the_interval_is_narrow():
    noise = [1.0 + 0.1 * ((7 * i) % 11 - 5) / 5 for i in range(400)]
    timing = timed(FakeMachine(noise), StoppingRule(half_width=0.03, max_repeats=400, max_s=1e9))
    assert 8 < timing.n_repeats < 400
    assert timing.half_width <= 0.03


def test_stops_at_the_cap_of_repeats_and_says_how_wide_the_interval_still_is():
    timing = timed(FakeMachine([1.0, 1.0, *([1.0, 2.0] * 200)]))
    assert timing.n_repeats == RULE.max_repeats
    assert timing.half_width > RULE.half_width


def test_stops_at_the_cap_of_time_even_with_few_repeats():
    timing = timed(FakeMachine([40.0]))
    assert timing.n_repeats == 3  # 40, 80, 120 s: none starts after 100 s
    assert timing.half_width == float("inf")


def test_a_slow_outlier_stays_and_hardly_moves_the_median():
    times = [1e-2] * 6 + [1.0] + [1e-2] * 6
    timing = timed(FakeMachine(times))
    assert timing.median_s == pytest.approx(1e-2)
    assert timing.n_set_aside == 0
    assert timing.std_s > 0.1


def test_disturbed_samples_are_set_aside_and_counted():
    # every third sample is slow because others had half of the processor
    machine = FakeMachine(
        [2.0 if i % 3 == 0 else 1.0 for i in range(60)],
        lambda index: 0.5 if index % 3 == 0 else 0.01,
    )
    timing = timed(machine)
    assert timing.median_s == 1.0
    assert (timing.n_repeats, timing.std_s) == (8, 0.0)
    assert timing.n_set_aside == 4
    assert timing.interference == pytest.approx(0.01)


def test_without_clean_samples_all_are_used_and_the_interference_tells():
    timing = timed(FakeMachine([1.0], lambda index: 0.4), StoppingRule(max_s=20.0))
    assert timing.interference == pytest.approx(0.4)
    assert (timing.n_repeats, timing.n_set_aside) == (20, 0)


def test_few_clean_samples_are_enough():
    timing = timed(
        FakeMachine([1.0], lambda index: 0.0 if index in (4, 9, 14) else 0.4),
        StoppingRule(max_s=20.0),
    )
    assert (timing.n_repeats, timing.n_set_aside, timing.interference) == (MIN_CLEAN, 17, 0.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40),
    st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_always_ends_within_its_caps_and_between_the_extremes(
    times: list[float], disturbed: list[bool]
):
    machine = FakeMachine(times, lambda index: float(disturbed[index % len(disturbed)]))
    timing = timed(machine, StoppingRule(max_repeats=20, max_s=5.0, min_sample_s=1e-2))
    assert min(times) * (1 - 1e-9) <= timing.median_s <= max(times) * (1 + 1e-9)
    assert timing.n_repeats >= 1
    assert timing.n_repeats + timing.n_set_aside <= len(machine.calls) - 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("half_width", 0.0),
        ("max_s", float("nan")),
        ("confidence", 1.0),
        ("min_repeats", 0),
        ("interference_limit", 1.0),
    ],
)
def test_refuses_rules_that_cannot_stop(field: str, value: float):
    with pytest.raises(PerfModelError):
        StoppingRule(**{field: value})


def test_refuses_a_clock_that_stands_still():
    with pytest.raises(PerfModelError, match="warm-up"):
        timed(FakeMachine([0.0]))


def test_the_meter_lengthens_samples_to_what_its_counters_resolve():
    assert RULE.resolved_by(MachineMeter((0,))).min_sample_s == 0.25


@pytest.mark.parametrize("call_s", [1e-6, 5e-3, 0.05, 0.4, 3.0])
def test_the_effort_stated_is_the_time_that_the_stopping_rule_takes(call_s: float):
    rule = StoppingRule(max_s=1.0)
    for noise, wanted in (
        (0.0, measuring_s(rule, call_s).least),
        (0.4, measuring_s(rule, call_s).most),
    ):
        spent_s, turn = 0.0, 0

        def sample(calls: int, noise: float = noise) -> Sample:
            nonlocal spent_s, turn
            turn += 1
            # a scatter so wide that the interval never suffices, the mean as stated
            wall_s = calls * call_s * (1 + noise * (-0.5 if turn % 2 else 0.5))
            spent_s += wall_s
            return Sample(calls, wall_s, 0.0)

        time_calls(sample, rule)
        assert spent_s == pytest.approx(wanted, rel=0.3)


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
    assert (
        np.mean(
            [interval is not None and interval[0] <= 1.0 <= interval[1] for interval in intervals]
        )
        >= 0.945
    )


def test_refuses_an_impossible_confidence():
    with pytest.raises(PerfModelError, match="confidence"):
        median_interval([1.0], 1.0)
