"""Computes exact Pareto fronts of time, memory, cost and other formulas."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.display import Report, frame_html
from perfmodel.errors import PerfModelError, Reason, Rejection
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._executor import Executor, open_executor
from perfmodel.planning.layouts._objective import Goal
from perfmodel.planning.layouts._pricing import price
from perfmodel.planning.layouts.evaluation import StepTimes, evaluate_some
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.layouts.search_words import Tariff
from perfmodel.prediction import Prediction, explain

if TYPE_CHECKING:
    import pandas as pd

ROUND: Final = 64
"""Layouts evaluated at once, before the front rules others out."""
SHORT: Final = {"time": "step_time"}
"""Short names that objectives may be called by too."""


@dataclass(frozen=True, kw_only=True)
class ParetoFront:
    """The layouts on a Pareto front: none is worse than another in every objective."""

    objectives: tuple[str, ...]
    layouts: tuple[Prediction, ...]
    """Layouts of the front, sorted by the first objective."""
    values: Float[np.ndarray, "layouts objectives"]
    evaluated: int
    """Layouts evaluated by full evaluation of the schedule; all others are dominated by a layout of
    the front even at the lower bounds of their objectives."""
    feasible: int
    seconds: float
    rejected: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layouts = [
            p.to_dict() | {"objectives": dict(zip(self.objectives, row, strict=True))}
            for p, row in zip(self.layouts, self.values.tolist(), strict=True)
        ]
        return {
            "pareto": list(self.objectives),
            "evaluated": self.evaluated,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "certificate": "exact",
            "layouts": layouts,
            "rejected": self.rejected,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per layout, with its objectives and its fields (`Layout.columns`)."""
        import pandas as pd

        rows = []
        for values, prediction in zip(self.values.tolist(), self.layouts, strict=True):
            row: dict[str, Any] = dict(zip(self.objectives, values, strict=True))
            row |= {"layout": prediction.layout_notation, "devices": prediction.devices}
            for name, value in prediction.layout.columns.items():
                if name not in self.objectives:
                    row[name] = value
            rows.append(row)
        return pd.DataFrame(rows, columns=None if rows else [*self.objectives, "layout", "devices"])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame().filter([*self.objectives, "layout", "devices"]))


def pareto(
    question: Question,
    objectives: Sequence[str] = ("step_time", "memory"),
    *,
    constraints: Sequence[str] = (),
    tariff: Tariff | None = None,
    progress: Report | None = None,
    workers: int = 1,
    dask: str = "",
) -> ParetoFront:
    """Compute the exact Pareto front of a question's layouts.

    A layout x is left out unevaluated only if an evaluated y satisfies f_i(y) <= b_i(x) in every
    objective, b_i being the lower bound of f_i(x) (see `Goal`): then f_i(y) <= b_i(x) <= f_i(x) for
    all i, so that y beats or equals x and x adds nothing to the front. Of layouts that are equal in
    all objectives one is kept.

    Args:
        question: job and layouts, see `ask`.
        objectives: two or more of `OBJECTIVES` (`time` is `step_time`), or formulas to be
            minimised.
        constraints, tariff, progress, workers, dask: as for `search`.

    Raises:
        PerfModelError: fewer than two objectives; and as for `search`.
    """
    started = time.perf_counter()
    if len(objectives) < 2:
        raise PerfModelError(
            f"a Pareto front needs two objectives or more, such as time,memory; got {', '.join(objectives) or 'none'}"
        )
    goals = [
        Goal.parse(question.step_problem, SHORT.get(name, name), constraints, tariff)
        for name in objectives
    ]
    rejected: Counter[Rejection] = Counter()
    report = progress or (lambda *_: None)
    candidates = price(question, rejected, report)
    with open_executor(workers, dask) as executor:
        numbers, values, evaluated = _front(question, goals, candidates, executor, report)

    # Layouts that were not evaluated are dominated already by their bounds.
    dominated = candidates.feasible - evaluated
    if dominated:
        rejected[Rejection(Reason.DOMINATED)] += dominated
    layouts = [explain(question.step_problem, layout) for layout in candidates.layouts(numbers)]

    # Values are minimised inside, and shown as the user asked for them (throughputs rise).
    axis_values = np.empty((len(values), len(goals)))
    for column, goal in enumerate(goals):
        axis_values[:, column] = [
            goal.objective.display_value(value) for value in values[:, column].tolist()
        ]
    return ParetoFront(
        objectives=tuple(goal.objective.name for goal in goals),
        layouts=tuple(layouts),
        values=axis_values,
        evaluated=evaluated,
        feasible=candidates.feasible,
        seconds=time.perf_counter() - started,
        rejected={str(why): count for why, count in rejected.most_common()},
    )


