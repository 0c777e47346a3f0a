"""Goodput: the closed form against a simulation of a run, the best interval against Young and Daly, published runs."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.errors import PerfModelError
from perfmodel.planning.goodput import Reliability, best_interval_s, goodput, goodput_fraction
from perfmodel.prediction import checkpoint_bytes

times = st.floats(1.0, 1e4)


def simulated(interval_s, stall_s, hidden_s, restart_s, mtbf_s, failures=4000):
    """Share of useful time of a run that is lived through second by second, from failure to failure."""
    rng, clock_s, kept_s = np.random.default_rng(1), 0.0, 0.0
    for _ in range(failures):
        fails_s = clock_s + rng.exponential(mtbf_s)
        now_s, saved_s, trained_s, writing = clock_s + restart_s, kept_s, kept_s, []
        while now_s < fails_s:
            now_s, trained_s = now_s + interval_s + stall_s, trained_s + interval_s
            writing.append((now_s + hidden_s, trained_s))
        saved_s = max([saved_s, *(work_s for written_s, work_s in writing if written_s <= fails_s)])
        clock_s, kept_s = fails_s, saved_s
    return kept_s / clock_s


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "hidden_s", "restart_s", "mtbf_s"),
    [
        (600, 30, 0, 300, 10000),
        (600, 30, 0, 0, 1000),
        (600, 5, 400, 300, 3000),
        (100, 1, 90, 10, 500),
        (3000, 300, 0, 900, 2000),
    ],
)
def test_the_closed_form_is_what_a_simulated_run_comes_to(interval_s, stall_s, hidden_s, restart_s, mtbf_s):
    case = (interval_s, stall_s, hidden_s, restart_s, mtbf_s)
    assert goodput_fraction(*case) == pytest.approx(simulated(*case), rel=0.04)


@given(stall_s=times, mtbf_s=st.floats(10.0, 1e6), restart_s=times, factor=st.floats(0.2, 5.0))
def test_no_interval_is_better_than_the_best(stall_s, mtbf_s, restart_s, factor):
    best_s = best_interval_s(stall_s, mtbf_s)
    best = goodput_fraction(best_s, stall_s, 0, restart_s, mtbf_s)
    assert goodput_fraction(best_s * factor, stall_s, 0, restart_s, mtbf_s) <= best * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [1e-5, 1e-4, 1e-3, 1e-2])
def test_young_and_daly_are_orders_of_the_best_interval(ratio):
    mtbf_s, x = 1e4, sqrt(ratio / 2)
    young_s = sqrt(2 * ratio) * mtbf_s
    daly_s = young_s * (1 + x / 3 + x**2 / 9) - ratio * mtbf_s
    best_s = best_interval_s(ratio * mtbf_s, mtbf_s)
    assert best_s == pytest.approx(young_s, rel=2 * x)
    assert best_s == pytest.approx(daly_s, rel=x**3)


def test_few_failures_cost_what_first_orders_say():
    stall_s, mtbf_s, restart_s = 10.0, 1e6, 100.0
    best_s = best_interval_s(stall_s, mtbf_s)
    loss = 1 - goodput_fraction(best_s, stall_s, 0, restart_s, mtbf_s)
    assert loss == pytest.approx(sqrt(2 * stall_s / mtbf_s) + restart_s / mtbf_s, rel=0.01)


@given(st.floats(1e2, 1e7), st.floats(1.01, 10.0))
def test_more_failures_never_help(mtbf_s, factor):
    more, fewer = (goodput_fraction(500, 10, 50, 300, m) for m in (mtbf_s, mtbf_s * factor))
    assert 0 <= more <= fewer < 500 / 510


def test_llama_3_trains_most_of_the_time():
    """arXiv 2407.21783, section 3.3.4: effective training time above 90 %, 419 unexpected interruptions in 54 days."""
    problem = pm.problem("llama3-405b", "dgx-h100", global_batch=2048)
    found = goodput(problem, 16384, 10.0)
    assert found.mtbf_s == pytest.approx(54 * 86400 / 419)
    assert found.checkpoint_bytes == pytest.approx(405e9 * 14, rel=0.01)  # bf16, fp32 master and two moments
    assert found.write_s == pytest.approx(found.checkpoint_bytes / 2e12)
    assert round(found.fraction, 2) == 0.93  # as the documentation says
    assert found.fraction + found.checkpointing + found.failing == pytest.approx(1)


def test_checkpoints_beside_training_cost_less_and_are_not_closer_than_their_writing():
    problem = pm.problem("llama3-70b", "h100", global_batch=1024)
    slow = {"storage_bytes_per_s": 1e9}
    waiting, beside = (goodput(problem, 1024, 10.0, Reliability(**slow, asynchronous=a)) for a in (False, True))
    assert waiting.stall_s == waiting.write_s == pytest.approx(checkpoint_bytes(problem.model, problem.job) / 1e9)
    assert beside.stall_s == pytest.approx(checkpoint_bytes(problem.model, problem.job) / 1024 / 63e9)
    assert beside.fraction > waiting.fraction
    assert beside.interval_s + beside.stall_s >= beside.write_s
    assert goodput(problem, 1024, 10.0, Reliability(**slow, interval_s=1e4)).fraction < waiting.fraction


@pytest.mark.parametrize("wrong", [{"device_mtbf_s": 0}, {"restart_s": -1}, {"storage_bytes_per_s": float("nan")}])
def test_impossible_reliability_is_refused(wrong):
    with pytest.raises(PerfModelError, match=next(iter(wrong))):
        Reliability(**wrong)


def test_a_run_that_never_gets_on_says_why():
    problem = pm.problem("llama3-405b", "h100", global_batch=2048)
    with pytest.raises(PerfModelError, match="no work is ever kept; give a longer time between failures"):
        goodput(problem, 16384, 10.0, Reliability(device_mtbf_s=1e4))
