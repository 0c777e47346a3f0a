"""Optimisers that the relaxation is held against, each stopped at a target value or a time."""

import time
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize
from studies.chain import Chain

from perfmodel.planning.optimise import Relaxation
from perfmodel.timeline import makespan_lanes

OPTIMISERS: Final = ("Powell", "Nelder-Mead", "CMA-ES")
_CHAINS: Final = 16
_HOT, _COLD = 0.03, 1e-4


class _Stop(Exception):
    """Raised when the target or the time limit is reached."""


class Timed:
    """An objective in free coordinates that remembers its best value and stops in time."""

    def __init__(self, problem: Relaxation, target: float, limit_s: float) -> None:
        ((name, variable),) = problem.variables.items()
        constants = problem.single

        def value(free: Array) -> Array:
            """The objective (JAX) of the free coordinates of the one variable."""
            return problem.static_args.objective(
                {name: variable.relaxed(free, jnp.asarray(1.0)), **constants}
            )

        self.n = int(np.prod(variable.free_shape))
        self._one, self._many = jax.jit(value), jax.jit(jax.vmap(value))
        self._target, self._limit_s = target, limit_s
        self.best = float("inf")
        self._start = time.perf_counter()

    def compiled(self, population: int) -> None:
        """Compile for single values and populations; then the clock starts."""
        self._one(np.zeros(self.n))
        self._many(np.zeros((population, self.n)))
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the clock started."""
        return time.perf_counter() - self._start

    def __call__(self, free: Float[np.ndarray, " unknowns"]) -> float:
        """The value at a point."""
        return self._remember(np.asarray(self._one(free))[None])[0]

    def many(self, population: list[Float[np.ndarray, " unknowns"]]) -> list[float]:
        """Values of a population, evaluated together."""
        return self._remember(np.asarray(self._many(np.stack(population))))

    def _remember(self, values: Float[np.ndarray, " n"]) -> list[float]:
        """Keep the best of some values.

        Raises:
            _Stop: the target is reached, or the time is up.
        """
        self.best = min(self.best, float(values.min()))
        if self.best <= self._target or self.seconds > self._limit_s:
            raise _Stop
        return values.tolist()


def run_optimiser(
    name: str, problem: Relaxation, target: float, limit_s: float
) -> tuple[float, float]:
    """Run an optimiser from the middle of the range; returns the seconds until the target (or the
    limit) and the best value.

    Args:
        name: of `OPTIMISERS`; CMA-ES evaluates its population in one call.
    """
    timed = Timed(problem, target, limit_s)
    start = np.zeros(timed.n)
    population = 4 + int(3 * np.log(timed.n))
    timed.compiled(population)
    try:
        if name == "CMA-ES":
            import cma  # pyright: ignore[reportMissingImports]

            search = cma.CMAEvolutionStrategy(
                start, 0.5, {"popsize": population, "seed": 1, "verbose": -9}
            )
            while True:
                candidates = search.ask()
                search.tell(candidates, timed.many(candidates))
        # No limit but time: the objective itself raises when it is over.
        minimize(timed, start, method=name, options={"maxiter": 10**9, "maxfev": 10**9})
    except _Stop:
        pass
    return timed.seconds, timed.best


def anneal(chain: Chain, seconds: float) -> float:
    """Minimise the exact makespan over cuts and links by simulated annealing, sixteen walks at a
    time.

    A step moves a layer to the next stage or changes one link's share; the temperature falls with
    the time used.
    """
    rng = np.random.default_rng(0)
    stages = chain.stages
    even = np.diff(np.linspace(0, chain.layers, stages + 1).round().astype(int))
    walks = np.repeat(even[None], _CHAINS, axis=0)
    shares = np.zeros((_CHAINS, stages - 1))

    def evaluate(walks: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Makespans of all walks, infinite where a stage does not fit."""
        # Logs of shares are free; their mean is brought to 1, so that links keep their sum.
        links = np.exp(shares) / np.exp(shares).mean(axis=1, keepdims=True)
        durations = chain.durations_s([tuple(walk) for walk in walks], np.maximum(links, 0.02))
        fits = np.isfinite(durations.sum(axis=1))
        return np.where(
            fits, makespan_lanes(chain.program, np.where(fits[:, None], durations, 0.0)), np.inf
        )

    value = evaluate(walks, shares)
    best = float(value.min())
    scale = best if np.isfinite(best) else 1.0
    start = time.perf_counter()
    lane = np.arange(_CHAINS)
    while (done := (time.perf_counter() - start) / seconds) < 1:
        new_walks = walks.copy()
        new_shares = shares.copy()
        hop = rng.integers(stages - 1, size=_CHAINS)
        forwards = rng.integers(2, size=_CHAINS)
        moves = rng.random(_CHAINS) < 0.5

        # Half of the walks move a layer over a hop, from a stage that keeps one; the others change
        # the hop's share.
        giver = hop + forwards
        taker = hop + 1 - forwards
        able = moves & (walks[lane, giver] > 1)
        new_walks[lane[able], giver[able]] -= 1
        new_walks[lane[able], taker[able]] += 1
        new_shares[lane[~moves], hop[~moves]] += 0.3 * rng.standard_normal((~moves).sum())
        new = evaluate(new_walks, new_shares)

        # Metropolis: a step that is worse by the heat is taken with probability 1 / e.
        heat = scale * _HOT * (_COLD / _HOT) ** done
        worse = np.where(np.isfinite(new) & np.isfinite(value), np.maximum(new - value, 0.0), 0.0)
        accepted = np.isfinite(new) & (rng.random(_CHAINS) < np.exp(-worse / heat))
        walks[accepted], shares[accepted] = new_walks[accepted], new_shares[accepted]
        value = np.where(accepted, new, value)
        best = min(best, float(value.min()))
    return best
