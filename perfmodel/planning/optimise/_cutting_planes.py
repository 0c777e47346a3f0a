"""Lower bounds for convex problems, from critical paths of the timeline.

A makespan is the largest sum of durations over paths. Where every duration is convex in the
unknowns, each path gives a plane below the objective: its length at a point plus its gradient times
the step away from it. The least of the largest plane over all allowed values, a linear program, is
a lower bound (Kelley 1960).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise._relax import Relaxation, StaticArgs, Values, objective_at
from perfmodel.planning.optimise._variables import Polytope
from perfmodel.timeline import makespan_lanes_and_grad

_GAP: Final = 1e-3
"""Relative distance between bound and value at which no more planes are needed."""
_NOISE: Final = 0.01
_LANES: Final = 64
_SAFE: Final = 1e-6
"""Share by which bounds are lowered for single precision and the solver's tolerance."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """A lower bound, and the best values found while computing it."""

    lower_bound: float
    values: dict[str, np.ndarray]


def convex_bound(problem: Relaxation, values: Values, *, rounds: int = 8) -> Bounded:
    """Bound the objective over all values of the variables, starting from paths that are nearly
    critical at `values`.

    Args:
        problem: without limits or choices, and with durations that are convex in the values (the
            caller's word).
        values: good ones; the bound is tight where they are close to the best.
        rounds: times that planes are added where the linear program's solution lies (half-way from
            the best).

    Raises:
        PerfModelError: limits or choices, for which planes prove nothing.
    """
    allowed = [v.polytope for v in problem.variables.values()]
    polytopes = [polytope for polytope in allowed if polytope is not None]
    if problem.limits is not None or len(polytopes) < len(allowed):
        raise PerfModelError(
            "a convex bound needs unknowns of kind Shares or Box and no further limits; leave the bound out"
        )
    best = {name: np.asarray(value, float) for name, value in values.items()}

    # Kelley's method, damped: planes are added half-way between the best point and the minimum of
    # the planes so far, since the minimum itself jumps from corner to corner.
    value = objective_at(problem, best)
    point = best
    bound = 0.0
    planes: list[np.ndarray] = []
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        planes.append(_planes(problem, point, rng))
        least = _least_of_planes(problem, polytopes, np.concatenate(planes))

        # Without a solution there is no point to go on from; the bound so far holds, if only 0.
        if least is None:
            break
        bound, lowest = least
        point = {name: (best[name] + lowest[name]) / 2 for name in best}
        midway_value = objective_at(problem, point)
        if midway_value < value:
            best, value = point, midway_value
        if value <= bound * (1 + _GAP):
            break
    return Bounded(bound * (1 - _SAFE), best)


def _planes(
    problem: Relaxation, at: Values, rng: np.random.Generator
) -> Float[np.ndarray, "planes 1+unknowns"]:
    """Origin and gradient of each path that is critical under slightly perturbed durations."""
    values = {name: jnp.asarray(value, float) for name, value in at.items()}

    # A path that is critical under 1 % of noise is nearly critical without it. Its plane is valid
    # at any rate, and all of them come from one call.
    seconds = np.asarray(_durations(problem.static_args, values, problem.single))
    noise = np.exp(_NOISE * rng.standard_normal((_LANES, len(seconds))))
    noise[0] = 1.0
    paths = np.unique(makespan_lanes_and_grad(problem.one_program, seconds * noise)[1], axis=0)

    # Pad to as many rows as lanes, so that JAX traces one shape only.
    padded = np.pad(paths, ((0, _LANES - len(paths)), (0, 0)))
    slopes = np.asarray(_gradients(problem.static_args, values, problem.single, padded), float)[
        : len(paths)
    ]
    point = np.concatenate([np.ravel(value) for value in at.values()])
    return np.column_stack([paths.astype(float) @ seconds - slopes @ point, slopes])


@partial(jax.jit, static_argnums=0)
def _durations(form: StaticArgs, point: Values, constants: Values) -> Float[Array, " classes"]:
    return form.durations({**point, **constants})


@partial(jax.jit, static_argnums=0)
def _gradients(
    form: StaticArgs,
    point: Values,
    constants: Values,
    paths: Float[Array, "paths classes"],
) -> Float[Array, "paths unknowns"]:
    """Return the gradient of every path's length with respect to the unknowns."""
    # Counts of classes on a path times the Jacobian of the durations: the gradient of the path's
    # length by the unknowns.
    seconds, back = jax.vjp(lambda values: form.durations({**values, **constants}), dict(point))

    def slope(counts: Array) -> Array:
        (gradient,) = back(counts.astype(seconds.dtype))
        return jnp.concatenate([jnp.ravel(gradient[name]) for name in point])

    return jax.vmap(slope)(paths)


def _least_of_planes(
    problem: Relaxation,
    polytopes: Sequence[Polytope],
    planes: Float[np.ndarray, "planes 1+unknowns"],
) -> tuple[float, dict[str, np.ndarray]] | None:
    """Minimise the largest plane: a variable per unknown, and one above all planes.

    Returns:
        The minimum and where it lies; None where the solver finds none.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    n = planes.shape[1] - 1
    shapes = {name: variable.free_shape for name, variable in problem.variables.items()}

    # Unknowns are flattened one variable after the other. Each has its variable's bounds, and
    # shares have a fixed sum.
    variable_of_unknown = np.repeat(
        np.arange(len(shapes)), [prod(shape) for shape in shapes.values()]
    )
    bounds = [(polytopes[i].low, polytopes[i].high) for i in variable_of_unknown.tolist()]
    totals = {
        i: polytope.total for i, polytope in enumerate(polytopes) if polytope.total is not None
    }
    sums = np.array([np.append(variable_of_unknown == i, 0.0) for i in totals])
    solved = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=csr_array(np.column_stack([planes[:, 1:], -np.ones(len(planes))])),
        b_ub=-planes[:, 0],
        A_eq=sums if totals else None,
        b_eq=list(totals.values()) or None,
        bounds=[*bounds, (0.0, None)],
    )
    if solved.status != 0:
        return None
    lowest = {}
    for i, (name, shape) in enumerate(shapes.items()):
        lowest[name] = solved.x[:n][variable_of_unknown == i].reshape(shape)
    return float(solved.fun), lowest
