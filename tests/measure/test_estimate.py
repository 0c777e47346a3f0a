"""What a plan is said to take, before and during its run; the clock is made up."""

from pathlib import Path

import pytest

from perfmodel.measure import read_plan
from perfmodel.measure.estimate import (
    GROUP_START_S,
    PROGRAM_START_S,
    SETUP_S,
    PointEstimate,
    RemainingTime,
    estimate_plan,
    kept_rows,
    samples_s,
    summary,
)
from perfmodel.measure.tables import Point, point_key
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import Gemm, OptimizerStep

PLAN = """
device = "box"
[rule]
min_repeats = 10
min_sample_s = 0.01
max_s = 2.0
[collective_rule]
min_repeats = 2
max_s = 1.0
[[kernels]]
family = "gemm"
"m,n,k" = [[1, 1, 1], [2, 2, 2]]
[[kernels]]
family = "optimizer"
n_params = 10
bytes_per_param = 28.0
cache = "cold"
[[collectives]]
num_ranks = [2, 4]
collective = ["all_reduce", "all_gather"]
bytes = 1024
[nccl_tests]
"""
NAN = float("nan")


@pytest.fixture
def plan(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(PLAN)
    return read_plan(tmp_path / "plan.toml")


def test_a_row_takes_what_its_stopping_rule_lets_it():
    rule = StoppingRule(min_repeats=10, min_sample_s=0.01, max_s=2.0)
    short = samples_s(rule, NAN)
    assert short == samples_s(rule, 0.0) == pytest.approx(0.4)  # 40 samples of 10 ms
    assert samples_s(rule, 0.02) == pytest.approx(0.8 + 0.06)
    assert samples_s(rule, 1.5) == pytest.approx(2.0 + 1.5 + 4.5)  # none starts after the cap
    assert samples_s(
        StoppingRule(min_repeats=10, max_repeats=12, min_sample_s=0.01), NAN
    ) == pytest.approx(0.12)


def test_a_plan_is_the_sum_of_its_rows(plan):
    guesses = {Point(op): s for op, s in zip(plan.kernels, (NAN, 0.02), strict=True)}
    estimates = estimate_plan(plan, "torch", lambda points: [guesses.get(p, NAN) for p in points])
    report = summary(estimates)
    assert list(report["families"]) == ["gemm", "optimizer", "all_reduce", "all_gather"]
    assert report["rows"] == 7
    gemm = report["families"]["gemm"]
    assert gemm["minutes"] * 60 == pytest.approx(0.4 + 0.86 + 2 * SETUP_S["torch"])
    assert gemm["device_minutes"] == gemm["minutes"]
    # a group is started for 2 ranks and for 4, by its first collective; samples last a quarter of a
    # second
    each_s = SETUP_S["torch"] + 1.25
    reduce, gather = report["families"]["all_reduce"], report["families"]["all_gather"]
    assert reduce["minutes"] * 60 == pytest.approx(2 * (GROUP_START_S + each_s))
    assert reduce["device_minutes"] * 60 == pytest.approx((2 + 4) * (GROUP_START_S + each_s))
    assert gather["minutes"] * 60 == pytest.approx(2 * each_s)
    assert report["device_minutes"] == pytest.approx(
        sum(f["device_minutes"] for f in report["families"].values())
    )


def test_nccl_tests_start_a_program_per_run_of_sizes(plan):
    estimates = estimate_plan(plan, "nccl-tests", lambda points: [NAN] * len(points))
    assert sum(e.seconds for e in estimates if e.family.startswith("all")) == pytest.approx(
        4 * PROGRAM_START_S
    )


def step(n: int) -> Point:
    return Point(OptimizerStep(n_params=n))


def test_what_rows_took_corrects_the_rest_family_by_family():
    clock = [0.0]
    gemm = Point(Gemm(m=1, n=1, k=1))
    estimates = [PointEstimate(point_key(step(n)), "optimizer", 100.0, 1) for n in range(10)]
    estimates.append(PointEstimate(point_key(gemm), "gemm", 100.0, 2))
    left = RemainingTime(estimates, clock=lambda: clock[0])
    assert (left.rows_left, left.device_s()) == (11, pytest.approx(1200.0))
    for n in range(9):
        left.start(step(n))
        clock[0] += 300.0  # three times what was expected
    left.start(step(9))
    assert left.rows_left == 1
    # the last step and, on two devices, the product: a little below three times the estimate
    assert 2.9 * 300.0 < left.device_s() < 3 * 300.0
    left.start(gemm)
    clock[0] += 1.0
    left.start(step(1))  # a disturbed row again: nothing of the estimate is left
    assert left.device_s() == 0.0


def test_rows_kept_are_found_without_touching_anything(plan, tmp_path: Path):
    (tmp_path / "plan.toml").unlink()
    assert kept_rows(plan, tmp_path) == {}
    assert kept_rows(plan, tmp_path / "not made yet") == {}
    assert list(tmp_path.iterdir()) == []
