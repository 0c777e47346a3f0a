"""Hardware co-design: which machine parameters to improve for some runs under a budget."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Scenario, Setting, model_in_scenario
from perfmodel.prediction import StepProblem, step_times_s
from perfmodel.prediction.composition import derivatives_towards
from perfmodel.spec import Layout

_STEP: Final = 1e-3
"""Relative change by which durations are differentiated."""


@dataclass(frozen=True, eq=False)
class Run:
    """A training run that the machine is designed for."""

    step_problem: StepProblem
    layout: Layout
    weight: float = 1.0
    """Weight in the objective of its step time relative to the present one."""


@dataclass(frozen=True)
class Design:
    """Factors on today's parameters, and the resulting step times."""

    multiples: dict[str, float]
    cost: float
    """Cost of these multiples, in the prices' unit."""
    step_s: tuple[float, ...]
    """Step time of every run."""
    before_s: tuple[float, ...]
    even_s: tuple[float, ...]
    """Step times if all parameters grow by the same factor within the same budget."""
    priced: int
    """Number of times that a run's events were priced on another machine."""
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

    def on(self, run: Run, x: Float[np.ndarray, " parameters"]) -> StepProblem:
        """A run on the machine with parameters scaled by `x`."""
        self.priced += 1
        settings = (Setting(name, "times", float(v)) for name, v in zip(self.names, x, strict=True))
        return model_in_scenario(run.step_problem, Scenario(tuple(settings)))

    def step_and_slope(
        self, run: Run, x: Float[np.ndarray, " parameters"]
    ) -> tuple[float, np.ndarray]:
        """Step time and its derivative with respect to the factors."""
        # Price the events with each parameter a little larger; the timeline's gradient then gives
        # the derivatives of the step without evaluating it again for each.
        shifted = [self.on(run, row) for row in x * (1 + _STEP * np.eye(len(x)))]
        derivatives = derivatives_towards(self.on(run, x), [run.layout], shifted, _STEP)
        return float(derivatives.step_s[0]), derivatives.by_parameter[0] / x

    def __call__(
        self, x: Float[np.ndarray, " parameters"]
    ) -> tuple[float, Float[np.ndarray, " parameters"]]:
        """Weighted mean of log step-time ratios, and its slope."""
        # The logarithm makes a tenth saved on a short run worth as much as a tenth on a long one.
        value = 0.0
        slope = np.zeros(len(x))
        weights = sum(run.weight for run in self.runs)
        for run, before_s in zip(self.runs, self.before_s, strict=True):
            step_s, run_slope = self.step_and_slope(run, x)
            value += run.weight / weights * np.log(step_s / before_s)
            slope += run.weight / weights * run_slope / step_s
        return value, slope

    def step_s(self, x: Float[np.ndarray, " parameters"]) -> Float[np.ndarray, " runs"]:
        """Step time of every run."""
        return np.array([step_times_s(self.on(run, x), [run.layout])[0] for run in self.runs])


def design_hardware(
    runs: Sequence[Run],
    prices: Mapping[str, float],
    *,
    budget: float,
    low: float = 0.25,
    high: float = 8.0,
) -> Design:
    """Find the factors on the machine's parameters that make the runs fastest within the budget.

    Minimises the weighted geometric mean of step times subject to sum of price * multiple <=
    budget, by sequential quadratic programming (SLSQP) with the timeline's gradient; the events of
    a run are priced again on every machine, as `perfmodel whatif` does, because the extrapolation
    of `perfmodel.step_time_function` from today's slopes is too coarse between a quarter and eight
    times today's rates.

    Args:
        runs: training runs, on any clusters.
        prices: price of each parameter as `perfmodel whatif` names it (`compute_rate`,
            `memory_bandwidth`, `inter_node_bandwidth`, ...), per multiple of what they are: money,
            watts or area.
        budget: budget in the same unit; the machine as it is costs the sum of all prices.
        low, high: multiples allowed.

    Raises:
        PerfModelError: nothing to design, prices that are not positive, or a budget that buys not
            even `low`.
    """
    from scipy.optimize import LinearConstraint, minimize

    began = time.perf_counter()
    if not runs or not prices:
        raise PerfModelError("hardware design needs at least one run and one priced parameter")
    price = np.array(list(prices.values()), float)
    if not (price > 0).all() or not low * price.sum() <= budget:
        raise PerfModelError(
            f"hardware design: prices must be above 0, and the budget at least {low * price.sum():g} (every "
            f"parameter at factor {low:g}), got {budget:g}"
        )
    objective = _Objective(runs, tuple(prices))
    now = np.ones(len(price))
    objective.before_s = objective.step_s(now)

    # Start from all parameters grown alike, which is feasible. The result must not be worse than
    # that.
    even = np.clip(now * budget / price.sum(), low, high)
    optimum = minimize(
        objective,
        even,
        jac=True,
        method="SLSQP",
        bounds=[(low, high)] * len(price),
        constraints=LinearConstraint(price, -np.inf, budget),  # pyright: ignore[reportArgumentType]
        options={"maxiter": 30, "ftol": 1e-5},
    )
    within = price @ optimum.x <= budget * (1 + 1e-6)
    x = optimum.x if within and optimum.fun <= objective(even)[0] else even
    return Design(
        multiples=dict(zip(prices, x.tolist(), strict=True)),
        cost=float(price @ x),
        step_s=tuple(objective.step_s(x).tolist()),
        before_s=tuple(objective.before_s.tolist()),
        even_s=tuple(objective.step_s(even).tolist()),
        priced=objective.priced,
        seconds=time.perf_counter() - began,
    )
