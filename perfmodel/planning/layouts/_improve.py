"""Ranks explained layouts and improves the best of them with uneven stages and per-stage
recomputation, by dynamic programming or by a relaxation that also changes the micro-batch."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import Report
from perfmodel.errors import LayoutError
from perfmodel.planning.layouts._objective import Goal
from perfmodel.planning.layouts._space import SearchSpace
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.optimise import (
    BucketResult,
    PartitionResult,
    choose_method,
    launchable_buckets,
    partition_bound_s,
    partition_stages,
)
from perfmodel.planning.optimise.launches import LaunchChoices, relax_layout
from perfmodel.prediction import Prediction, StepProblem
from perfmodel.spec import Framework, Layout

MOST: Final = 4
"""Most layouts whose stages are divided anew (a second or two each); those with the best bounds are
taken."""
MOST_ON_KINDS: Final = 16
"""The same number on nodes of several kinds, where the division matters more."""
WORTH: Final = 1e-3
"""Share of the best value that a bound must promise."""
SAME: Final = 1e-9
"""Relative difference of step times below which two layouts count as the same."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Explained layouts that satisfy the constraints, best first (`ranking`)."""

    predictions: tuple[Prediction, ...]
    value: Float[np.ndarray, " layouts"]
    """Values of the objective, as it is minimised."""
    bound_s: Float[np.ndarray, " layouts"]
    """Lower bound on the step time of every layout with these degrees, micro-batch and schedule."""

    @property
    def step_s(self) -> Float[np.ndarray, " layouts"]:
        """Step time of each layout in seconds."""
        return np.array([p.step_time_s for p in self.predictions])

    def at(self, places: Sequence[int] | Int[np.ndarray, " some"]) -> "Ranking":
        """The layouts at these positions, in this order."""
        chosen = np.array(places, np.int64)
        return replace(
            self,
            predictions=tuple(self.predictions[i] for i in chosen),
            value=self.value[chosen],
            bound_s=self.bound_s[chosen],
        )

    def with_cut(self, cuts: "Ranking") -> "Ranking":
        """Add layouts with uneven stages, except those that are as fast as one already ranked."""
        # A cut whose step is equal to that of an even layout to rounding is that layout, found
        # again.
        step_s = list(self.step_s)
        new: list[int] = []
        for place, cut_s in enumerate(cuts.step_s):
            if not any(abs(cut_s / other_s - 1) < SAME for other_s in step_s):
                new.append(place)
                step_s.append(cut_s)
        added = cuts.at(new)
        return Ranking(
            self.predictions + added.predictions,
            np.concatenate([self.value, added.value]),
            np.concatenate([self.bound_s, added.bound_s]),
        ).in_order()

    def in_order(self) -> "Ranking":
        """Sort by the objective, then by step time."""
        return self.at(np.lexsort((self.step_s, self.value)))


def ranking(goal: Goal, predictions: Sequence[Prediction], bounds_s: Sequence[float]) -> Ranking:
    """Rank the layouts that satisfy the goal's constraints."""
    value = goal.value(goal.quantities_of(predictions)) if predictions else np.zeros(0)
    ranked = Ranking(tuple(predictions), value, np.array(bounds_s, np.float64))
    return ranked.at(np.flatnonzero(np.isfinite(value))).in_order()


REFINED: Final = ("partition", "recompute", "recompute_full_layers", "micro_batch")
"""Fields of a layout that an improvement may change."""


