"""Kriging: what measured points say of their neighbours beyond a physical curve.

A Gaussian process on log residuals whose covariance is a sum of components; each joins points that agree in
some categories (say device and rank count) and are near in some coordinates (say log size). Sums of such
components share what siblings know: another dtype, library version, rank count or device at the same size.
Rasmussen and Williams, "Gaussian Processes for Machine Learning", MIT Press 2006: predictor eq. 2.25, Matern
kernels eqs. 4.14-4.17, leave-one-out eqs. 5.12 (here by blocks), marginal likelihood eq. 5.8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

DEGREES: Final = 4.0
"""Of the Student-t weights that keep outliers from bending their neighbours."""
ROBUST_ROUNDS: Final = 2
WEIGHTS: Final = (0.02, 1.2)


@dataclass(frozen=True)
class Component:
    """One term of the covariance."""

    same: tuple[str, ...]
    """Categories that two points must share."""
    along: tuple[str, ...] = ()
    """Coordinates over which the correlation falls off; none: constant."""
    rough: bool = False
    """Exponential (follows jumps) instead of Matern 3/2 (smooth)."""


@dataclass(frozen=True)
class Points:
    """`n` points: categories as text, coordinates as numbers, and how noisy short times make them."""

    categories: Mapping[str, np.ndarray]
    coordinates: Mapping[str, np.ndarray]
    unrest: np.ndarray
    """0..1, share of the noise variance that only short times have."""

    def __len__(self) -> int:
        return len(self.unrest)

    def take(self, index: np.ndarray) -> "Points":
        return Points(
            {k: v[index] for k, v in self.categories.items()},
            {k: v[index] for k, v in self.coordinates.items()},
            self.unrest[index],
        )


@dataclass(frozen=True)
class Hyperparameters:
    """Natural logarithms: variance per component, length per component and coordinate, two noise variances."""

    variance: np.ndarray
    length: tuple[np.ndarray, ...]
    noise: float
    noise_short: float

    @classmethod
    def default(cls, components: Sequence[Component]) -> "Hyperparameters":
        """Where the search starts; also what small tables use."""
        return cls(np.full(len(components), -5.0), tuple(np.full(len(c.along), 1.0) for c in components), -7.0, -6.0)


def shared_codes(component: Component, left: Points, right: Points) -> tuple[np.ndarray, np.ndarray]:
    """Integers that are equal exactly where two points share the component's categories."""
    both = np.zeros(len(left) + len(right), dtype=np.int64)
    for name in component.same:
        values = np.concatenate([left.categories[name], right.categories[name]]).astype(str)
        _, code = np.unique(values, return_inverse=True)
        both = np.unique(both * (code.max(initial=0) + 1) + code, return_inverse=True)[1]
    return both[: len(left)], both[len(left) :]


def correlation(
    component: Component, length: np.ndarray, left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Correlation float64[left, right] by scaled distance along the component's coordinates."""
    if not component.along:
        first = next(iter(left.values())), next(iter(right.values()))
        return np.ones((len(first[0]), len(first[1])))
    square = 0.0
    for name, log_length in zip(component.along, length, strict=True):
        square = square + ((left[name][:, None] - right[name][None, :]) * np.exp(-log_length)) ** 2
    distance = np.sqrt(square)
    if component.rough:
        return np.exp(-distance)
    scaled = np.sqrt(3.0) * distance
    return (1 + scaled) * np.exp(-scaled)


def _blocks(left: np.ndarray, right: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Index pairs of the points on both sides that share a code."""
    order_left, order_right = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    codes = np.intersect1d(left, right)
    starts = np.searchsorted(left[order_left], codes), np.searchsorted(right[order_right], codes)
    ends = np.searchsorted(left[order_left], codes, "right"), np.searchsorted(right[order_right], codes, "right")
    for a0, a1, b0, b1 in zip(starts[0], ends[0], starts[1], ends[1], strict=True):
        yield order_left[a0:a1], order_right[b0:b1]


def covariance(
    components: Sequence[Component], hyper: Hyperparameters, points: Points, others: Points | None = None
) -> np.ndarray:
    """Noise-free covariance float64[n, m] of `points` with `others`, or with one another."""
    others = points if others is None else others
    total = np.zeros((len(points), len(others)))
    for i, component in enumerate(components):
        for a, b in _blocks(*shared_codes(component, points, others)):
            names = component.along or tuple(points.coordinates)
            left = {k: points.coordinates[k][a] for k in names}
            right = {k: others.coordinates[k][b] for k in names}
            near = correlation(component, hyper.length[i], left, right)
            total[np.ix_(a, b)] += np.exp(hyper.variance[i]) * near
    return total


@dataclass(frozen=True)
class Kriging:
    """A fitted process: its points and their weights."""

    components: tuple[Component, ...]
    hyper: Hyperparameters
    points: Points
    weight: np.ndarray
    """K^-1 y, float64[n]."""

    def predict(self, points: Points) -> np.ndarray:
        """Expected log residual at `points`, float64[n]; 0 far from everything measured."""
        result = np.zeros(len(points))
        for i, component in enumerate(self.components):
            left, right = shared_codes(component, points, self.points)
            names = component.along or tuple(points.coordinates)
            scale = np.exp(self.hyper.variance[i])
            for a, b in _blocks(left, right):
                near = correlation(
                    component,
                    self.hyper.length[i],
                    {k: points.coordinates[k][a] for k in names},
                    {k: self.points.coordinates[k][b] for k in names},
                )
                result[a] += scale * (near @ self.weight[b])
        return result


def fit_kriging(
    components: Sequence[Component],
    hyper: Hyperparameters,
    points: Points,
    residual: np.ndarray,
    block: np.ndarray,
) -> tuple[Kriging, np.ndarray]:
    """Condition the process on `residual` (float64[n]); also the prediction of each point without its block.

    Points of one `block` (int[n]: all repeats of one shape) are left out together, so that the second result
    is an honest prediction of a shape never measured. Outliers are weighed down by Student-t weights on it.
    """
    n = len(points)
    kernel = covariance(components, hyper, points)
    noise = np.exp(hyper.noise) + np.exp(hyper.noise_short) * points.unrest
    robust = np.ones(n)
    weight, without = np.zeros(n), np.zeros(n)
    groups = _members(block)
    for _ in range(ROBUST_ROUNDS):
        matrix = kernel.copy()
        matrix[np.diag_indices(n)] += noise / robust + 1e-9
        inverse = _inverse(matrix)
        weight = inverse @ residual
        variance = np.ones(n)
        for index in groups:
            local = np.linalg.inv(inverse[np.ix_(index, index)])
            without[index] = residual[index] - local @ weight[index]
            variance[index] = np.diag(local)
        robust = np.clip((DEGREES + 1) / (DEGREES + (residual - without) ** 2 / variance), *WEIGHTS)
    return Kriging(tuple(components), hyper, points, weight), without


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """Inverse of a positive definite matrix by its Cholesky factor, a third of the work of a solve."""
    from scipy.linalg import get_lapack_funcs

    factorise, invert = get_lapack_funcs(("potrf", "potri"), (matrix,))
    factor, failed = factorise(np.asfortranarray(matrix), lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError(f"covariance is not positive definite at point {failed}")
    inverse, _ = invert(factor, lower=1, overwrite_c=1)
    return np.tril(inverse) + np.tril(inverse, -1).T


def _members(block: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(block, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(block[order])) + 1)