class _Front(NamedTuple):
    """Layouts that no other layout beats in every objective."""

    numbers: Int[np.ndarray, " front"]
    """Their numbers among the candidates."""
    values: Float[np.ndarray, "front objectives"]
    evaluated: int
    """Number of layouts that were evaluated."""


def _front(
    question: Question,
    goals: Sequence[Goal],
    candidates: Candidates,
    executor: Executor,
    report: Report,
) -> _Front:
    """The front, sorted by the first objective."""
    # All goals share constraints and tariff, so that one set of quantities serves them.
    before = goals[0].before(candidates)
    size = candidates.bound_s.shape
    bound = np.stack([np.broadcast_to(goal.value(before), size) for goal in goals], axis=1)
    open_layouts = np.isfinite(bound).all(axis=1) & np.isfinite(candidates.bound_s)
    step_times = StepTimes(question.context, executor)
    evaluated = 0
    numbers = np.zeros(0, np.int64)
    values = np.zeros((0, len(goals)))
    while open_layouts.any():
        report("evaluate", evaluated, evaluated + int(open_layouts.sum()))
        evaluating = np.flatnonzero(open_layouts)
        # Evaluate the front of the bounds: no layout of it can be ruled out by the bound of
        # another.
        evaluating = evaluating[non_dominated(bound[evaluating], ROUND)]
        open_layouts[evaluating] = False
        evaluate_some(candidates, evaluating, step_times)
        evaluated += len(evaluating)
        step_s = np.array([step_times.known.step_s[number] for number in evaluating.tolist()])

        # The step time alone is evaluated. The other objectives follow from it.
        after = goals[0].after(candidates, evaluating, step_s)
        new = np.stack([np.broadcast_to(goal.value(after), step_s.shape) for goal in goals], axis=1)
        holds = np.isfinite(new).all(axis=1)
        numbers = np.concatenate([numbers, evaluating[holds]])
        values = np.concatenate([values, new[holds]])

        # Drop points that new ones beat, then all candidates that a point of the front beats even
        # at their bounds.
        on_front = non_dominated(values)
        numbers, values = numbers[on_front], values[on_front]
        for point in values:
            open_layouts &= ~(point <= bound).all(axis=1)
    order = np.lexsort(values.T[::-1])
    return _Front(numbers[order], values[order], evaluated)


def non_dominated(
    points: Float[np.ndarray, "points objectives"], limit: int | None = None
) -> Int[np.ndarray, " front"]:
    """Return the non-dominated rows, without duplicates, up to a maximum number.

    Rows are taken in order of their sum: the row with the smallest remaining sum is on the front,
    and rows that it dominates are dropped.
    """
    # If a row is at or below another in every column, so is its sum. In the order of sums, a row
    # is therefore on the front unless one before it has ruled it out. Scaling gives all columns a
    # say in the sum and changes no dominance.
    scale = np.maximum(np.abs(points).max(axis=0, initial=0.0), 1e-300)
    order = np.argsort((points / scale).sum(axis=1), kind="stable")
    open_points: Bool[np.ndarray, " points"] = np.ones(len(points), bool)
    front = []
    for i in order.tolist():
        if open_points[i]:
            front.append(i)
            if len(front) == limit:
                break
            open_points &= ~(points[i] <= points).all(axis=1)
    return np.array(front, np.int64)
