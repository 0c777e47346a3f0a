"""Covariance of kriging against its element-wise formula; its hyperparameters by likelihood."""

import numpy as np
import pytest

from perfmodel.calibration.beliefs import (
    Component,
    Hyperparameters,
    Points,
    correlation,
    covariance,
    fit_hyperparameters,
    pack,
    unpack,
)

COMPONENTS = (
    Component(("machine",), ("size", "ranks")),
    Component(("machine", "kind"), ("size",), rough=True),
    Component(("kind",)),
)


def _points(n: int, seed: int = 0) -> Points:
    generator = np.random.default_rng(seed)
    text = lambda names: generator.choice(names, n).astype(object)  # noqa: E731
    return Points(
        {"machine": text(["a", "b", "c"]), "kind": text(["x", "y"])},
        {"size": generator.uniform(10, 30, n), "ranks": generator.choice([1.0, 2.0, 3.0], n)},
        generator.uniform(0, 1, n),
    )


def _residual(points: Points) -> np.ndarray:
    offset = np.where(points.categories["machine"] == "a", 0.3, -0.1)
    return np.sin(points.coordinates["size"] / 3) * 0.2 + offset


def _dense(points: Points, hyper: Hyperparameters) -> np.ndarray:
    """The covariance element by element."""
    n = len(points)
    matrix = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            for k, component in enumerate(COMPONENTS):
                if all(points.categories[c][i] == points.categories[c][j] for c in component.same):
                    gaps = [
                        (points.coordinates[c][i] - points.coordinates[c][j]) * np.exp(-length)
                        for c, length in zip(component.along, hyper.length[k], strict=True)
                    ]
                    r = float(np.sqrt(np.sum(np.square(gaps))))
                    shape = (
                        np.exp(-r)
                        if component.rough
                        else (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)
                    )
                    matrix[i, j] += np.exp(hyper.variance[k]) * (shape if component.along else 1.0)
    return matrix


@pytest.fixture(name="hyper")
def _hyper() -> Hyperparameters:
    return Hyperparameters(
        np.array([-2.0, -3.0, -4.0]),
        (np.array([1.0, 0.5]), np.array([0.8]), np.zeros(0)),
        -6.0,
        -5.0,
    )


def test_covariance_equals_the_element_wise_formula(hyper):
    points = _points(25)
    np.testing.assert_allclose(
        covariance(COMPONENTS, hyper, points), _dense(points, hyper), rtol=1e-10, atol=1e-14
    )


def test_correlation_is_one_at_zero_distance():
    here = {"size": np.array([3.0]), "ranks": np.array([1.0])}
    for component, length in zip(COMPONENTS, ([0.0, 0.0], [0.0], []), strict=True):
        assert correlation(component, np.array(length), here, here) == pytest.approx(1.0)


def test_likelihood_finds_the_length_of_a_smooth_function():
    """Points predicted from the others: better by the lengths found than by the default ones."""
    points = _points(120, seed=3)
    residual = _residual(points)
    found = fit_hyperparameters(COMPONENTS, points, residual, np.arange(120))

    def left_out(hyper: Hyperparameters) -> float:
        noise = np.exp(hyper.noise) + np.exp(hyper.noise_short) * points.unrest
        inverse = np.linalg.inv(covariance(COMPONENTS, hyper, points) + np.diag(noise))
        return float(np.abs((inverse @ residual) / np.diag(inverse)).mean())

    assert left_out(found) < left_out(Hyperparameters.default(COMPONENTS)) + 1e-3
    np.testing.assert_array_equal(pack(unpack(COMPONENTS, pack(found))), pack(found))
