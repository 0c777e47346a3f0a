"""Runs of one source as a Student t process: how likely some are, and what some say of the others.

Shah, Wilson and Ghahramani, "Student-t processes as alternatives to Gaussian processes", AISTATS 2014.
"""

from typing import Any, Final

import numpy as np
from scipy.special import stdtrit

DEGREES_OF_FREEDOM: Final = 5.0
"""Of the scales of sites. Assumed: the record has too few sources to tell."""
OUTLIERS: Final = 4.0
"""Degrees of freedom of the noise of one run: those that lie far from the others of their source lose weight."""
_REWEIGHTED: Final = 20


def log_t(error: Any, variance: Any, degrees: float) -> Any:
    """Log density of Student's t."""
    import jax.numpy as jnp
    from jax.scipy.special import gammaln

    norm = gammaln((degrees + 1) / 2) - gammaln(degrees / 2) - 0.5 * jnp.log(degrees * jnp.pi * variance)
    return norm - (degrees + 1) / 2 * jnp.log1p(error**2 / (degrees * variance))


def given(
    total: np.ndarray, residual: np.ndarray, noise: float, known: np.ndarray, others: np.ndarray
) -> tuple[float, float]:
    """Mean relative error of some runs, and the share of them inside their intervals, given others of their source."""
    weight, error = (OUTLIERS + 1) / (OUTLIERS + residual[known] ** 2 / noise), residual[known]
    prior, across = total[np.ix_(known, known)], total[np.ix_(known, others)]
    for _ in range(_REWEIGHTED):  # from the side on which runs that lie far off are outliers
        solved = np.linalg.solve(prior + np.diag(noise / weight), error)
        weight = (OUTLIERS + 1) / (OUTLIERS + (solved * noise / weight) ** 2 / noise)
    at = prior + np.diag(noise / weight)
    solved, gain = np.linalg.solve(at, error), np.linalg.solve(at, across)
    degrees = DEGREES_OF_FREEDOM + len(known)
    variance = total[others, others] - (across * gain).sum(axis=0) + noise
    variance = variance * (DEGREES_OF_FREEDOM + error @ solved) / degrees
    left = residual[others] - solved @ across
    inside = np.abs(left) <= stdtrit(degrees, 0.95) * np.sqrt(variance)
    return float(np.abs(np.expm1(-left)).mean()), float(inside.mean())
