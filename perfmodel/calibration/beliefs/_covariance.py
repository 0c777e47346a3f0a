"""The covariance function for kriging.

A Gaussian process on log residuals whose covariance is a sum of components; each joins points that
agree in some categories (say device and rank count) and are near in some coordinates (say log
size). Sums of such components share what siblings know: another dtype, library version, rank count
or device at the same size. Rasmussen and Williams, "Gaussian Processes for Machine Learning", MIT
Press 2006: Matern kernels eqs. 4.14-4.17, marginal likelihood eq. 5.8.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np


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
    """`n` points with categories, coordinates and a noise scale for short times."""

    categories: Mapping[str, np.ndarray]
    """For each category, the text that every point has in it."""
    coordinates: Mapping[str, np.ndarray]
    """For each coordinate, the value that every point has in it."""
    unrest: np.ndarray
    """Share, from 0 to 1, of the noise variance that only short times have."""

    def __len__(self) -> int:
        return len(self.unrest)

    def take(self, index: np.ndarray) -> "Points":
        """The points at the positions in `index`."""
        return Points(
            {name: values[index] for name, values in self.categories.items()},
            {name: values[index] for name, values in self.coordinates.items()},
            self.unrest[index],
        )


@dataclass(frozen=True)
class Hyperparameters:
    """Logs of variance per component, length per coordinate, and two noise variances."""

    variance: np.ndarray
    length: tuple[np.ndarray, ...]
    noise: float
    noise_short: float

    @classmethod
    def default(cls, components: Sequence[Component]) -> "Hyperparameters":
        """Hyperparameters at which the search starts."""
        variance = np.full(len(components), -5.0)
        length = tuple(np.full(len(component.along), 1.0) for component in components)
        return cls(variance, length, -7.0, -6.0)


def shared_codes(
    component: Component, row_points: Points, column_points: Points
) -> tuple[np.ndarray, np.ndarray]:
    """Integer codes that are equal if and only if points share the component's categories."""
    # Category by category, codes are renumbered, so that they stay small however many categories
    # there are.
    codes = np.zeros(len(row_points) + len(column_points), dtype=np.int64)
    for name in component.same:
        values = np.concatenate(
            [row_points.categories[name], column_points.categories[name]]
        ).astype(str)
        _, code = np.unique(values, return_inverse=True)
        codes = np.unique(codes * (code.max(initial=0) + 1) + code, return_inverse=True)[1]
    return codes[: len(row_points)], codes[len(row_points) :]


