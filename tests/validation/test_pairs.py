"""Pairs of layouts, and what few runs say, where the truth is drawn from the model."""

import numpy as np
import pytest
from studies.pairs import Choice, pairs_report, reliability

from perfmodel.prediction import Joint
from perfmodel.prediction.sites.known_runs import scales
from perfmodel.validation.population import Covariances, others_given_known


def drawn(sd: float, said: float, source: str = "lab") -> list[Choice]:
    """Groups of six layouts whose errors have one standard deviation, and are said to have
    another."""
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        predicted = 0.1 * rng.standard_normal(6)
        measured = predicted + 0.3 * rng.standard_normal() + sd * rng.standard_normal(6)
        covariance = 0.09 + said**2 * np.eye(6)
        found.append(
            Choice(
                source, predicted, measured, Joint(covariance[None], np.ones(1), np.zeros((1, 6)))
            )
        )
    return found


def test_true_probabilities_are_calibrated_and_others_are_not():
    assert reliability(drawn(0.1, 0.1))["error"] < 0.015
    sure = reliability(drawn(0.1, 0.02))
    assert sure["error"] > 0.1
    assert all(one["probability"] > one["faster"] for one in sure["bins"])
    assert sure["pairs"] == 300 * 15


def test_regret_is_of_the_layout_predicted_fastest():
    one = Choice(
        "a",
        np.array([0.0, 0.1]),
        np.log([1.2, 1.0]),
        Joint(np.eye(2)[None], np.ones(1), np.zeros((1, 2))),
    )
    other = Choice(
        "b",
        np.array([0.0, 0.1]),
        np.log([1.0, 1.5]),
        Joint(np.eye(2)[None], np.ones(1), np.zeros((1, 2))),
    )
    report = pairs_report([one, other], apart=("b",))
    assert report["regret"] == pytest.approx(0.2)
    assert report["sources"]["b"]["regret"] == 0
    assert report["sources"]["b"]["random"] == pytest.approx(0.25)


@pytest.mark.parametrize("scatter", [(0.0, 0.0), (0.4, 1.0)])
def test_runs_of_a_site_narrow_the_others_as_a_gaussian_process_does(scatter):
    """With one scale, no outliers and little noise the update is that of a Gaussian process; where
    a site's scatter is unknown, runs that lie far off leave the interval wide."""
    n = 4
    of = Covariances(np.full((n, n), 0.04), 0.01 * np.eye(n), np.zeros((n, n)), 1e-3)
    known, others, residual = np.array([0, 1]), np.array([2, 3]), np.array([0.02, 0.03, 0.02, 0.0])
    left, half = others_given_known(of, scales(scatter), residual, known, others)
    if not any(scatter):
        shift = 0.04 * np.linalg.inv(0.04 + 0.011 * np.eye(2)) @ residual[:2]
        assert left == pytest.approx(residual[2:] - shift.sum(), abs=2e-3)
        unknown = others_given_known(of, scales(scatter), residual, known[:0], others)
        assert (np.abs(unknown[0]) < unknown[1]).all()
        return
    far = np.array([0.9, -0.7, 0.0, 0.0])
    assert others_given_known(of, scales(scatter), far, known, others)[1].min() > 1.5 * half.max()
