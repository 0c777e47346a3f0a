"""Hardware co-design: which parameters of the machine to buy for a set of training runs under a budget."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from scipy.optimize import LinearConstraint, minimize

from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Scenario, Setting, model_in_scenario
from perfmodel.prediction import StepProblem, bundles, durations, prepared, weighted_programs
from perfmodel.spec import Layout
from perfmodel.timeline import makespan_and_grad

_STEP: Final = 1e-3
"""Relative change by which durations are differentiated."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training run that the machine shall serve."""

    step_problem: StepProblem
    layout: Layout
    weight: float = 1.0
    """Of its step time, relative to what it is now, in the objective."""


@dataclass(frozen=True)
class Design:
    """Multiples of today's parameters and what they make of the runs."""

    multiples: dict[str, float]
    cost: float
    """Of these multiples, in the prices' unit."""
    step_s: tuple[float, ...]
    """Step time of every run."""
    before_s: tuple[float, ...]
    even_s: tuple[float, ...]
    """Step times where all parameters grow alike within the same budget."""
    priced: int
    """How often a run's events were priced on another machine."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


@dataclass(eq=False)
class _Objective:
    runs: Sequence[Run]
    names: tuple[str, ...]
    before_s: Float[np.ndarray, " runs"] = field(default_factory=lambda: np.zeros(0))
    priced: int = 0

    def durations(self, run: Run, x: Float[np.ndarray, " parameters"]) -> list[tuple[Any, np.ndarray, float]]:
        """Programs, durations and weights of a run on the machine with multiples `x`."""
        self.priced += 1
        scenario = Scenario(tuple(Setting(n, "times", float(v)) for n, v in zip(self.names, x, strict=True)))
        model = model_in_scenario(run.step_problem, scenario)
        (bundle,) = bundles(model, [run.layout])
        return [(prepared(b.spec).compiled, durations(model, b)[0], w) for b, w in weighted_programs(bundle)]

    def step_and_slope(self, run: Run, x: Float[np.ndarray, " parameters"]) -> tuple[float, np.ndarray]:
        """Step time and its derivative by the parameters: occurrences on the critical path times those of durations."""
        programs = self.durations(run, x)
        found = [makespan_and_grad(compiled, durations) for compiled, durations, _ in programs]
        step_s = sum(w * float(span) for (span, _), (*_, w) in zip(found, programs, strict=True))
        slope = np.zeros(len(x))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] *= 1 + _STEP
            for (_, counts), (_, now, w), (_, then, _) in zip(found, programs, self.durations(run, moved), strict=True):
                slope[i] += w * float(counts @ (then - now)) / (x[i] * _STEP)
        return step_s, slope

    def __call__(self, x: Float[np.ndarray, " parameters"]) -> tuple[float, Float[np.ndarray, " parameters"]]:
        """Weighted mean of the logarithms of step times relative to before, and its slope."""
        value, slope, weights = 0.0, np.zeros(len(x)), sum(run.weight for run in self.runs)
        for run, before_s in zip(self.runs, self.before_s, strict=True):
            step_s, own = self.step_and_slope(run, x)
            value += run.weight / weights * np.log(step_s / before_s)
            slope += run.weight / weights * own / step_s
        return value, slope

    def step_s(self, x: Float[np.ndarray, " parameters"]) -> Float[np.ndarray, " runs"]:
        """Step time of every run."""
        return np.array(
            [sum(w * float(makespan_and_grad(c, d)[0]) for c, d, w in self.durations(run, x)) for run in self.runs]
        )


def design_hardware(
    runs: Sequence[Run],
    prices: Mapping[str, float],
    *,
    budget: float,
    low: float = 0.25,
    high: float = 8.0,
) -> Design:
    """The multiples of a machine's parameters that make the runs fastest for the money.

    Minimises the weighted geometric mean of step times subject to sum of price * multiple <= budget, by sequential
    quadratic programming (SLSQP) with the timeline's gradient; the events of a run are priced anew on every machine.

    Args:
        runs: training runs, on any clusters.
        prices: of parameters as `perfmodel whatif` names them (`compute_rate`, `memory_bandwidth`,
            `inter_node_bandwidth`, ...), per multiple of what they are: money, watts or area.
        budget: in the same unit; the machine as it is costs the sum of all prices.
        low, high: multiples allowed.

    Raises:
        PerfModelError: nothing to design, prices that are not positive, or a budget that buys not even `low`.
    """
    began = time.perf_counter()
    if not runs or not prices:
        raise PerfModelError("hardware design needs at least one run and one priced parameter")
    price = np.array(list(prices.values()), float)
    if not (price > 0).all() or not low * price.sum() <= budget:
        raise PerfModelError(
            f"hardware design: prices must be above 0 and the budget at least {low * price.sum():g} "
            f"({low:g} of everything), got {budget:g}"
        )
    objective = _Objective(runs, tuple(prices))
    now = np.ones(len(price))
    objective.before_s = objective.step_s(now)
    even = np.clip(now * budget / price.sum(), low, high)
    found = minimize(
        objective,
        even,
        jac=True,
        method="SLSQP",
        bounds=[(low, high)] * len(price),
        constraints=LinearConstraint(price, -np.inf, budget),  # pyright: ignore[reportArgumentType]
        options={"maxiter": 30, "ftol": 1e-5},
    )
    within = price @ found.x <= budget * (1 + 1e-6)
    x = found.x if within and found.fun <= objective(even)[0] else even
    return Design(
        multiples=dict(zip(prices, x.tolist(), strict=True)),
        cost=float(price @ x),
        step_s=tuple(objective.step_s(x).tolist()),
        before_s=tuple(objective.before_s.tolist()),
        even_s=tuple(objective.step_s(even).tolist()),
        priced=objective.priced,
        seconds=time.perf_counter() - began,
    )