def correlation(
    component: Component,
    length: np.ndarray,
    row_points: Mapping[str, np.ndarray],
    column_points: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Correlation float64[rows, columns] by scaled distance along the component's coordinates."""
    # A component without coordinates is constant over all that share its categories.
    if not component.along:
        coordinates = next(iter(row_points.values())), next(iter(column_points.values()))
        return np.ones((len(coordinates[0]), len(coordinates[1])))

    # Each coordinate is scaled by its own length, so that irrelevant ones get long and drop out.
    square = 0.0
    for name, log_length in zip(component.along, length, strict=True):
        difference = row_points[name][:, None] - column_points[name][None, :]
        square = square + (difference * np.exp(-log_length)) ** 2
    distance = np.sqrt(square)
    if component.rough:
        return np.exp(-distance)
    scaled = np.sqrt(3.0) * distance
    return (1 + scaled) * np.exp(-scaled)


def _blocks(
    row_codes: np.ndarray, column_codes: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Index pairs of the points on both sides that share a code."""
    # Sort both sides by code: the points that share a code then lie in one run on each side.
    row_order = np.argsort(row_codes, kind="stable")
    column_order = np.argsort(column_codes, kind="stable")
    sorted_rows = row_codes[row_order]
    sorted_columns = column_codes[column_order]
    codes = np.intersect1d(row_codes, column_codes)
    row_starts = np.searchsorted(sorted_rows, codes)
    row_ends = np.searchsorted(sorted_rows, codes, "right")
    column_starts = np.searchsorted(sorted_columns, codes)
    column_ends = np.searchsorted(sorted_columns, codes, "right")
    runs = zip(row_starts, row_ends, column_starts, column_ends, strict=True)
    for row_start, row_end, column_start, column_end in runs:
        yield row_order[row_start:row_end], column_order[column_start:column_end]


def covariance(
    components: Sequence[Component],
    hyper: Hyperparameters,
    row_points: Points,
    column_points: Points | None = None,
) -> np.ndarray:
    """Noise-free covariance float64[rows, columns] of points with others, or with one another."""
    column_points = row_points if column_points is None else column_points
    # Points that do not share a component's categories have no covariance by it, so only blocks are
    # computed.
    total = np.zeros((len(row_points), len(column_points)))
    for i, component in enumerate(components):
        for rows, columns in _blocks(*shared_codes(component, row_points, column_points)):
            names = component.along or tuple(row_points.coordinates)
            row_coordinates = {k: row_points.coordinates[k][rows] for k in names}
            column_coordinates = {k: column_points.coordinates[k][columns] for k in names}
            correlated = correlation(
                component, hyper.length[i], row_coordinates, column_coordinates
            )
            total[np.ix_(rows, columns)] += np.exp(hyper.variance[i]) * correlated
    return total


ITERATIONS: Final = 30
PADDING: Final = 64
_BOUNDS: Final = (-12.0, 5.0)


def fit_hyperparameters(
    components: Sequence[Component],
    points: Points,
    residual: np.ndarray,
    sample: np.ndarray,
) -> Hyperparameters:
    """Maximise the marginal likelihood of `residual[sample]`, with weak priors."""
    import jax
    import jax.numpy as jnp
    from scipy.optimize import minimize

    chosen = points.take(sample)
    # Samples are padded to few sizes, so that each is compiled only once.
    pad = -len(sample) % PADDING
    used = np.arange(len(sample) + pad) < len(sample)
    codes = [
        np.pad(shared_codes(component, chosen, chosen)[0], (0, pad)) for component in components
    ]
    coordinates = {name: np.pad(value, (0, pad)) for name, value in chosen.coordinates.items()}
    columns = (
        used,
        codes,
        coordinates,
        np.pad(residual[sample], (0, pad)),
        np.pad(chosen.unrest, (0, pad)),
    )
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, columns)
        compiled = _likelihood(tuple(components))

        def evaluate(vector: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = compiled(jnp.asarray(vector), *data)
            return float(value), np.asarray(gradient, np.float64)

        first = pack(Hyperparameters.default(components))
        optimum = minimize(
            evaluate,
            first,
            jac=True,
            method="L-BFGS-B",
            bounds=[_BOUNDS] * len(first),
            options={"maxiter": ITERATIONS},
        )
    return unpack(components, optimum.x)


@lru_cache(maxsize=64)
def _likelihood(components: tuple[Component, ...]) -> Callable[..., Any]:
    """Compiled negative log likelihood of the `used` points, with its gradient."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular

    count = len(components)
    splits = np.cumsum([0, *(len(c.along) for c in components)])

    def kernel(
        vector: jax.Array, used: Any, codes: Any, coordinates: Any, unrest: Any
    ) -> jax.Array:
        # The last two hyperparameters are noise of all points and of short times. The tiny addend
        # keeps the factorisation stable.
        total = jnp.diag(jnp.exp(vector[-2]) + jnp.exp(vector[-1]) * unrest + 1e-9)
        for i, component in enumerate(components):
            term = jnp.exp(vector[i]) * (codes[i][:, None] == codes[i][None, :])
            if component.along:
                lengths = vector[count + splits[i] : count + splits[i + 1]]
                square = sum(
                    (coordinates[k][:, None] - coordinates[k][None, :]) ** 2 * jnp.exp(-2 * v)
                    for k, v in zip(component.along, lengths, strict=True)
                )
                # The addend keeps the gradient finite at zero distance.
                distance = jnp.sqrt(square + 1e-12)
                scaled = jnp.sqrt(3.0) * distance
                if component.rough:
                    term *= jnp.exp(-distance)
                else:
                    term *= (1 + scaled) * jnp.exp(-scaled)
            total += term
        return jnp.where(used[:, None] & used[None, :], total, jnp.eye(len(used)))

    def loss(
        vector: jax.Array, used: Any, codes: Any, coordinates: Any, target: Any, unrest: Any
    ) -> jax.Array:
        lower = jnp.linalg.cholesky(kernel(vector, used, codes, coordinates, unrest))
        white = solve_triangular(lower, target, lower=True)
        # Weak normal priors around the defaults keep components that the sample cannot tell apart
        # in bounds.
        prior = jnp.sum((vector[:count] + 6) ** 2) / 18 + jnp.sum((vector[count:-2] - 1) ** 2) / 2
        prior += (vector[-1] + 5) ** 2 / 18
        return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(lower))) + prior

    return jax.jit(jax.value_and_grad(loss))


def pack(hyper: Hyperparameters) -> np.ndarray:
    """Join the hyperparameters to one vector, for the optimiser that searches them."""
    return np.concatenate([hyper.variance, *hyper.length, [hyper.noise, hyper.noise_short]])


def unpack(components: Sequence[Component], vector: np.ndarray) -> Hyperparameters:
    """Split a vector of `pack` into hyperparameters."""
    count = len(components)
    splits = np.cumsum([len(c.along) for c in components])[:-1]
    lengths = np.split(vector[count:-2], splits)
    return Hyperparameters(vector[:count], tuple(lengths), float(vector[-2]), float(vector[-1]))
