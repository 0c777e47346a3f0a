"""Gradient relaxation: descent on the timeline from many starts, then rounding.

The objective is the exact makespan; what makes it smooth is noise on the durations that fades out
(a jittered gradient costs a fraction of a smoothed maximum's and shares ties among paths). Limits
are kept by an augmented Lagrangian (Hestenes 1969, Powell 1969). All starts and all steps are one
compiled loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise._variables import Variable, starts
from perfmodel.timeline import CompiledStructure, makespan

Values = Mapping[str, Any]
_JITTER: Final = (0.03, 1e-3)
"""Standard deviation of the logarithm of the durations' noise, at the first step and the last."""
_TEMPERATURE: Final = (1.0, 0.05)
_LEARNING_RATE: Final = 0.1
"""Learning rate of the first step, in free coordinates; falls to a hundredth along a cosine."""
_MULTIPLIER_EVERY: Final = 10
_PENALTY: Final = 10.0
FEASIBLE: Final = 1e-6


class Span(Protocol):
    """Step time composed of several programs' makespans."""

    @property
    def n_classes(self) -> int:
        """Number of duration classes."""
        ...

    def span_s(self, values: "Values", durations: Float[Array, " classes"]) -> Float[Array, ""]:
        """Step time at given unknowns and durations, traceable by JAX."""
        ...


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A minimisation problem: the makespan of a program whose durations depend on unknowns."""

    variables: Mapping[str, Variable]
    program: CompiledStructure | Span
    """The program, or several programs with the function that gives the step from them."""
    durations: Callable[[Values], Float[Array, " classes"]]
    """Seconds of the program's classes from unknowns and constants by name, as JAX can trace."""
    constants: Values = field(default_factory=dict)
    """Arrays by name, or pytrees of them. Problems that differ in these alone are compiled once, if
    their functions are equal."""
    limits: Callable[[Values], Float[Array, " limits"]] | None = None
    """Limits that JAX can trace: every entry must end at or below 0. Best scaled so that 1 is far
    outside."""

    @property
    def one_program(self) -> CompiledStructure:
        """The program, if the step is the makespan of a single one.

        Raises:
            PerfModelError: it is not.
        """
        if isinstance(self.program, CompiledStructure):
            return self.program
        raise PerfModelError(
            "a bound is possible only if the step is the makespan of a single program; relax without a bound"
        )

    @property
    def static_args(self) -> "StaticArgs":
        """Everything except the constants."""
        return StaticArgs(tuple(self.variables.items()), self.program, self.durations, self.limits)

    @property
    def single(self) -> dict[str, Any]:
        """The constants in JAX's default precision."""
        return jax.tree.map(lambda value: jnp.asarray(np.asarray(value)), dict(self.constants))


@dataclass(frozen=True)
class StaticArgs:
    """The compiled part of a relaxation; equal for problems that share the compilation."""

    variables: tuple[tuple[str, Variable], ...]
    program: CompiledStructure | Span
    durations: Callable[[Values], Float[Array, " classes"]]
    limits: Callable[[Values], Float[Array, " limits"]] | None

    @property
    def n_classes(self) -> int:
        """Number of duration classes."""
        if isinstance(self.program, CompiledStructure):
            return self.program.structure.n_classes
        return self.program.n_classes

    def objective(
        self, values: Values, noise: Float[Array, " classes"] | float = 1.0
    ) -> Float[Array, ""]:
        """The makespan with noisy durations."""
        durations = self.durations(values) * noise
        if isinstance(self.program, CompiledStructure):
            return makespan(self.program, durations)
        return self.program.span_s(values, durations)

    def excess(self, values: Values) -> Float[Array, " limits"]:
        """Violations of the limits."""
        return jnp.zeros(0) if self.limits is None else self.limits(values)


class RelaxedStart(NamedTuple):
    """What a descent from one start relaxed_starts with, after rounding."""

    values: dict[str, np.ndarray]
    objective: float
    excess: float
    """The largest violation of a limit; 0 if all limits hold."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The best result over all starts after rounding, and the results of each start."""

    values: dict[str, np.ndarray]
    value: float
    """Objective at the rounded values."""
    feasible: bool
    """Whether the rounded values keep all limits."""
    starts: tuple[RelaxedStart, ...]


def relax(
    problem: Relaxation,
    *,
    n_starts: int = 16,
    steps: int = 300,
    seed: int = 0,
    spread: float = 0.5,
    per_start: Values | None = None,
) -> Relaxed:
    """Run Adam from `n_starts` starts with decaying noise, temperature and step size, and return
    the best after rounding.

    Args:
        problem: objective and constraints to minimise.
        n_starts: the first is the middle of every unknown's range, the others are random about it.
        steps: number of steps of Adam, for all starts together.
        seed: random seed of starts and noise.
        spread: standard deviation of the random starts in free coordinates.
        per_start: further values that the durations and limits depend on, held fixed, with a row
            for every start.
    """
    # Descend from all starts at once, then round every end to something that can be built, and
    # evaluate it exactly.
    keys = jax.random.split(jax.random.key(seed))
    constants = {name: jnp.asarray(rows, float) for name, rows in (per_start or {}).items()}
    begin = starts(problem.variables, n_starts, spread, keys[0])
    free = _descend(
        problem.static_args, begin, constants, problem.single, keys[1], steps, _LEARNING_RATE
    )
    rounded = {}
    for name, variable in problem.variables.items():
        rounded[name] = [variable.rounded(row) for row in np.asarray(free[name])]
    ends = {name: jnp.asarray(np.stack(rows), float) for name, rows in rounded.items()}
    objectives, excesses = _evaluated_starts(problem.static_args, ends | constants, problem.single)
    relaxed_starts = []
    for i in range(n_starts):
        start_values = {name: rows[i] for name, rows in rounded.items()}
        relaxed_starts.append(RelaxedStart(start_values, float(objectives[i]), float(excesses[i])))

    # The fastest of those that keep all limits; if none does, the fastest.
    best = min(relaxed_starts, key=lambda end: (end.excess > FEASIBLE, end.objective))
    return Relaxed(best.values, best.objective, best.excess <= FEASIBLE, tuple(relaxed_starts))


