"""What runs and profiles are worth for a choice, against closed forms and plain simulation."""

import numpy as np
import pytest
from scipy.stats import norm

from perfmodel.calibration import NAMED_SD, Run, calibrate_end_to_end
from perfmodel.planning.layouts import search, square_root
from perfmodel.planning.layouts.measurement_values import (
    MeasurementValues,
    Observation,
    expected_given,
    telling,
    value_measurements,
)
from perfmodel.prediction import explain, joint_errors
from perfmodel.prediction.sites import Adjustment, FittedRuns
from perfmodel.prediction.sites.known_runs import LayoutKernel


def run_of(loads: np.ndarray, *places: int, noise: float = 0.0) -> Observation:
    slopes, own = loads[None, list(places)], np.full((1, len(places)), noise)
    return Observation("two runs" if places[1:] else "run", places, slopes, own)


def weighed(mean: np.ndarray, loads: np.ndarray, seen: list[Observation]) -> MeasurementValues:
    """At a single node."""
    return value_measurements(mean, loads[None], seen, np.ones(1))


def loss(gap: float, sd: float) -> float:
    """E max(0, sd w - gap): of keeping to the first of two layouts, the other of which is `gap`
    behind."""
    z = gap / sd
    return sd * (norm.pdf(z) - z * norm.sf(z))


@pytest.mark.parametrize("gap", [0.0, 0.03, 0.1])
def test_regret_of_two_layouts_is_that_of_a_normal_difference(gap):
    found = weighed(np.array([1.0, 1.0 + gap]), np.array([[0.3, 0.03, 0.0], [0.3, 0.0, 0.04]]), [])
    assert found.regret == pytest.approx(loss(gap, 0.05), abs=2e-5)
    assert found.best == pytest.approx([norm.cdf(gap / 0.05), norm.sf(gap / 0.05)], abs=2e-3)


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_what_a_run_saves_is_the_knowledge_gradient(noise):
    gap, loads = 0.03, np.array([[0.1, 0.03, 0.0], [0.12, 0.0, 0.04]])
    for place in (0, 1):
        (found,) = (
            told := weighed(np.array([0.0, gap]), loads, [run_of(loads, place, noise=noise)])
        ).worth
        moved = abs((loads[1] - loads[0]) @ loads[place]) / np.sqrt(
            loads[place] @ loads[place] + noise**2
        )
        assert told.regret - found.regret == pytest.approx(loss(gap, moved), abs=2e-5)
        assert found.moves == pytest.approx(norm.sf(gap / moved), abs=2e-3)
        assert found.instead == 1


def test_a_run_that_tells_all_leaves_no_regret():
    loads = np.array([[0.0], [0.05], [-0.02]])
    told = weighed(np.array([0.0, 0.01, 0.005]), loads, [run_of(loads, 0), run_of(loads, 1)])
    assert [one.places for one in told.worth] == [(1,), (0,)]
    assert told.regret > 0.005
    assert told.worth[0].regret == pytest.approx(0, abs=1e-6)
    # layout 0 is known already
    assert told.worth[1].regret == told.regret
    assert (told.worth[1].moves, told.worth[1].instead) == (0, None)


def test_no_measurement_is_expected_to_do_harm():
    rng = np.random.default_rng(3)
    for _ in range(5):
        loads, mean = 0.1 * rng.standard_normal((6, 9)), 0.05 * rng.standard_normal(6)
        first = int(mean.argmin())
        seen = [run_of(loads, i, noise=0.02) for i in range(6)]
        both = [run_of(loads, first, i, noise=0.02) for i in range(6) if i != first]
        told = weighed(mean, loads, [*seen, *both])
        after = {one.places: one.regret for one in told.worth}
        assert all(0 <= regret <= told.regret for regret in after.values())
        assert all(after[p] <= min(after[p[:1]], after[p[1:]]) + 2e-4 for p in after if p[1:])


def test_a_site_that_is_unknown_as_a_whole_needs_a_run_of_each():
    """One run does not tell whether its layout is slow, or all of them."""
    loads = np.array([[1.0, 0.05, 0.0], [1.0, 0.0, 0.05]])
    told = weighed(
        np.array([0.0, 0.02]), loads, [run_of(loads, 0), run_of(loads, 1), run_of(loads, 0, 1)]
    )
    assert told.worth[0].places == (0, 1)
    assert told.worth[0].regret == pytest.approx(0, abs=2e-5)
    assert all(one.regret > 0.95 * told.regret for one in told.worth[1:])


