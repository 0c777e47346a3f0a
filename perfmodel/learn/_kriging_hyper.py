"""Hyperparameters of kriging by maximum marginal likelihood, with gradients from JAX."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import minimize

from perfmodel.learn._kriging import Component, Hyperparameters, Points, shared_codes

MAX_POINTS: Final = 600
"""Of the sample that the likelihood is taken over."""
MIN_POINTS: Final = 60
"""Smaller tables keep the defaults."""
ITERATIONS: Final = 30
_BOUNDS: Final = (-12.0, 5.0)


def fit_hyperparameters(
    components: Sequence[Component], points: Points, residual: np.ndarray, sample: np.ndarray
) -> Hyperparameters:
    """Maximise the marginal likelihood of `residual[sample]` with weak priors around the defaults."""
    start = Hyperparameters.default(components)
    if len(sample) < MIN_POINTS:
        return start
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular

    chosen, observed = points.take(sample), residual[sample]
    splits = np.cumsum([0, *(len(c.along) for c in components)])
    count = len(components)

    with jax.enable_x64(True):
        masks = []
        for component in components:
            codes, _ = shared_codes(component, chosen, chosen)
            masks.append(jnp.asarray(codes[:, None] == codes[None, :]))
        gaps = {name: jnp.asarray((value[:, None] - value[None, :]) ** 2) for name, value in chosen.coordinates.items()}
        target, unrest = jnp.asarray(observed), jnp.asarray(chosen.unrest)

        def kernel(vector: jax.Array) -> jax.Array:
            total = jnp.diag(jnp.exp(vector[-2]) + jnp.exp(vector[-1]) * unrest + 1e-9)
            for i, component in enumerate(components):
                term = jnp.exp(vector[i]) * masks[i]
                if component.along:
                    lengths = vector[count + splits[i] : count + splits[i + 1]]
                    square = sum(gaps[k] * jnp.exp(-2 * v) for k, v in zip(component.along, lengths, strict=True))
                    distance = jnp.sqrt(square + 1e-12)  # keeps the gradient finite at zero distance
                    scaled = jnp.sqrt(3.0) * distance
                    term *= jnp.exp(-distance) if component.rough else (1 + scaled) * jnp.exp(-scaled)
                total += term
            return total

        def loss(vector: jax.Array) -> jax.Array:
            lower = jnp.linalg.cholesky(kernel(vector))
            white = solve_triangular(lower, target, lower=True)
            prior = jnp.sum((vector[:count] + 6) ** 2) / 18 + jnp.sum((vector[count:-2] - 1) ** 2) / 2
            prior += (vector[-1] + 5) ** 2 / 18
            return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(lower))) + prior

        compiled = jax.jit(jax.value_and_grad(loss))

        def evaluate(vector: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = compiled(jnp.asarray(vector))
            return float(value), np.asarray(gradient, np.float64)

        first = np.concatenate([start.variance, *start.length, [start.noise, start.noise_short]])
        found = minimize(
            evaluate,
            first,
            jac=True,
            method="L-BFGS-B",
            bounds=[_BOUNDS] * len(first),
            options={"maxiter": ITERATIONS},
        ).x
    return unpack(components, found)


def pack(hyper: Hyperparameters) -> np.ndarray:
    """One vector, for files."""
    return np.concatenate([hyper.variance, *hyper.length, [hyper.noise, hyper.noise_short]])


def unpack(components: Sequence[Component], vector: np.ndarray) -> Hyperparameters:
    """Inverse of `pack`."""
    count = len(components)
    splits = np.cumsum([len(c.along) for c in components])[:-1]
    lengths = np.split(vector[count:-2], splits)
    return Hyperparameters(vector[:count], tuple(lengths), float(vector[-2]), float(vector[-1]))
