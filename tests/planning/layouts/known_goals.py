"""Formulas on intervals, and quantities and robustness of some layouts at constant rates, kept in
`known_goals.csv`.

A change that is meant to move them is followed by

    PYTHONPATH=tests python tests/planning/layouts/known_goals.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from constant_rates import SITE, Rates
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.planning.layouts import OBJECTIVES, QUANTITIES, Goal, Tariff, robustness
from perfmodel.planning.layouts.expressions import Constraint, Expression, Interval
from perfmodel.prediction import Prediction, StepProblem, explain, step_problem
from perfmodel.prediction.sites import NEUTRAL
from perfmodel.spec import Job, Layout

TABLE = Path(__file__).with_suffix(".csv")
FORMULAS = (
    "a + b - 2 * c",
    "a * b",
    "b / a",
    "a / c",
    "-a * c",
    "a ** 2",
    "c ** 3",
    "c ** -2",
    "a ** -1",
    "b ** 0.5",
    "min(a, b, c)",
    "max(a, c) - min(b, 1)",
    "(a + 1) * (c - 2) / (b + 0.5)",
)
CONSTRAINTS = ("a < b", "a <= 1", "b > c", "c >= 2 * a", "a == c", "max(a, b) < 3")
VALUES = {
    "a": ((0.5, 2.0), (1.0, 1.0), (0.0, 4.0)),
    "b": ((1.0, 3.0), (0.25, 0.5), (2.0, np.inf)),
    "c": ((-2.0, 1.0), (-3.0, -1.0), (0.0, 5.0)),
}
"""Ends of the intervals of three layouts."""
LAYOUTS = (
    Layout(tp=4, dp=4, zero=1),
    Layout(tp=2, pp=2, dp=4),
    Layout(pp=4, dp=4, micro_batch=2, recompute="full"),
    Layout(dp=16, zero=3),
)
TARIFF = Tariff(price_per_device_hour=2.5, power_w=600.0, idle_power_w=100.0, tokens=1e12)
COMMON = {"near": 0.05, "length": 2.0, "layout": 0.03, "noise": 0.02, "scatter": [0.4, 0.9]}


def _quantity(name: str) -> Interval:
    lo, hi = np.array(VALUES[name], float).T
    return Interval(lo, hi)


def formula_cases() -> Iterator[StoredCase]:
    """Ends of every formula, and which constraints can hold."""
    for text in FORMULAS:
        interval = Expression.parse(text, VALUES)(_quantity)
        figures = {}
        for end in ("lo", "hi"):
            values = np.broadcast_to(getattr(interval, end), 3).tolist()
            figures |= {f"{end}{i}": value for i, value in enumerate(values)}
        yield StoredCase(text, text, figures)
    for text in CONSTRAINTS:
        constraint = Constraint.parse(text, VALUES)
        can_be = constraint.lhs(_quantity).can_be(constraint.sign, constraint.rhs(_quantity))
        holds = np.broadcast_to(can_be, 3).tolist()
        yield StoredCase(text, text, {f"holds{i}": float(value) for i, value in enumerate(holds)})


def layout_cases() -> Iterator[StoredCase]:
    """Every quantity of the layouts, and how robust each objective is."""
    population = replace(NEUTRAL, common={**NEUTRAL.common, **COMMON})
    site = replace(SITE, population=population)
    model = replace(catalog.model("llama3-8b"), layers=8)
    problem = step_problem(
        model, catalog.cluster("dgx-h100"), Job(global_batch=32, seq_len=2048), site=site
    )
    problem = problem.repriced(Rates(), Rates())
    predictions = [explain(problem, layout) for layout in LAYOUTS]
    quantity = Goal.parse(problem, tariff=TARIFF).quantities_of(predictions)
    for name in QUANTITIES:
        values = np.broadcast_to(quantity(name).lo, len(LAYOUTS)).tolist()
        yield StoredCase(
            f"quantity {name}",
            f"quantity {name}",
            {f"{i}": value for i, value in enumerate(values)},
        )
    yield from _named_cases(problem, predictions[0])
    for objective in (*OBJECTIVES, "step_time_s * devices + memory_gib / 100"):
        goal = Goal.parse(problem, objective, ("memory_gib < 60",), TARIFF)
        robust = robustness(goal, predictions)
        figures = {
            f"value{i}": value
            for i, value in enumerate(goal.value(goal.quantities_of(predictions)).tolist())
        }
        # Probabilities are counts of draws, of which rounding may move one.
        for name, digits in (("better", 2), ("best", 2), ("regret", 9), ("upper", 9)):
            values = np.asarray(getattr(robust, name), float).ravel().round(digits).tolist()
            figures |= {f"{name}{i}": value for i, value in enumerate(values)}
        figures |= {f"rank{i}": float(rank) for i, rank in enumerate(robust.ranks)}
        for criterion in ("regret", "upper", "best"):
            figures[f"order.{criterion}.{'-'.join(map(str, robust.order(criterion)))}"] = 1.0
        yield StoredCase(f"objective {objective}", f"objective {objective}", figures)


def _named_cases(problem: StepProblem, prediction: Prediction) -> Iterator[StoredCase]:
    """Quantities that are shown for a layout under tariffs that leave something out."""
    list_price = problem.cluster.device.usd_per_hour
    for name, tariff in {
        "tariff": TARIFF,
        "no tokens": replace(TARIFF, tokens=None),
        "list price": replace(TARIFF, price_per_device_hour=list_price),
        "list price, no tokens": Tariff(price_per_device_hour=list_price),
        "no price": replace(TARIFF, price_per_device_hour=None),
        "no power": replace(TARIFF, power_w=None),
        "no idle power": replace(TARIFF, idle_power_w=None),
    }.items():
        named = Goal(problem, tariff=tariff).named_quantities(prediction)
        yield StoredCase("tariff", name, named)
    completed = Goal.parse(problem, tariff=Tariff(power_w=500.0)).tariff
    yield StoredCase("completed", "completed", {k: v for k, v in vars(completed).items() if v})


def cases() -> Iterator[StoredCase]:
    """Everything that is stored."""
    yield from formula_cases()
    yield from layout_cases()


if __name__ == "__main__":
    write_cases(TABLE, cases())