def objective_at(problem: Relaxation, values: Values) -> float:
    """The makespan at given values."""
    one_start = {name: jnp.asarray(v, float)[None] for name, v in values.items()}
    return float(_evaluated_starts(problem.static_args, one_start, problem.single)[0][0])


@partial(jax.jit, static_argnums=0)
def _evaluated_starts(
    form: StaticArgs, values: Values, constants: Values
) -> tuple[Float[Array, " starts"], Float[Array, " starts"]]:
    """Makespans, and the largest violation of a limit by each start (0 if all limits hold)."""

    def at_values(values: Values) -> tuple[Array, Array]:
        everything = {**values, **constants}
        return form.objective(everything), jnp.append(form.excess(everything), 0.0).max()

    return _over_starts(at_values, values)(values)


class _Annealed(NamedTuple):
    """What changes from step to step of the descent."""

    noise_sd: Array
    """Standard deviation of the log-normal noise on durations."""
    temperature: Array
    rate_scale: Array
    """Factor of the learning rate."""


def _annealed(done: Array) -> _Annealed:
    """Noise, temperature and learning rate after a share of all steps."""
    # Noise and temperature fall geometrically, the learning rate along a cosine.
    return _Annealed(
        noise_sd=_JITTER[0] * (_JITTER[1] / _JITTER[0]) ** done,
        temperature=_TEMPERATURE[0] * (_TEMPERATURE[1] / _TEMPERATURE[0]) ** done,
        rate_scale=0.01 + 0.99 * (1 + jnp.cos(jnp.pi * done)) / 2,
    )


@partial(jax.jit, static_argnums=0)
def _descend(
    form: StaticArgs,
    free: Values,
    constants_of_start: Values,
    constants: Values,
    key: Array,
    steps: int,
    learning_rate: float,
) -> dict[str, Array]:
    """Run Adam on all starts; every few steps the multipliers of violated limits are raised."""
    # Searches import this module, but few of them relax anything.
    import optax

    optimizer = optax.scale_by_adam(b1=0.9, b2=0.99)

    def values_at(free: Values, constants_of_start: Values, temperature: Array) -> dict[str, Array]:
        return {name: v.relaxed(free[name], temperature) for name, v in form.variables} | {
            **constants_of_start,
            **constants,
        }

    at_start = partial(values_at, temperature=jnp.asarray(1.0))

    # Loss is relative to the mean makespan of the starts, so that penalty and learning rate suit
    # any problem.
    objectives = _over_starts(lambda *start: form.objective(at_start(*start)), free)
    scale = objectives(free, constants_of_start).mean()
    excesses = _over_starts(lambda *start: form.excess(at_start(*start)), free)
    none = jnp.zeros_like(excesses(free, constants_of_start))

    def loss(
        free: Values,
        constants_of_start: Values,
        multipliers: Array,
        noise: Array,
        temperature: Array,
    ) -> tuple[Array, Array]:
        values = values_at(free, constants_of_start, temperature)
        span = form.objective(values, noise)
        # The augmented Lagrangian of inequalities: a limit that holds with room to spare presses no
        # more.
        pressed = multipliers + _PENALTY * form.excess(values)
        pressed = jnp.where(pressed > 0, pressed, 0.0)
        return span / scale + ((pressed**2 - multipliers**2) / (2 * _PENALTY)).sum(), pressed

    gradients = _over_starts(jax.grad(loss, has_aux=True), free)
    n_starts = len(next(iter(free.values())))

    def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        free, moments, multipliers, key = state

        annealed = _annealed(i / steps)
        key, drawn = jax.random.split(key)
        # Equally long paths get a share of the gradient each, as either is now and then the
        # longest.
        noise = jnp.exp(annealed.noise_sd * jax.random.normal(drawn, (n_starts, form.n_classes)))
        gradient, pressed = gradients(
            free, constants_of_start, multipliers, noise, jnp.full(n_starts, annealed.temperature)
        )
        update, moments = optimizer.update(gradient, moments)
        rate = learning_rate * annealed.rate_scale
        free = jax.tree.map(lambda x, u: x - rate * u, free, update)

        # Multipliers change every few steps only, after the free numbers had time to follow the
        # last ones.
        multipliers = jnp.where(
            i % _MULTIPLIER_EVERY == _MULTIPLIER_EVERY - 1, pressed, multipliers
        )
        return free, moments, multipliers, key

    state = dict(free), optimizer.init(dict(free)), none, key
    return lax.fori_loop(0, steps, step, state)[0]


def _over_starts(function: Callable[..., Any], batch: Values) -> Callable[..., Any]:
    """Return `function` over all starts. A single start is not batched, because the evaluator is
    much faster without a batch."""
    if len(next(iter(batch.values()))) > 1:
        return jax.vmap(function)

    def of_single_start(*arguments: Any) -> Any:
        without_axis = jax.tree.map(lambda array: array[0], arguments)
        return jax.tree.map(lambda array: array[None], function(*without_axis))

    return of_single_start