@dataclass(frozen=True)
class Improvement:
    """A layout improved by uneven stages."""

    even: Layout
    """The layout with even stages that the cuts replace."""
    result: PartitionResult
    how: str
    """Method that found the cuts, in words."""
    buckets: BucketResult | None = None
    """Gradient buckets of one size that a launch can state for the new layout, if they were
    searched. Predictions and the ranking assume the default buckets."""

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Fields that differ from those of the layout with even stages, before and after."""
        layout = self.result.layout
        differ = [name for name in REFINED if getattr(self.even, name) != getattr(layout, name)]
        return {name: (getattr(self.even, name), getattr(layout, name)) for name in differ}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        about = {"given": str(self.even), "how": self.how, "changed": self.changed}
        if self.buckets is not None:
            about["buckets"] = self.buckets.to_dict()
        return about | self.result.to_dict()


@dataclass(frozen=True)
class Improved:
    """Layouts improved by uneven stages, with the method and why it was chosen."""

    method: str
    """Name of the method."""
    why: str
    """Reason for it, in words."""
    improvements: tuple[Improvement, ...] = ()
    """Layouts whose stages were cut anew."""
    complete: bool = True
    """False after an interrupt."""


def improve(
    goal: Goal,
    method: str,
    evaluated: int,
    layouts: Sequence[Prediction],
    pool: Sequence[Layout],
    choices: LaunchChoices,
    report: Report,
) -> Improved:
    """Divide the layers unevenly in the layouts that can gain most by it.

    Every layout's bound over all its partitions and recompute choices is worked out first
    (milliseconds); those whose bound promises more than the best value found are cut, the most
    promising of every schedule first, `MOST` at most.

    Args:
        goal: objective and constraints.
        method: one of `METHODS`.
        evaluated: layouts that enumeration evaluated.
        layouts: ranked layouts of even stages.
        pool: further layouts to start from, which differ in more than their recompute.
        choices: values that a relaxation may choose.
        report: called with the name of each stage and how far it is.
    """
    enumerated = f"{evaluated:,} layouts were evaluated; lower bounds rule out all others"
    if goal.step_problem.kinds:
        enumerated += ", with the best orders of kinds of nodes and divisions into stages that dynamic programming finds"
    else:
        enumerated += ": exact"
    if method == "enumerate":
        return Improved("enumerate", enumerated)

    best_value = float(goal.value(goal.quantities_of(layouts[:1]))[0]) if layouts else np.inf
    bases = _bases([*(p.layout for p in layouts), *pool])
    promising = [(0.0, layout) for layout in bases]
    if layouts:
        promising = _promising(goal, layouts[0], bases, best_value, all_of_them=method == "relax")

    # Cut the most promising ones, and drop those that a cut before has beaten even at their
    # bound.
    improvements: list[Improvement] = []
    tried = _one_of_each_schedule(promising)[: MOST_ON_KINDS if goal.step_problem.kinds else MOST]
    for done, (bound, layout) in enumerate(tried):
        if bound >= best_value:
            continue
        report("cut stages", done, len(tried))
        try:
            if method == "relax":
                improvement = _relaxed(goal.step_problem, layout, choices)
            else:
                executor_name = "dynamic programming" if layout.vpp == 1 else "moves of layers"
                improvement = Improvement(
                    layout, partition_stages(goal.step_problem, layout), executor_name
                )
        except LayoutError:
            continue  # nothing fits, or nothing to relax
        improvements.append(improvement)
        best_value = min(
            best_value, float(goal.value(goal.quantities_of([improvement.result.prediction]))[0])
        )
    if not improvements:
        nothing = "none of the best layouts would gain from uneven pipeline stages"
        return Improved(
            "enumerate", f"{enumerated}; {nothing}, as a lower bound over all divisions shows"
        )
    executor_names = ", ".join(dict.fromkeys(improvement.how for improvement in improvements))
    reason = "asked for" if method == "relax" else choose_method(contiguous=True).why
    why = f"{enumerated}; then {len(improvements)} of {len(promising)} promising layouts got uneven stages: {reason}"
    return Improved(f"enumerate, {executor_names}", why, tuple(improvements))


def _promising(
    goal: Goal, best: Prediction, layouts: Sequence[Layout], best_value: float, *, all_of_them: bool
) -> list[tuple[float, Layout]]:
    """Layouts worth cutting, each with the best value that any of its cuts may have.

    A cut takes a second or two, which is well spent only where the bound beats the best value by
    more than `WORTH`.

    Args:
        best: the best layout so far, whose value is `best_value`.
        all_of_them: the user asked for the method, so that all are tried.
    """
    promising = []
    for layout in layouts:
        bound = _value_at(goal, best, layout, partition_bound_s(goal.step_problem, layout))
        if all_of_them or bound < best_value - WORTH * abs(best_value):
            promising.append((bound, layout))
    return promising


def _relaxed(problem: StepProblem, layout: Layout, choices: LaunchChoices) -> Improvement:
    """Relax a layout, or cut it by dynamic programming if that gives a faster launchable one.

    Raises:
        LayoutError: neither leads to one that fits into memory.
    """
    results: dict[str, PartitionResult] = {}
    with suppress(LayoutError):
        results["relaxation"] = relax_layout(problem, layout, choices)
    with suppress(LayoutError):
        partitioned = partition_stages(problem, layout)
        full_layers = set(partitioned.layout.recompute_full_layers or ())
        if choices.by_stage or len(full_layers) <= 1:
            results["dynamic programming" if layout.vpp == 1 else "moves of layers"] = partitioned
    if not results:
        raise LayoutError(f"no division of {layout.label} into stages fits into memory")

    def compared_s(method: str) -> float:
        # If two results differ only by rounding, the relaxation's is kept, because the user asked
        # for it.
        tolerance = 0.0 if method == "relaxation" else SAME
        return results[method].step_time_s * (1 + tolerance)

    executor_name = min(results, key=compared_s)
    fastest = results[executor_name]
    buckets = None
    with suppress(LayoutError):  # no reductions to group
        buckets = launchable_buckets(problem, fastest.layout)
    return Improvement(layout, fastest, executor_name, buckets)


def launch_choices(space: SearchSpace, framework: Framework) -> LaunchChoices:
    """Return the values that a relaxation may choose: those in the space that a launch of the
    framework can state."""
    partial = tuple(kind for kind in space.recompute if kind != "full")
    return LaunchChoices(
        micro_batches=space.micro_batch,
        recomputes=partial,
        full_layers="full" in space.recompute and bool(partial),
        by_stage=space.any_framework or framework.name == "generic",
    )


def launchable_cuts(question: Question, goal: Goal, improved: Improved) -> Ranking:
    """Rank the new divisions that the framework can run, or all if the space is not limited to a
    framework."""
    within = not question.space.any_framework
    framework = question.problem.framework
    results = [
        improvement.result
        for improvement in improved.improvements
        if not within or _launchable(framework, improvement.result.layout)
    ]
    return ranking(
        goal,
        [r.prediction for r in results],
        [r.certificate.lower_bound_s for r in results],
    )


def _launchable(framework: Framework, layout: Layout) -> bool:
    """Whether a framework can run a layout whose stages were divided anew; none in the catalog
    accepts a separate number of recomputed layers per stage."""
    by_stage = len(set(layout.recompute_full_layers or ())) > 1
    return not framework.refused(layout) and not (by_stage and framework.name != "generic")


def _bases(layouts: Sequence[Layout]) -> list[Layout]:
    """The best pipelined layout of each combination of degrees, micro-batch and schedule."""
    bases: dict[tuple[object, ...], Layout] = {}
    for layout in layouts:
        if layout.pp > 1:
            degrees = layout.tp, layout.cp, layout.pp, layout.dp, layout.ep
            hosts = tuple(sorted(layout.kinds or ()))
            bases.setdefault(
                (degrees, layout.vpp, layout.micro_batch, layout.schedule, hosts), layout
            )
    return list(bases.values())


def _one_of_each_schedule(
    promising: Sequence[tuple[float, Layout]],
) -> list[tuple[float, Layout]]:
    """Order layouts by bounds, but alternate between schedules, because some bounds are looser."""
    # Bounds of some schedules are looser than others', so that an order by bound alone would
    # spend all tries on one schedule.
    rank_in_schedule: Counter[str] = Counter()
    ranked = []
    for value, layout in sorted(promising, key=itemgetter(0)):
        ranked.append((rank_in_schedule[layout.schedule], value, layout))
        rank_in_schedule[layout.schedule] += 1
    return [(value, layout) for _, value, layout in sorted(ranked, key=itemgetter(0, 1))]


def _value_at(goal: Goal, similar: Prediction, layout: Layout, step_s: float) -> float:
    """Approximate objective of a layout with this step time, without constraints."""
    if not np.isfinite(step_s):
        return np.inf

    # Price, energy and such follow from a prediction. One with the step time of the bound gives
    # the value at the bound.
    free = replace(goal, constraints=())
    at_bound = replace(similar, layout=layout, devices=layout.devices, step_time_s=step_s)
    return float(free.value(free.quantities_of([at_bound]))[0])
