"""The order made for given times, against integer programming and the hand-made orders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milp_oracle import shortest_makespan
from schedule_times import live_micro_batches, longest_device_span, makespan, uniform

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.schedule import PassTimes, check, get_schedule, optimised


@pytest.mark.parametrize(
    ("p", "m", "limit"), [(2, 3, 2), (2, 4, 2), (2, 4, 3), (3, 3, 2), (3, 3, 3)]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_as_short_as_integer_programming(p: int, m: int, limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward, of_input, weight = np.round(rng.uniform(1, 4, (3, p)))
    times = PassTimes(forward, of_input, weight, transfer_s=0.5)
    best = shortest_makespan(times, m, limit)
    schedule = optimised(times, m, limit)
    assert check(schedule) == ()
    assert best - 1e-6 <= makespan(schedule, times) <= 1.02 * best


@settings(max_examples=15, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(1, 12), limit=st.integers(1, 12), seed=st.integers(0, 99))
def test_never_breaks_the_limit(p: int, m: int, limit: int, seed: int) -> None:
    forward, of_input, weight = np.random.default_rng(seed).uniform(0.5, 2, (3, p))
    schedule = optimised(PassTimes(forward, of_input, weight), m, limit)
    assert check(schedule) == ()
    assert live_micro_batches(schedule).max() <= limit


@pytest.mark.parametrize("weight", [0.5, 1.0, 1.5])
def test_never_longer_than_the_hand_made_orders(weight: float) -> None:
    p, m = 6, 18
    times = uniform(p, 1, 1 + weight, weight, transfer=0.05)
    for limit, name, measure, staggered in (
        (p, "zb-h1", makespan, False),
        (2 * p - 1, "zb-h2", longest_device_span, True),
    ):
        ours = optimised(times, m, limit, staggered=staggered)
        assert measure(ours, times) <= measure(get_schedule(name)(p, m), times) + 1e-9
    assert (
        longest_device_span(optimised(uniform(p, 1, 2), m, 2 * p, staggered=True), uniform(p, 1, 2))
        == 3 * m
    )


@pytest.mark.parametrize("limit", [1, 2])
def test_a_single_micro_batch_goes_there_and_back(limit: int) -> None:
    """Past every stage forwards and backwards; of weight gradients the first stage's alone comes
    last."""
    times = PassTimes(
        np.array([1.0, 2.0, 4.0]),
        np.array([8.0, 16.0, 32.0]),
        np.array([3.0, 1.0, 1.0]),
        transfer_s=0.5,
    )
    schedule = optimised(times, 1, limit)
    assert check(schedule) == ()
    assert makespan(schedule, times) == pytest.approx(7 + 56 + 4 * 0.5 + 3)


def test_bad_input_is_named() -> None:
    with pytest.raises(PerfModelError, match="not negative"):
        PassTimes(np.array([1.0]), np.array([-1.0]), np.array([1.0]))
    with pytest.raises(PerfModelError, match="one entry per stage"):
        PassTimes(np.ones(2), np.ones(3), np.ones(2))
    with pytest.raises(PerfModelError, match="one entry per stage each"):
        PassTimes.uniform(0, 1.0, 2.0)
    with pytest.raises(LayoutError, match="at least 1"):
        optimised(uniform(2, 1, 1), 4, 0)
