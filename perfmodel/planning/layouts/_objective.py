"""The objective and the constraints of a search."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import Reason, Rejection
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._quantities import NAMES, TIMES, Quantities
from perfmodel.planning.layouts.expressions import (
    Constraint,
    Expression,
    Interval,
    Quantity,
)
from perfmodel.planning.layouts.search_words import Tariff
from perfmodel.prediction import Prediction, StepProblem, durations, layout_batches, prepared
from perfmodel.prediction.composition import weighted_programs
from perfmodel.prediction.grids import pass_work_s
from perfmodel.spec import Layout

OBJECTIVES: Final = {
    "step_time": "step_time_s",
    "tokens_per_s": "-tokens_per_s",
    "tokens_per_s_per_device": "-tokens_per_s_per_device",
    "mfu": "-mfu",
    "cost": "cost",
    "energy": "energy_j",
    "train_time": "train_time_s",
    "memory": "memory_bytes",
    "devices": "devices",
}
"""Objectives by name, and the formula that is minimised for each."""


@dataclass(frozen=True)
class Objective:
    """A formula that is minimised."""

    name: str
    """One of `OBJECTIVES`, or the formula itself."""
    formula: Expression

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Parse one of `OBJECTIVES`, or a formula over `NAMES` to minimise.

        Raises:
            PerfModelError, UnknownNameError: neither.
        """
        text = text.strip()
        names = NAMES if any(sign in text for sign in "+-*/( ") else (*NAMES, *OBJECTIVES)
        return cls(text, Expression.parse(OBJECTIVES.get(text, text), names))

    @property
    def timed(self) -> bool:
        """True if the formula depends on the step time."""
        return bool(self.formula.names & set(TIMES))

    def display_value(self, value: float) -> float:
        """The value for display; a maximised objective is shown as positive."""
        return -value if OBJECTIVES.get(self.name, "").startswith("-") else value


ROUNDING: Final = 1e-4
"""Relative margin between evaluations and bounds, both of which have single precision."""
STEP_TIME: Final = Objective.parse("step_time")


@dataclass(frozen=True, eq=False)
class Goal:
    """An objective under constraints, for the layouts of one problem.

    Every layout's quantities lie in known intervals before any is evaluated: its step time in
    [bound, infinity), its memory and degrees exactly. Interval arithmetic gives a lower bound of
    the objective, and tells which constraints can hold at all; layouts that are left out for this
    reason cannot be among the best. For an objective that grows with the step time at fixed degrees
    f(T, degrees) (every one of `OBJECTIVES` with a time in it does, since prices, powers, tokens
    and device counts are not negative) the bound is f(bound, degrees) itself: T >= bound implies
    f(T, degrees) >= f(bound, degrees), so that it is as tight as that of the step time is.
    """

    step_problem: StepProblem
    objective: Objective = STEP_TIME
    constraints: tuple[Constraint, ...] = ()
    tariff: Tariff = field(default_factory=Tariff)

    @classmethod
    def parse(
        cls,
        problem: StepProblem,
        objective: str = "step_time",
        constraints: Sequence[str] = (),
        tariff: Tariff | None = None,
    ) -> "Goal":
        """Read an objective and constraints as users write them.

        Raises:
            PerfModelError, UnknownNameError: invalid formulas, or that need a price, a power or
                tokens that neither `tariff` nor the catalog tells.
        """
        goal = cls(
            problem,
            Objective.parse(objective),
            tuple(Constraint.parse(text, NAMES) for text in constraints),
            (tariff or Tariff()).completed(problem),
        )

        # Evaluate the formulas once on dummy values, so that a missing price or power raises here
        # and not in the middle of a search.
        ones = np.ones(1)
        goal.value(
            goal._quantities(lambda _: ones, Interval.exactly(ones), lambda: Interval.exactly(0.0))
        )
        return goal

    @property
    def plain(self) -> bool:
        """True if the goal is the step time alone, without constraints."""
        return self.objective == STEP_TIME and not self.constraints

    def _quantities(self, column, step_s: Interval, busy) -> Quantities:
        return Quantities(self.step_problem, self.tariff, column, step_s, busy)

    def before(self, candidates: Candidates) -> Quantity:
        """Quantities of all candidates that are known before evaluation."""
        # Bounds are of single precision, hence the slack.
        step_s = Interval(
            candidates.bound_s.astype(float) * (1 - ROUNDING),
            np.full(len(candidates.bound_s), np.inf),
        )
        return self._quantities(
            candidates.column,
            step_s,
            lambda: Interval(busy_bound_s(self.step_problem, candidates), np.array(np.inf)),
        )

    def after(
        self,
        candidates: Candidates,
        numbers: Int[np.ndarray, " some"],
        step_s: Float[np.ndarray, " some"],
    ) -> Quantity:
        """Quantities of evaluated candidates."""
        return self._quantities(
            lambda name: candidates.column_of(name, numbers),
            Interval.exactly(step_s),
            lambda: Interval.exactly(busy_s(self.step_problem, candidates.layouts(numbers))),
        )

    def quantities_of(
        self, predictions: Sequence[Prediction], step_s: Interval | None = None
    ) -> Quantity:
        """Quantities of predicted layouts; with other step times, busy time scales along."""

        def column(name: str) -> np.ndarray:
            if name == "memory_bytes":
                return np.array([p.memory_needed_bytes for p in predictions])
            # Left out, the tensor parallelism of experts is that of the other layers.
            field = "expert_tp" if name == "etp" else name
            return np.array([float(getattr(p.layout, field)) for p in predictions])

        step = step_s or Interval.exactly(np.array([p.step_time_s for p in predictions]))
        busy = np.array([p.time_account.busy_fraction for p in predictions])
        return self._quantities(column, step, lambda: step * Interval.exactly(busy))

    def value(self, quantity: Quantity) -> Float[np.ndarray, " layouts"]:
        """Return a lower bound of the objective; infinite if a constraint cannot hold."""
        value = np.asarray(self.objective.formula(quantity).lo, float)
        for constraint in self.constraints:
            value = np.where(self.can_hold(constraint, quantity), value, np.inf)
        return np.where(np.isnan(value), np.inf, value)

    def can_hold(self, constraint: Constraint, quantity: Quantity) -> np.ndarray:
        """Return for which layouts a constraint can hold."""
        return constraint.lhs(quantity).can_be(constraint.sign, constraint.rhs(quantity))

    def named_quantities(self, prediction: Prediction) -> dict[str, float]:
        """A layout's cost and energy, and the quantities that objective and constraints name."""
        names = set(self.objective.formula.names).union(
            *(constraint.names for constraint in self.constraints)
        )
        tariff = self.tariff
        priced = tariff.price_per_device_hour is not None
        listed = tariff.price_per_device_hour == self.step_problem.cluster.device.usd_per_hour

        # A list price from the catalog is not very informative. The cost is shown only for the
        # user's own prices or for a training run.
        if priced and (tariff.tokens or not listed):
            names.add("cost")
        if tariff.power_w is not None and tariff.idle_power_w is not None:
            names.add("energy_j")
        if tariff.tokens is not None:
            names.add("train_time_s")
        quantity = self.quantities_of([prediction])
        return {name: float(np.ravel(quantity(name).lo)[0]) for name in sorted(names)}


