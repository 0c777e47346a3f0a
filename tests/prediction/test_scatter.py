"""Intervals of sites whose scatter is unknown."""

import numpy as np
import pytest

from perfmodel.prediction import GAUSS_90, half_width, scales


def test_one_scale_is_the_normal_distribution():
    one = scales((0.0, 0.0))
    assert half_width(np.array([[0.04, 0.25]]), one.weight) == pytest.approx(GAUSS_90 * np.array([0.2, 0.5]))


def test_the_interval_holds_nine_tenths_of_sites_that_scatter_otherwise():
    rng, of = np.random.default_rng(0), (0.4, 1.0)
    within, own = (np.exp(s * rng.standard_normal(200_000)) for s in of)
    drawn = rng.standard_normal(len(own)) * np.sqrt(0.03**2 + (0.05 * within) ** 2 + (0.04 * own) ** 2)
    nodes = scales(of)
    half = half_width(0.03**2 + 0.05**2 * nodes.within + 0.04**2 * nodes.own, nodes.weight)
    assert (np.abs(drawn) <= half).mean() == pytest.approx(0.9, abs=0.01)
    normal = GAUSS_90 * np.sqrt(0.03**2 + 0.05**2 + 0.04**2)
    assert half > normal
    assert half_width(np.full(len(nodes.weight), 0.01), nodes.weight) == pytest.approx(GAUSS_90 * 0.1)