def test_expected_regret_is_that_of_simulated_choices():
    rng, draws = np.random.default_rng(5), 200_000
    loads, mean = 0.06 * rng.standard_normal((4, 6)), np.array([0.0, 0.01, 0.03, 0.05])
    seen = run_of(loads, 0, 2, noise=0.03)
    w = rng.standard_normal((draws, 6))
    step = mean + w @ loads.T
    shown = w @ seen.slopes[0].T + 0.03 * rng.standard_normal((draws, 2))
    gain = (
        loads
        @ seen.slopes[0].T
        @ np.linalg.inv(seen.slopes[0] @ seen.slopes[0].T + 0.03**2 * np.eye(2))
    )
    chosen = (mean + shown @ gain.T).argmin(axis=1)
    told = weighed(mean, loads, [seen])
    regret = step[np.arange(draws), chosen] - step.min(axis=1)
    assert told.worth[0].regret == pytest.approx(regret.mean(), abs=3e-4)
    assert told.regret == pytest.approx((step[:, 0] - step.min(axis=1)).mean(), abs=3e-4)
    assert told.worth[0].moves == pytest.approx((chosen != 0).mean(), abs=5e-3)


@pytest.fixture(scope="module")
def predictions(case):
    return search(case.model, case.cluster, devices=8, global_batch=16, job=case.job, top=5).layouts


def doubt(case) -> float:
    problem = case.step_problem
    return problem.site.site_prior(problem.framework, problem.cluster.device).noise_inflation


def test_of_a_search(case, predictions, monkeypatch):
    seen: list[Observation] = []
    monkeypatch.setattr(
        "perfmodel.planning.layouts.measurement_values.value_measurements",
        lambda mean, loads, found, *_: seen.extend(found) or (loads, found),
    )
    loads, _ = telling(case.step_problem, predictions)  # pyright: ignore[reportGeneralTypeIssues]
    own = np.stack([one.noise[:, 0] for one in seen if one.kind == "run"], axis=1)
    joint = joint_errors(case.step_problem, predictions)
    noise = own[:, :, None] ** 2 / doubt(case) * np.eye(len(predictions))
    np.testing.assert_allclose(
        loads @ loads.transpose(0, 2, 1) + noise, joint.covariance, atol=1e-9
    )
    # a profile shows the run's step, and the seconds of its classes: shares of a whole
    for one in (each for each in seen if each.kind == "profile"):
        np.testing.assert_array_equal(one.slopes[:, 0], loads[:, one.places[0]])
        assert (one.noise[:, 1:].sum(axis=1) / NAMED_SD > 0.8).all()
        assert (one.noise[:, 1:].sum(axis=1) / NAMED_SD < 1 + 1e-9).all()
    monkeypatch.undo()
    after = {
        (one.kind, one.places): one.regret for one in telling(case.step_problem, predictions).worth
    }
    assert all(after["profile", (i,)] <= after["run", (i,)] + 1e-5 for i in range(5))
    assert len(after) == 5 + 5 + 4


def test_after_runs_further_runs_alone_are_weighed(case, predictions):
    fitted = Adjustment(
        device=case.cluster.device.name,
        values=(),
        runs=FittedRuns(
            at=((0.0,) * 8,),
            slopes=((),),
            error=(0.0,),
            weight=(1.0,),
            covariance=(),
            layout_kernel=LayoutKernel(0.07, 2.0, 0.02),
            noise=0.03,
            scatter=(0.3, 0.5),
            noise_inflation=1.0,
            coverage_factor=1.0,
        ),
    )
    told = telling(case.step_problem.adjusted(fitted), predictions)
    assert {one.kind for one in told.worth} == {"run", "two runs"}
    told = telling(case.step_problem, predictions[:1])
    assert (told.regret, told.worth[0].moves) == pytest.approx((0, 0), abs=1e-12)


def test_a_fit_to_runs_moves_predictions_as_weighed(case, predictions):
    """Within a per cent: the update is linear, the fit goes through the timeline."""
    places, slower = [0, 3], np.array([0.05, 0.12])
    runs = [
        Run(
            name=str(i),
            model=case.model,
            cluster=case.cluster,
            job=case.job,
            layout=predictions[i].layout,
            measured_s=predictions[i].step_time_s * float(np.exp(by)),
        )
        for i, by in zip(places, slower, strict=True)
    ]
    fitted = calibrate_end_to_end(runs)[case.cluster.device.name]
    after = [
        explain(case.step_problem.adjusted(fitted.adjustment), p.layout).step_time_s
        for p in predictions
    ]
    moved = np.log(after) - np.log([p.step_time_s for p in predictions])
    joint = joint_errors(case.step_problem, predictions)
    loads = square_root(joint.covariance - joint.noise[:, :, None] * np.eye(len(predictions)))
    both = Observation(
        "two runs", tuple(places), loads[:, places], np.sqrt(doubt(case) * joint.noise[:, places])
    )
    (expected,) = expected_given(loads, both, slower[None], joint.weight)
    np.testing.assert_allclose(moved, expected, atol=0.015)
    assert np.ptp(moved) > 0.03
