"""Probabilities over shared errors against plain sampling of every source."""

import numpy as np
import pytest

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.layouts import Goal, Tariff, restrict, robustness, search
from perfmodel.planning.layouts import default_space as space_of
from perfmodel.prediction import LayoutOffsets, Likeness, explain, layout_coordinates, log_covariance
from perfmodel.spec import Layout

LAYOUTS = [
    "dp=8,micro_batch=2", "tp=2,dp=4,micro_batch=2", "pp=2,dp=4,vpp=4", "tp=2,pp=2,dp=2", "dp=8,recompute=selective",
]  # fmt: skip


@pytest.fixture(scope="module")
def predictions(case):
    return [explain(case.step_problem, Layout.parse(text)) for text in LAYOUTS]


@pytest.mark.parametrize("objective", ["step_time", "cost", "-tokens_per_s + 1e3 * memory_gib"])
def test_probabilities_are_those_of_sampled_errors(case, predictions, objective):
    goal = Goal.parse(case.step_problem, objective, tariff=Tariff(price_per_device_hour=1.0))
    sure = robustness(goal, predictions)
    rng, draws = np.random.default_rng(1), 40_000
    names = sorted({name for p in predictions for name in p.error_sources} - {"own"})
    errors = {name: rng.standard_normal(draws) for name in names}
    likeness = case.step_problem.site.belief(case.step_problem.framework, case.cluster.device).likeness
    at = np.array([layout_coordinates(case.step_problem.setting, p.layout) for p in predictions])
    alike = rng.multivariate_normal(np.zeros(len(at)), likeness.of(at), draws)
    logs = [
        sum(p.error_sources[n] * errors[n] for n in names if n in p.error_sources)
        + p.error_sources["own"] * rng.standard_normal(draws)
        + alike[:, i]
        for i, p in enumerate(predictions)
    ]
    step_s = np.stack([p.step_time_s * np.exp(log) for p, log in zip(predictions, logs, strict=True)], axis=1)
    memory = np.array([p.memory.peak for p in predictions]) / 2**30
    value = step_s if objective != "-tokens_per_s + 1e3 * memory_gib" else -16 * 2048 / step_s + 1e3 * memory
    best = np.bincount(value.argmin(axis=1), minlength=len(LAYOUTS)) / draws
    np.testing.assert_allclose(sure.best, best, atol=0.015)
    better = (value[:, :, None] < value[:, None]).mean(axis=0)
    np.fill_diagonal(better, 0.5)
    np.testing.assert_allclose(sure.better, better, atol=0.015)
    least = value.min(axis=1, keepdims=True)
    np.testing.assert_allclose(sure.regret, ((value - least) / np.abs(least)).mean(axis=0), atol=5e-3)
    assert sure.best.sum() == pytest.approx(1)
    np.testing.assert_allclose(sure.better + sure.better.T, 1, atol=1e-9)


def test_shared_errors_cancel(case, predictions):
    """Intervals overlap by far, and yet the faster one is most likely faster: both err alike."""
    first, last = predictions[0], predictions[4]
    assert first.step_time_s < last.step_time_s < first.step_time_hi_s
    assert robustness(Goal.parse(case.step_problem), [first, last]).better[0, 1] > 0.8
    sd = np.sqrt(np.diag(log_covariance(case.step_problem, [first, last])))
    t_90 = 2.015  # of five degrees of freedom
    assert sd[0] == pytest.approx(np.log(first.step_time_hi_s / first.step_time_s) / t_90, rel=0.01)


def test_joint_covariance_of_layouts_near_runs():
    offsets = LayoutOffsets(((0.0,) * 8, (1.0,) * 8), (0.1, -0.1), (1e-3, 1e-3), Likeness(0.2, 2.0, 0.05))
    where = [(0.5,) * 8, (0.6,) * 8, (5.0,) * 8]
    joint = offsets.joint(where)
    np.testing.assert_allclose(np.diag(joint), [offsets.spread(at) for at in where])
    assert (np.linalg.eigvalsh(joint) > 0).all()
    assert joint[0, 1] > joint[0, 2]


def test_a_search_in_robust_order(case):
    space = restrict(space_of(case), "micro_batch=1")
    arguments = {"devices": 8, "global_batch": 16, "job": case.job, "space": space, "top": 4}
    for order, key in (("regret", "expected_regret"), ("upper", "upper"), ("best", "probability_best")):
        result = search(case.model, case.cluster, robust=order, **arguments)
        rows = [row[key] for row in result.to_dict()["layouts"]]
        assert rows == sorted(rows, reverse=order == "best")
    with pytest.raises(UnknownNameError, match="regret"):
        search(case.model, case.cluster, robust="regrets", **arguments)
    with pytest.raises(PerfModelError, match="one global batch"):
        search(case.model, case.cluster, robust="best", **arguments | {"global_batch": [8, 16]})
