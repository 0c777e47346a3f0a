"""Maximum a posteriori of the parameters by Gauss-Newton steps, and Laplace's approximation around it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.linalg import block_diag

Vector = Float[np.ndarray, " parameters"]
ErrorsAndGradient = Callable[
    [Vector], tuple[Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]]
]

DEGREES_OF_FREEDOM: Final = 4.0
"""Of the Student t noise: a run with a neighbour on its switch, or near the end of memory, is off by many sigmas."""
PSEUDO_RUNS: Final = 4.0
"""Weight of the prior noise level, in runs."""
_TANGENTS: Final = 12
_REWEIGHTINGS: Final = 200
_ENOUGH: Final = 1e-3
"""Relative changes, of parameters in standard deviations of their priors, that end an iteration."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Where the posterior of the parameters is largest, and how wide it is there."""

    values: Vector
    """Parameters, then offsets."""
    covariance: Float[np.ndarray, "parameters parameters"]
    noise: float
    """Scale of the Student t noise of the log errors."""
    errors: Float[np.ndarray, " observations"]
    """Log errors at `values`."""
    gradient: Float[np.ndarray, "observations parameters"]
    squares: float
    """What the maximum costs against the prior's: sum of squares of parameters and errors, each in its own standard
    deviations."""


def maximise(
    errors_and_gradient: ErrorsAndGradient,
    offsets: Float[np.ndarray, "observations offsets"],
    weight: Float[np.ndarray, " observations"],
    covariance: Float[np.ndarray, "parameters parameters"],
    lowest: Vector,
    noise: float,
) -> Posterior:
    """Most probable parameters x and offsets z given log errors e(x) + F z of observations.

    Gauss-Newton: e is replaced by its tangent, whose posterior is maximised (`_of_tangent`), and again from there.
    Parameters stay where the true posterior was largest should a switch of the critical path make them swing. The
    covariance is the inverse of the Hessian at the end, of all parameters as if none were bounded (Laplace).

    Args:
        errors_and_gradient: x -> (e, de/dx).
        offsets: F; z is standard normal.
        weight: of each observation.
        covariance: of the prior of x around 0; lowest: lower bounds.
        noise: prior scale of the noise.
    """
    sd = np.sqrt(np.diag(covariance))
    p, n = len(sd), offsets.shape[1]
    precision = np.asarray(block_diag(np.linalg.inv(covariance), np.eye(n)))
    bounds = np.concatenate([lowest, np.full(n, -np.inf)])
    x = np.zeros(p + n)
    tried: list[tuple[float, Posterior]] = []
    for attempt in range(_TANGENTS):
        e, gradient = errors_and_gradient(x[:p])
        slopes = np.hstack([gradient, offsets])
        found = _of_tangent(e - gradient @ x[:p], slopes, weight, precision, bounds, noise, x)
        error = e + offsets @ x[p:]
        tried.append((_cost(x, error, weight, precision, found.noise), replace(found, values=x, errors=error)))
        moved = float((np.abs(found.values - x)[:p] / sd).max(initial=0.0))
        if moved < _ENOUGH:
            break
        x = x + (found.values - x) / (1 if attempt < _TANGENTS // 2 else 2)
    return min(tried, key=lambda pair: pair[0])[1]


def _of_tangent(
    constant: Float[np.ndarray, " observations"],
    slopes: Float[np.ndarray, "observations parameters"],
    weight: Float[np.ndarray, " observations"],
    precision: Float[np.ndarray, "parameters parameters"],
    lowest: Vector,
    noise: float,
    x: Vector,
) -> Posterior:
    """Maximum for errors e = constant + slopes x, from x on.

    Minimises sum w (nu + 1)/2 log(1 + e^2 / (nu s^2)) + x^T P x / 2: Student t noise of scale s and normal
    priors, by least squares reweighted by u = (nu + 1) / (nu + e^2 / s^2) (Lange, Little and Taylor, JASA 84, 1989).
    Parameters that a bound holds stay on it. The noise level is s^2 = (sum w u e^2 + k noise^2) / (sum w - m + k) with
    the k runs of its prior and the number of parameters m that the observations determine (MacKay, Neural
    Computation 4, 1992, section 4).
    """
    scale, sd = noise, np.diag(precision) ** -0.5
    for _ in range(_REWEIGHTINGS):
        e = constant + slopes @ x
        u = weight * robust_weight(e, scale)
        information = slopes.T @ ((u / scale**2)[:, None] * slopes)
        hessian = information + precision
        slope = slopes.T @ (u * e) / scale**2 + precision @ x
        free = (x > lowest) | (slope < 0)
        step = np.zeros(len(x))
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], -slope[free])
        before, x = x, np.maximum(x + step, lowest)
        determined = float(np.trace(np.linalg.solve(hessian, information)))
        squares = float((u * e**2).sum()) + PSEUDO_RUNS * noise**2
        was, scale = scale, (squares / (max(weight.sum() - determined, 0.0) + PSEUDO_RUNS)) ** 0.5
        if abs(scale / was - 1) < _ENOUGH and (np.abs(x - before) / sd).max(initial=0.0) < _ENOUGH:
            break
    cost = float(x @ precision @ x + (weight * robust_weight(e, scale) * e**2).sum() / scale**2)
    return Posterior(x, np.linalg.inv(hessian), scale, e, slopes, cost)


def robust_weight(e: Float[np.ndarray, " observations"], scale: float) -> Float[np.ndarray, " observations"]:
    """Weight of each observation relative to normal noise of that scale."""
    return (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + (e / scale) ** 2)


def _cost(
    x: Vector,
    e: Float[np.ndarray, " observations"],
    weight: Float[np.ndarray, " observations"],
    precision: Float[np.ndarray, "parameters parameters"],
    scale: float,
) -> float:
    """Negative log posterior, up to a constant."""
    logs = np.log1p((e / scale) ** 2 / DEGREES_OF_FREEDOM)
    of_noise = weight.sum() * np.log(scale)
    return float((weight * (DEGREES_OF_FREEDOM + 1) / 2 * logs).sum() + of_noise + x @ precision @ x / 2)
