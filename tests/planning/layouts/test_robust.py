"""Probabilities over shared errors against plain sampling of every source."""

import numpy as np
import pytest
from scipy.stats import qmc

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.layouts import (
    DRAWS,
    MOST_STORED,
    Goal,
    Robustness,
    Tariff,
    mixture_draws,
    restrict,
    robustness,
    search,
    sobol_points,
    square_root,
)
from perfmodel.planning.layouts import default_space as space_of
from perfmodel.prediction import Joint, explain, joint_errors
from perfmodel.prediction.composition import layout_coordinates
from perfmodel.prediction.sites import CLASSES
from perfmodel.prediction.sites.known_runs import half_width
from perfmodel.spec import Layout

LAYOUTS = [
    "dp=8,micro_batch=2",
    "tp=2,dp=4,micro_batch=2",
    "pp=2,dp=4,vpp=4",
    "tp=2,pp=2,dp=2",
    "dp=8,recompute=selective",
]


@pytest.fixture(scope="module")
def predictions(case):
    return [explain(case.step_problem, Layout.parse(text)) for text in LAYOUTS]


@pytest.mark.parametrize("objective", ["step_time", "cost", "-tokens_per_s + 1e3 * memory_gib"])
def test_probabilities_are_those_of_sampled_errors(case, predictions, objective):
    goal = Goal.parse(case.step_problem, objective, tariff=Tariff(price_per_device_hour=1.0))
    sure = robustness(goal, predictions)
    rng, draws = np.random.default_rng(1), 40_000
    sources = [p.uncertainty.by_source for p in predictions]
    names = sorted({name for by_source in sources for name in by_source} - {"own"})
    errors = {name: rng.standard_normal(draws) for name in names}
    site_prior = case.step_problem.site.site_prior(case.step_problem.framework, case.cluster.device)
    at = np.array([layout_coordinates(case.step_problem.setting, p.layout) for p in predictions])
    near = site_prior.layout_kernel.shared(at, at)
    alike = rng.multivariate_normal(np.zeros(len(at)), near, draws)
    node = rng.choice(len(site_prior.scales.weight), draws, p=site_prior.scales.weight)
    within, own = (
        np.sqrt(scale)[node] for scale in (site_prior.scales.within, site_prior.scales.single)
    )
    of_site = {f"site: {name}" for name in CLASSES}
    logs = [
        sum(
            sd * errors[n] * (1 if n in of_site else within)
            for n, sd in sources[i].items()
            if n in errors
        )
        + own
        * np.hypot(sources[i]["own"], site_prior.layout_kernel.nugget)
        * rng.standard_normal(draws)
        + within * alike[:, i]
        for i, p in enumerate(predictions)
    ]
    step_s = np.stack(
        [p.step_time_s * np.exp(log) for p, log in zip(predictions, logs, strict=True)], axis=1
    )
    memory = np.array([p.memory.peak for p in predictions]) / 2**30
    value = (
        step_s
        if objective != "-tokens_per_s + 1e3 * memory_gib"
        else -16 * 2048 / step_s + 1e3 * memory
    )
    best = np.bincount(value.argmin(axis=1), minlength=len(LAYOUTS)) / draws
    np.testing.assert_allclose(sure.best, best, atol=0.015)
    better = (value[:, :, None] < value[:, None]).mean(axis=0)
    np.fill_diagonal(better, 0.5)
    np.testing.assert_allclose(sure.better, better, atol=0.015)
    least = value.min(axis=1, keepdims=True)
    loss = (value - least) / np.maximum(np.abs(value), np.abs(least))
    np.testing.assert_allclose(sure.regret, loss.mean(axis=0), atol=5e-3)
    assert sure.best.sum() == pytest.approx(1)
    np.testing.assert_allclose(sure.better + sure.better.T, 1, atol=1e-9)


def test_shared_errors_cancel(case, predictions):
    """Intervals overlap by far, and yet the faster one is most likely faster: both err alike."""
    first, last = predictions[0], predictions[4]
    assert first.step_time_s < last.step_time_s < first.step_time_hi_s
    assert robustness(Goal.parse(case.step_problem), [first, last]).better[0, 1] > 0.8
    joint = joint_errors(case.step_problem, [first, last])
    site_prior = case.step_problem.site_prior
    unknown = {
        **site_prior.unknown,
        "extrapolated": first.uncertainty.unknown_shares["extrapolated"],
    }
    half = site_prior.coverage.half_width(
        float(half_width(joint.covariance[:, 0, 0], joint.weight)), unknown
    )
    assert half == pytest.approx(np.log(first.step_time_hi_s / first.step_time_s), rel=0.01)


def test_layouts_that_cannot_be_told_apart_share_a_rank():
    better = np.full((5, 5), 0.5)
    better[np.triu_indices(5, 1)] = [0.53, 0.9, 0.9, 0.9, 0.7, 0.9, 0.9, 0.54, 0.56, 0.5]
    better[np.tril_indices(5, -1)] = 1 - better.T[np.tril_indices(5, -1)]
    sure = Robustness(better, np.full(5, 0.2), np.zeros(5), np.ones(5))
    # the last is told from the third, though not from the fourth
    assert sure.ranks == [
        1,
        1,
        3,
        3,
        5,
    ]
    assert [sure.figures_of(place)["tied"] for place in range(5)] == [True, True, True, True, False]
    assert sure.figures_of(1)["probability_first_better"] == 0.53


def test_draws_are_of_the_joint_distribution():
    covariance = np.array([[[0.04, 0.03], [0.03, 0.05]], [[0.4, 0.0], [0.0, 0.1]]])
    joint = Joint(covariance, np.array([0.8, 0.2]), np.zeros((2, 2)))
    gap = np.array([[0.0, 0.1], [-0.1, 0.0]])
    drawn = mixture_draws(square_root(joint.covariance), joint.weight)
    assert (drawn[:, 0] - drawn[:, 1] < 0.1).mean() == pytest.approx(
        joint.below(gap)[0, 1], abs=0.01
    )
    assert np.abs(drawn.mean(axis=0)).max() < 0.01


@pytest.mark.parametrize("dimensions", [1, 2, 3, 16, MOST_STORED, MOST_STORED + 1])
def test_points_are_those_of_scipy_to_the_bit(dimensions):
    engine = qmc.Sobol(dimensions, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(sobol_points(dimensions), engine.random(DRAWS))


def test_a_search_in_robust_order(case):
    space = restrict(space_of(case), "micro_batch=1")
    arguments = {"devices": 8, "global_batch": 16, "job": case.job, "space": space, "top": 4}
    for order, key in (
        ("regret", "expected_regret"),
        ("upper", "upper"),
        ("best", "probability_best"),
    ):
        result = search(case.model, case.cluster, robust=order, **arguments)
        rows = [row[key] for row in result.to_dict()["layouts"]]
        assert rows == sorted(rows, reverse=order == "best")
    with pytest.raises(UnknownNameError, match="regret"):
        search(case.model, case.cluster, robust="regrets", **arguments)
    with pytest.raises(PerfModelError, match="one global batch"):
        search(case.model, case.cluster, robust="best", **arguments | {"global_batch": [8, 16]})
