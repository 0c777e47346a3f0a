"""Parameters given runs: the update of the model of sites (`perfmodel.prediction.FittedRuns`) around tangents of the
timeline (Gauss-Newton)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.prediction import FittedRuns

Vector = Float[np.ndarray, " parameters"]
ErrorsAndGradient = Callable[
    [Vector], tuple[Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]]
]

_TANGENTS: Final = 12
_ENOUGH: Final = 1e-3
"""Change of parameters, in standard deviations of their priors, that ends the iteration."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Parameters given runs."""

    values: Vector
    """Expected, less the centres of their priors."""
    runs: FittedRuns
    """As their tangents at `values` are, with the parameters that a bound holds known exactly."""
    errors: Float[np.ndarray, " observations"]
    """Log of predicted over measured time at `values`."""
    gradient: Float[np.ndarray, "observations parameters"]


def fitted(errors_and_gradient: ErrorsAndGradient, runs: FittedRuns, lowest: Vector) -> Posterior:
    """Parameters x given the log errors e(x) of runs.

    e is replaced by its tangent, under which all is normal for every node of the site's scales, and again from the
    parameters expected there. Should a switch of the critical path make them swing, they stay where the errors at the
    parameters agreed best with those that their tangent expected.

    Args:
        errors_and_gradient: x -> (e, de/dx), of log predicted over measured time.
        runs: all but `error` and `slopes`.
        lowest: lower bounds of x.
    """
    sd = np.sqrt(np.diag(runs.covariance))
    x = np.zeros(len(sd))
    tried: list[tuple[float, Posterior]] = []
    for attempt in range(_TANGENTS):
        errors, gradient = errors_and_gradient(x)
        of_tangent, found = _of_tangent(runs, gradient @ x - errors, gradient, lowest)
        moved = float((np.abs(found - x) / sd).max(initial=0.0))
        tried.append((moved, Posterior(x, of_tangent, errors, gradient)))
        if moved < _ENOUGH:
            break
        x = x + (found - x) / (1 if attempt < _TANGENTS // 2 else 2)
    return min(tried, key=lambda pair: pair[0])[1]


def _of_tangent(
    runs: FittedRuns, error: Float[np.ndarray, " observations"], gradient: np.ndarray, lowest: Vector
) -> tuple[FittedRuns, Vector]:
    """Runs of a tangent and the parameters expected given them: those that would lie below their bounds stay there."""
    held, prior = np.zeros(len(lowest), bool), np.array(runs.covariance)
    while True:
        fixed = np.where(held, lowest, 0.0)
        free = prior * ~held[:, None] * ~held
        told = replace(
            runs,
            slopes=tuple(map(tuple, gradient.tolist())),
            error=tuple((error - gradient @ fixed).tolist()),
            covariance=tuple(map(tuple, free.tolist())),
        )
        found = told.values + fixed
        below = (found < lowest) & ~held
        if not below.any():
            return told, found
        held |= below