@dataclass(frozen=True, eq=False)
class Score:
    """Bounds and values of candidates under a goal."""

    goal: Goal
    candidates: Candidates

    @cached_property
    def bound(self) -> Float[np.ndarray, " layouts"]:
        """Lower bound of each layout's value; infinite if it cannot meet a constraint."""
        if self.goal.plain:
            return self.candidates.bound_s
        value = np.broadcast_to(
            self.goal.value(self.goal.before(self.candidates)),
            self.candidates.bound_s.shape,
        )
        return np.where(np.isfinite(self.candidates.bound_s), value, np.inf)

    def below(self, worst: float, worst_s: float) -> Int[np.ndarray, " some"]:
        """Layouts whose value may be as low as `worst`; if the step time does not affect the value,
        only those whose step is also as short."""
        if self.goal.objective.timed:
            # Formulas of bounds allow for rounding already (`Goal.before`); plain step times do
            # not.
            slack = ROUNDING * worst if self.goal.plain and np.isfinite(worst) else 0.0
            return np.flatnonzero(np.isfinite(self.bound) & (self.bound <= worst + slack))

        # An objective without time, such as memory, ties often. Among ties only those that may be
        # as fast matter.
        as_fast = self.candidates.bound_s <= worst_s * (1 + ROUNDING)
        may_be_better = (self.bound < worst) | ((self.bound == worst) & as_fast)
        return np.flatnonzero(np.isfinite(self.bound) & may_be_better)

    def count_impossible(self, rejected: Counter[Rejection]) -> None:
        """Count layouts that fit but violate constraints, by the first constraint violated."""
        undecided = np.isfinite(self.candidates.bound_s)
        for constraint in self.goal.constraints:
            possible = undecided & self.goal.can_hold(constraint, self.goal.before(self.candidates))
            n_lost = int((undecided & ~possible).sum())
            if n_lost:
                rejected[Rejection(Reason.CONSTRAINT, str(constraint))] += n_lost
            undecided = possible

    def value(
        self, numbers: Int[np.ndarray, " some"], step_s: Float[np.ndarray, " some"]
    ) -> Float[np.ndarray, " some"]:
        """Values of evaluated layouts; infinite if a constraint is violated."""
        if self.goal.plain:
            return step_s
        return np.broadcast_to(
            self.goal.value(self.goal.after(self.candidates, numbers, step_s)), step_s.shape
        )


def busy_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Busy seconds of the compute streams in a step, mean over pipeline ranks."""
    busy = np.zeros(len(layouts))
    for batch in layout_batches(problem, layouts):
        for weighted, weight in weighted_programs(batch):
            program = prepared(weighted.spec)
            all_ranks_s = durations(problem, weighted) @ program.compute_count
            busy[list(batch.lanes)] += weight * all_ranks_s / program.structure.devices
    return busy


def busy_bound_s(problem: StepProblem, candidates: Candidates) -> Float[np.ndarray, " layouts"]:
    """Lower bound of the busy seconds: the passes alone, spread evenly over the ranks."""
    # Passes take different times on different kinds; 0 is a valid bound, if a loose one.
    if problem.kinds:
        return np.zeros(len(candidates.bound_s))
    grids = [cost.grid for cost in candidates.costs]
    parts = [
        np.broadcast_to(pass_work_s(problem, grid)[..., None], grid.shape).reshape(-1)
        for grid in grids
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
