"""Hyperparameters of kriging by maximum marginal likelihood, with gradients from JAX."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from perfmodel.learn._kriging import Component, Hyperparameters, Points, shared_codes

MAX_POINTS: Final = 600
"""Of the sample that the likelihood is taken over."""
MIN_POINTS: Final = 60
"""Smaller tables keep the defaults."""
ITERATIONS: Final = 30
PADDING: Final = 64
_BOUNDS: Final = (-12.0, 5.0)


def fit_hyperparameters(
    components: Sequence[Component],
    points: Points,
    residual: np.ndarray,
    sample: np.ndarray,
    fewest: int = MIN_POINTS,
) -> Hyperparameters:
    """Maximise the marginal likelihood of `residual[sample]` with weak priors around the defaults.

    Fewer points than `fewest` keep the defaults.
    """
    start = Hyperparameters.default(components)
    if len(sample) < fewest:
        return start
    import jax
    import jax.numpy as jnp
    from scipy.optimize import minimize

    chosen = points.take(sample)
    # padded to few sizes, each compiled once
    pad = -len(sample) % PADDING
    used = np.arange(len(sample) + pad) < len(sample)
    codes = [np.pad(shared_codes(component, chosen, chosen)[0], (0, pad)) for component in components]
    coordinates = {name: np.pad(value, (0, pad)) for name, value in chosen.coordinates.items()}
    columns = (used, codes, coordinates, np.pad(residual[sample], (0, pad)), np.pad(chosen.unrest, (0, pad)))
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, columns)
        compiled = _likelihood(tuple(components))

        def evaluate(vector: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = compiled(jnp.asarray(vector), *data)
            return float(value), np.asarray(gradient, np.float64)

        first = pack(start)
        found = minimize(
            evaluate, first, jac=True, method="L-BFGS-B",
            bounds=[_BOUNDS] * len(first), options={"maxiter": ITERATIONS},
        )  # fmt: skip
    return unpack(components, found.x)


@lru_cache(maxsize=64)
def _likelihood(components: tuple[Component, ...]) -> Callable[..., Any]:
    """Compiled negative log likelihood with its gradient; points that are not `used` have no part in it."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular

    count = len(components)
    splits = np.cumsum([0, *(len(c.along) for c in components)])

    def kernel(vector: jax.Array, used: Any, codes: Any, coordinates: Any, unrest: Any) -> jax.Array:
        total = jnp.diag(jnp.exp(vector[-2]) + jnp.exp(vector[-1]) * unrest + 1e-9)
        for i, component in enumerate(components):
            term = jnp.exp(vector[i]) * (codes[i][:, None] == codes[i][None, :])
            if component.along:
                lengths = vector[count + splits[i] : count + splits[i + 1]]
                square = sum(
                    (coordinates[k][:, None] - coordinates[k][None, :]) ** 2 * jnp.exp(-2 * v)
                    for k, v in zip(component.along, lengths, strict=True)
                )
                distance = jnp.sqrt(square + 1e-12)  # keeps the gradient finite at zero distance
                scaled = jnp.sqrt(3.0) * distance
                term *= jnp.exp(-distance) if component.rough else (1 + scaled) * jnp.exp(-scaled)
            total += term
        return jnp.where(used[:, None] & used[None, :], total, jnp.eye(len(used)))

    def loss(vector: jax.Array, used: Any, codes: Any, coordinates: Any, target: Any, unrest: Any) -> jax.Array:
        lower = jnp.linalg.cholesky(kernel(vector, used, codes, coordinates, unrest))
        white = solve_triangular(lower, target, lower=True)
        prior = jnp.sum((vector[:count] + 6) ** 2) / 18 + jnp.sum((vector[count:-2] - 1) ** 2) / 2
        prior += (vector[-1] + 5) ** 2 / 18
        return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(lower))) + prior

    return jax.jit(jax.value_and_grad(loss))


def pack(hyper: Hyperparameters) -> np.ndarray:
    """One vector, for files."""
    return np.concatenate([hyper.variance, *hyper.length, [hyper.noise, hyper.noise_short]])


def unpack(components: Sequence[Component], vector: np.ndarray) -> Hyperparameters:
    """Inverse of `pack`."""
    count = len(components)
    splits = np.cumsum([len(c.along) for c in components])[:-1]
    lengths = np.split(vector[count:-2], splits)
    return Hyperparameters(vector[:count], tuple(lengths), float(vector[-2]), float(vector[-1]))
