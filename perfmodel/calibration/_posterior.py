"""Maximum a posteriori of the parameters by Levenberg-Marquardt, and Laplace's approximation around it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, " parameters"]
Errors = Callable[[Vector], Float[np.ndarray, " observations"]]
ErrorsAndGradient = Callable[
    [Vector], tuple[Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]]
]

DEGREES_OF_FREEDOM: Final = 4.0
"""Of the Student t noise: a run with a neighbour on its switch, or near the end of memory, is off by many sigmas."""
PSEUDO_RUNS: Final = 4.0
"""Weight of the prior noise level, in runs."""
_ROUNDS: Final = 12
_STEPS: Final = 20
_ENOUGH: Final = 1e-3
"""Steps shorter than this, in standard deviations of the prior, end a round."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Where the posterior of the parameters is largest, and how wide it is there."""

    values: Vector
    covariance: Float[np.ndarray, "parameters parameters"]
    noise: float
    """Scale of the Student t noise of the log errors."""
    errors: Float[np.ndarray, " observations"]
    """Log errors at `values`."""
    gradient: Float[np.ndarray, "observations parameters"]


def maximise(
    errors: Errors,
    errors_and_gradient: ErrorsAndGradient,
    weight: Float[np.ndarray, " observations"],
    sd: Vector,
    lowest: Vector,
    noise: float,
) -> Posterior:
    """Most probable parameters given log errors e(x) of observations of weights w.

    Minimises sum w (nu + 1)/2 log(1 + e^2 / (nu s^2)) + sum x^2 / (2 sd^2): Student t noise of scale s (Lange, Little
    and Taylor, JASA 84, 1989, whose weights u = (nu + 1) / (nu + e^2 / s^2) the Gauss-Newton steps take) and
    normal priors. Parameters that a bound holds stay on it. Between the rounds the noise level is
    s^2 = (sum w u e^2 + k noise^2) / (sum w - p + k) with the k runs of its prior and the number of parameters p that
    the observations determine (MacKay, Neural Computation 4, 1992, section 4). The covariance is the inverse of the
    Hessian at the end, of all parameters as if none were bounded (Laplace).

    Args:
        errors: x -> e; errors_and_gradient: x -> (e, de/dx).
        weight: w; sd: standard deviations of the priors around 0; lowest: lower bounds; noise: prior scale.
    """
    x, scale = np.zeros(len(sd)), noise
    e, gradient = errors_and_gradient(x)
    precision = 1 / sd**2
    for _ in range(_ROUNDS):
        x, e, gradient = _round(errors, errors_and_gradient, weight, precision, lowest, scale, x, e, gradient)
        information, hessian = _hessians(e, gradient, weight, precision, scale)
        determined = float(np.trace(np.linalg.solve(hessian, information)))
        left = max(weight.sum() - determined, 0.0)
        squares = float((weight * robust_weight(e, scale) * e**2).sum())
        before, scale = scale, ((squares + PSEUDO_RUNS * noise**2) / (left + PSEUDO_RUNS)) ** 0.5
        if abs(np.log(scale / before)) < 0.01:
            break
    _, hessian = _hessians(e, gradient, weight, precision, scale)
    return Posterior(x, np.linalg.inv(hessian), scale, e, gradient)


def robust_weight(e: Float[np.ndarray, " observations"], scale: float) -> Float[np.ndarray, " observations"]:
    """Weight of each observation relative to normal noise of that scale."""
    return (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + (e / scale) ** 2)


def _hessians(
    e: Float[np.ndarray, " observations"],
    gradient: Float[np.ndarray, "observations parameters"],
    weight: Float[np.ndarray, " observations"],
    precision: Vector,
    scale: float,
) -> tuple[Float[np.ndarray, "parameters parameters"], Float[np.ndarray, "parameters parameters"]]:
    """Gauss-Newton information of the observations, and with the priors'."""
    u = weight * robust_weight(e, scale) / scale**2
    information = gradient.T @ (u[:, None] * gradient)
    return information, information + np.diag(precision)


def _round(
    errors: Errors,
    errors_and_gradient: ErrorsAndGradient,
    weight: Float[np.ndarray, " observations"],
    precision: Vector,
    lowest: Vector,
    scale: float,
    x: Vector,
    e: Float[np.ndarray, " observations"],
    gradient: Float[np.ndarray, "observations parameters"],
) -> tuple[Vector, Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]]:
    """Levenberg-Marquardt at a fixed noise level."""

    def cost(at: Vector, errors_at: Float[np.ndarray, " observations"]) -> float:
        logs = np.log1p((errors_at / scale) ** 2 / DEGREES_OF_FREEDOM)
        return float((weight * (DEGREES_OF_FREEDOM + 1) / 2 * logs).sum() + (at**2 * precision).sum() / 2)

    damping, now = 1e-3, cost(x, e)
    for _ in range(_STEPS):
        _, hessian = _hessians(e, gradient, weight, precision, scale)
        slope = gradient.T @ (weight * robust_weight(e, scale) * e) / scale**2 + x * precision
        free = (x > lowest) | (slope < 0)
        step = np.zeros(len(x))
        damped = hessian + damping * np.diag(np.diag(hessian))
        step[free] = np.linalg.solve(damped[np.ix_(free, free)], -slope[free])
        there = np.maximum(x + step, lowest)
        errors_there = errors(there)
        if (after := cost(there, errors_there)) > now:
            damping *= 10
            if damping > 1e6:
                break
            continue
        moved = float((np.abs(there - x) * np.sqrt(precision)).max(initial=0.0))
        x, now, damping = there, after, damping / 5
        e, gradient = errors_and_gradient(x)
        if moved < _ENOUGH:
            break
    return x, e, gradient
