"""Beyond enumeration: uneven stages and recompute by stage for the best layouts of a search."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from perfmodel.display import Report
from perfmodel.errors import LayoutError
from perfmodel.planning.layouts._objective import Goal
from perfmodel.planning.layouts._question import Question
from perfmodel.planning.layouts._ranking import Ranking, ranking
from perfmodel.planning.optimise import (
    PartitionResult,
    choose_method,
    partition_bound_s,
    partition_stages,
    relaxed_partitions,
)
from perfmodel.prediction import Prediction
from perfmodel.spec import Framework, Layout

MOST: Final = 4
"""Layouts whose stages are cut anew (a second or two each), the most promising by their bounds."""
MOST_ON_KINDS: Final = 16
"""The same on nodes of several kinds, where the cut decides more."""
WORTH: Final = 1e-3
"""Share of the best value that a bound must promise."""


@dataclass(frozen=True)
class Improvement:
    """A layout whose stages were cut anew."""

    given: Layout
    result: PartitionResult
    how: str
    """Where the cuts come from."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"given": str(self.given), "how": self.how} | self.result.to_dict()


@dataclass(frozen=True)
class Improved:
    """Which method was taken, why, and what it made of which layouts."""

    method: str
    why: str
    improvements: tuple[Improvement, ...] = ()


def improve(
    goal: Goal, method: str, evaluated: int, best: Sequence[Prediction], pool: Sequence[Layout], report: Report
) -> Improved:
    """Cut the stages of the layouts anew that can gain most by it.

    Every layout's bound over all its partitions and recompute choices is worked out first (milliseconds); those
    whose bound promises more than the best value found are cut, the most promising of every schedule first, `MOST` at
    most.

    Args:
        goal: what is minimised.
        method: one of `METHODS`.
        evaluated: layouts that enumeration evaluated.
        best: ranked layouts of even stages.
        pool: further layouts to start from, that differ in more than their recompute.
        report: told what is being done.
    """
    enumerated = f"bounds rule out all layouts but {evaluated:,}, which were evaluated"
    enumerated += (
        ", in the best orders of kinds and cuts that dynamic programming finds"
        if goal.step_problem.kinds
        else ": exact"
    )
    if method == "enumerate":
        return Improved("enumerate", enumerated)
    best_value = float(goal.value(goal.of(best[:1]))[0]) if best else np.inf
    promising = []
    for layout in _bases([*(p.layout for p in best), *pool]):
        value = _value_at(goal, best[0], layout, partition_bound_s(goal.step_problem, layout)) if best else 0.0
        if method == "relax" or value < best_value - WORTH * abs(best_value):
            promising.append((value, layout))
    improvements: list[Improvement] = []
    tried = _one_of_each_schedule(promising)[: MOST_ON_KINDS if goal.step_problem.kinds else MOST]
    for done, (value, layout) in enumerate(tried):
        if value >= best_value:
            continue
        report("cut stages", done, len(tried))
        try:
            cuts = relaxed_partitions(goal.step_problem, layout) if method == "relax" else None
            found = partition_stages(goal.step_problem, layout, cuts=cuts)
        except LayoutError:
            continue  # nothing fits, or nothing to relax
        how = "relaxation" if method == "relax" else "dynamic programming" if layout.vpp == 1 else "moves of layers"
        improvements.append(Improvement(layout, found, how))
        best_value = min(best_value, float(goal.value(goal.of([found.prediction]))[0]))
    if not improvements:
        nothing = "no layout among the best has pipeline stages that could gain by being cut unevenly"
        return Improved("enumerate", f"{enumerated}; {nothing}, as a lower bound over all cuts says")
    how = ", ".join(dict.fromkeys(improvement.how for improvement in improvements))
    asked = "asked for" if method == "relax" else choose_method(contiguous=True).why
    why = f"{enumerated}; then stages of {len(improvements)} of {len(promising)} promising layouts cut anew: {asked}"
    return Improved(f"enumerate, {how}", why, tuple(improvements))


def launchable_cuts(question: Question, goal: Goal, improved: Improved) -> Ranking:
    """Those of the new cuts that the framework runs, if it must."""
    within, framework = not question.space.any_framework, question.problem.framework
    results = [
        improvement.result
        for improvement in improved.improvements
        if not within or _launchable(framework, improvement.result.layout)
    ]
    return ranking(goal, [r.prediction for r in results], [r.certificate.lower_bound_s for r in results])


def _launchable(framework: Framework, layout: Layout) -> bool:
    """Whether a framework runs a layout whose stages were cut anew; none of the catalog takes other numbers of layers
    to recompute stage by stage."""
    by_stage = len(set(layout.recompute_full_layers or ())) > 1
    return not framework.refused(layout) and not (by_stage and framework.name != "generic")


def _bases(layouts: Sequence[Layout]) -> list[Layout]:
    """Pipelined layouts that differ in degrees, micro-batch or schedule, the best ranked of each."""
    bases: dict[tuple[object, ...], Layout] = {}
    for lay in layouts:
        if lay.pp > 1:
            hosts = tuple(sorted(lay.kinds or ()))
            bases.setdefault(
                (lay.tp, lay.cp, lay.pp, lay.dp, lay.ep, lay.vpp, lay.micro_batch, lay.schedule, hosts), lay
            )
    return list(bases.values())


def _one_of_each_schedule(promising: Sequence[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """Ordered by bounds, but those of different schedules in turn: bounds of some schedules are looser."""
    turn: Counter[str] = Counter()
    ranked = []
    for value, layout in sorted(promising, key=lambda one: one[0]):
        ranked.append((turn[layout.schedule], value, layout))
        turn[layout.schedule] += 1
    return [(value, layout) for _, value, layout in sorted(ranked, key=lambda one: one[:2])]


def _value_at(goal: Goal, like: Prediction, layout: Layout, step_s: float) -> float:
    """About what the objective is of a layout that takes so long; constraints are left out."""
    if not np.isfinite(step_s):
        return np.inf
    free = replace(goal, constraints=())
    return float(free.value(free.of([replace(like, layout=layout, devices=layout.devices, step_time_s=step_s)]))[0])
