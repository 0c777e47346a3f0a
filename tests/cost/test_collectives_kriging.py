"""Kriging against dense formulas, blocks left out against refits, intervals against their level."""

import numpy as np
import pytest

from perfmodel.learn._kriging import (
    Component,
    Hyperparameters,
    Kriging,
    Points,
    correlation,
    covariance,
    fit_kriging,
)
from perfmodel.learn._kriging_hyper import fit_hyperparameters, pack, unpack
from perfmodel.learn._kriging_store import kriging_arrays, kriging_of
from perfmodel.learn._local_intervals import LocalErrors, conformal_quantile, local_errors, relative_centre

COMPONENTS = (Component(("machine",), ("size", "ranks")), Component(("machine", "kind"), ("size",), rough=True),
              Component(("kind",)))  # fmt: skip


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
                    shape = np.exp(-r) if component.rough else (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)
                    matrix[i, j] += np.exp(hyper.variance[k]) * (shape if component.along else 1.0)
    return matrix


@pytest.fixture(name="hyper")
def _hyper() -> Hyperparameters:
    return Hyperparameters(
        np.array([-2.0, -3.0, -4.0]), (np.array([1.0, 0.5]), np.array([0.8]), np.zeros(0)), -6.0, -5.0
    )


def test_covariance_equals_the_element_wise_formula(hyper):
    points = _points(25)
    np.testing.assert_allclose(covariance(COMPONENTS, hyper, points), _dense(points, hyper), rtol=1e-10, atol=1e-14)


def test_prediction_at_the_points_is_covariance_times_weights(hyper):
    points = _points(40)
    kriging, _ = fit_kriging(COMPONENTS, hyper, points, _residual(points), np.arange(40))
    np.testing.assert_allclose(kriging.predict(points), _dense(points, hyper) @ kriging.weight, rtol=1e-8, atol=1e-10)


def test_far_from_everything_measured_nothing_is_corrected(hyper):
    points = _points(30)
    kriging, _ = fit_kriging(COMPONENTS, hyper, points, _residual(points), np.arange(30))
    far = Points(
        {"machine": np.array(["z"], object), "kind": np.array(["w"], object)},
        {"size": np.array([15.0]), "ranks": np.array([1.0])},
        np.zeros(1),
    )
    assert kriging.predict(far) == pytest.approx(0.0)


def test_block_left_out_equals_a_refit_without_it(hyper, monkeypatch):
    monkeypatch.setattr("perfmodel.learn._kriging.ROBUST_ROUNDS", 1)  # weights equal in both fits
    points = _points(30)
    residual, block = _residual(points), np.arange(30) // 3
    _, left_out = fit_kriging(COMPONENTS, hyper, points, residual, block)
    for b in (0, 4, 9):
        rest = np.flatnonzero(block != b)
        again, _ = fit_kriging(COMPONENTS, hyper, points.take(rest), residual[rest], block[rest])
        np.testing.assert_allclose(
            left_out[block == b], again.predict(points.take(np.flatnonzero(block == b))), rtol=1e-6, atol=1e-8
        )


def test_an_outlier_does_not_bend_its_neighbours(hyper):
    size = np.linspace(10, 30, 40)
    points = Points(
        {"machine": np.full(40, "a", object), "kind": np.full(40, "x", object)},
        {"size": size, "ranks": np.ones(40)},
        np.zeros(40),
    )
    residual = 0.1 * np.sin(size / 4)
    spoiled = residual.copy()
    spoiled[20] += 2.0
    _, clean = fit_kriging(COMPONENTS, hyper, points, residual, np.arange(40))
    _, robust = fit_kriging(COMPONENTS, hyper, points, spoiled, np.arange(40))
    assert np.abs(robust - clean)[[19, 21]].max() < 0.25 * 2.0


def test_likelihood_finds_the_length_of_a_smooth_function():
    points = _points(120, seed=3)
    residual = _residual(points)
    found = fit_hyperparameters(COMPONENTS, points, residual, np.arange(120))
    default = Hyperparameters.default(COMPONENTS)
    _, ours = fit_kriging(COMPONENTS, found, points, residual, np.arange(120))
    _, theirs = fit_kriging(COMPONENTS, default, points, residual, np.arange(120))
    assert np.abs(ours - residual).mean() < np.abs(theirs - residual).mean() + 1e-3
    assert np.all(np.isfinite(pack(found)))


def test_small_tables_keep_the_default_hyperparameters():
    points = _points(10)
    found = fit_hyperparameters(COMPONENTS, points, _residual(points), np.arange(10))
    np.testing.assert_array_equal(pack(found), pack(Hyperparameters.default(COMPONENTS)))


def test_arrays_round_trip(hyper):
    points = _points(20)
    kriging, _ = fit_kriging(COMPONENTS, hyper, points, _residual(points), np.arange(20))
    arrays, names = kriging_arrays(kriging)
    again = kriging_of(COMPONENTS, ("machine", "kind"), ("size", "ranks"), arrays, names)
    np.testing.assert_array_equal(again.predict(points), kriging.predict(points))
    assert isinstance(again, Kriging)
    np.testing.assert_array_equal(pack(unpack(COMPONENTS, arrays["hyper"])), arrays["hyper"])


def test_correlation_is_one_at_zero_distance():
    here = {"size": np.array([3.0]), "ranks": np.array([1.0])}
    for component, length in zip(COMPONENTS, ([0.0, 0.0], [0.0], []), strict=True):
        assert correlation(component, np.array(length), here, here) == pytest.approx(1.0)


def test_conformal_quantile_covers_its_level():
    generator = np.random.default_rng(0)
    inside = []
    for _ in range(200):
        q = conformal_quantile(generator.standard_t(4, 100))
        inside.append(np.mean(np.abs(generator.standard_t(4, 200)) <= q))
    assert 0.89 <= np.mean(inside) <= 0.92


def test_local_errors_follow_the_noise_and_round_trip():
    generator = np.random.default_rng(1)
    size = generator.uniform(10, 30, 4000)
    noise = np.where(size < 20, 0.2, 0.02)
    residual = generator.normal(0, noise)
    group = np.full(4000, "s", object)
    found = local_errors(group, size, residual)
    assert found.at("s", np.array([12.0]))[1][0] == pytest.approx(1.64 * 0.2, rel=0.3)
    assert found.at("s", np.array([28.0]))[1][0] == pytest.approx(1.64 * 0.02, rel=0.3)
    assert np.isnan(found.at("unknown", np.array([12.0]))[1][0])
    again = LocalErrors.of(*found.arrays())
    np.testing.assert_array_equal(again.at("s", size)[1], found.at("s", size)[1])
    covered = np.mean(np.abs(generator.normal(0, noise)) <= found.at("s", size)[1])
    assert 0.86 <= covered <= 0.95


def test_relative_centre_minimises_the_mean_relative_error():
    residual = np.random.default_rng(2).standard_t(2, 301) * 0.3
    best = relative_centre(residual)
    error = [np.mean(np.abs(np.exp(s - residual) - 1)) for s in np.linspace(-2, 2, 4001)]
    assert np.mean(np.abs(np.exp(best - residual) - 1)) <= min(error) + 1e-6
