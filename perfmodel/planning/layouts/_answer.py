"""Answers one question: prices every layout, evaluates those that could win, explains the best."""

import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int

from perfmodel.display import Report
from perfmodel.errors import LayoutError, Reason, Rejection
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._executor import Executor
from perfmodel.planning.layouts._impossible import (
    Impossible,
    nothing_divides,
    nothing_fits,
    nothing_satisfies,
)
from perfmodel.planning.layouts._improve import (
    Improved,
    Ranking,
    improve,
    launch_choices,
    launchable_cuts,
    ranking,
)
from perfmodel.planning.layouts._objective import Goal, Score
from perfmodel.planning.layouts._pricing import price
from perfmodel.planning.layouts._recommend import recommend
from perfmodel.planning.layouts._result import (
    Beyond,
    EvaluatedLayouts,
    Progress,
    Recommendation,
    SearchResult,
)
from perfmodel.planning.layouts._robust import Robustness, robustness
from perfmodel.planning.layouts._task import SearchTask
from perfmodel.planning.layouts.evaluation import (
    Evaluated,
    Evaluations,
    StepTimes,
    evaluate,
    fastest,
    fingerprint,
)
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.layouts.search_words import SearchOptions
from perfmodel.prediction import Prediction, explain

POOL: Final = 64
"""Number of the best layouts whose stages may be worth dividing anew."""
ROBUST_POOL: Final = 24
"""Number of the best layouts that a robust order ranks."""
NUMBERING: Final = 2
"""Version of the numbering of layouts; raised whenever the same question numbers its layouts
differently."""


def answer(
    task: SearchTask,
    cutoff: float,
    executor: Executor,
    file: Path | None,
    report: Report,
) -> SearchResult:
    """Find the best layouts of one question; those above `cutoff` may be left out.

    Args:
        task: the job and its layouts, the objective, and how the search works.
        cutoff: value of the goal above which layouts of an earlier question are better.
        executor: evaluates step times.
        file: file of step times, from which an interrupted search is continued; None for no file.
        report: called with the name of each stage and how far it is.
    """
    started = time.perf_counter()
    question, goal, options = task.question, task.goal, task.options

    # A resume file belongs to one question: to the values that its step times follow from, not to
    # the names of the fields that hold them.
    known = Evaluations.open(
        file, fingerprint(NUMBERING, tuple(question.context), question.space, question.devices)
    )

    # A robust order may prefer a layout that is far from first by its median.
    at_least = max(options.top, ROBUST_POOL if options.robust else 0)

    step_times = StepTimes(question.context, executor, known)
    evaluation = _evaluation(task, at_least, cutoff, step_times, report)
    candidates, evaluated = evaluation.candidates, evaluation.evaluated

    # Only the layouts that are shown get a full prediction with interval and account; ranking
    # needs step times alone. Then the stages of the most promising ones are cut anew, and both
    # are ranked together.
    best_numbers = evaluated.number[evaluated.distinct_satisfying[:at_least]]
    even = _explained(task, candidates, best_numbers, report)
    improved = _improved(task, candidates, evaluated, even, report)
    ranked = even.with_cut(launchable_cuts(question, goal, improved))
    complete = evaluated.complete and improved.complete
    certificate = _certificate(question, evaluation.score, evaluated, ranked)

    # Predictions err together, so a robust order may differ from that of the medians. The
    # recommended layout is chosen in this order, before the list is shortened to `top`.
    ordered = _robustly_ordered(goal, options, ranked)
    recommended = recommend(task, candidates, ordered.ranked, step_times, report, complete=complete)

    # Neither an interrupted search nor one that another batch cut short has seen all layouts, and
    # so cannot say what keeps them from running.
    obstacles = _Obstacles()
    if complete and cutoff == np.inf:
        obstacles = _obstacles(question, goal, evaluation, ranked, executor, report)
    report("done", candidates.feasible, candidates.feasible)

    return SearchResult(
        evaluated=len(evaluated.number),
        feasible=candidates.feasible,
        seconds=time.perf_counter() - started,
        method=improved.method,
        why=improved.why,
        improvements=improved.improvements,
        objective=goal.objective.name,
        recommendation=_recommendation(goal, recommended, options.min_fit),
        lower_bound=goal.objective.display_value(certificate.lower_bound),
        constraints=tuple(map(str, goal.constraints)),
        framework=question.problem.framework.label,
        beyond=obstacles.beyond,
        rejections=dict(evaluation.rejected.most_common()),
        evaluation=EvaluatedLayouts(
            candidates=candidates,
            number=evaluated.number,
            step_time_s=evaluated.step_s,
            alike=evaluated.satisfying - len(evaluated.distinct_satisfying),
        ),
        lower_bound_s=certificate.lower_bound_s,
        progress=Progress(complete=complete, unresolved=certificate.unresolved),
        space=question.space,
        impossible=obstacles.impossible,
        robust=options.robust,
        **_fields_per_layout(goal, ordered.first(options.top)),
    )


class _Evaluation(NamedTuple):
    """Every possible layout with its bound, and exact step times of those that could win."""

    candidates: Candidates
    score: Score
    """Bounds of the candidates in the goal's objective."""
    evaluated: Evaluated
    rejected: Counter[Rejection]
    """Layouts that are not ranked, each counted once, under the first reason that holds."""


def _evaluation(
    task: SearchTask, at_least: int, cutoff: float, step_times: StepTimes, report: Report
) -> _Evaluation:
    """Bound all layouts, then evaluate those that the bounds leave open.

    Args:
        at_least: number of the best layouts that are wanted.
    """
    options = task.options
    rejected: Counter[Rejection] = Counter()
    candidates = _candidates(task, at_least, rejected, report)
    score = Score(task.goal, candidates)
    score.count_impossible(rejected)
    evaluated = evaluate(
        score,
        int(np.isfinite(score.bound).sum()) if options.every else at_least,
        step_times,
        report,
        cutoff,
        options.distinct,
        prune=options.distinct and not options.every,
    )
    _count_rejected(rejected, task.goal, score, evaluated)
    return _Evaluation(candidates, score, evaluated, rejected)


class _Obstacles(NamedTuple):
    """The reasons why layouts do not run, if a search has seen all of them."""

    impossible: Impossible | None = None
    """Why no layout runs at all; None if one does."""
    beyond: Beyond | None = None
    """A better layout that the framework cannot run, if there is one."""


def _obstacles(
    question: Question,
    goal: Goal,
    evaluation: _Evaluation,
    ranked: Ranking,
    executor: Executor,
    report: Report,
) -> _Obstacles:
    """Explain, after a complete search, which limits keep layouts from running."""
    impossible = beyond = None
    if not ranked.predictions:
        impossible = _impossible(question, goal, evaluation.candidates, executor, report)
    if any(why.reason is Reason.FRAMEWORK for why in evaluation.rejected):
        report("beyond the framework", 0, 0)
        beyond = _beyond(question, goal, float(ranked.value.min(initial=np.inf)), executor)
    return _Obstacles(impossible, beyond)


def _fields_per_layout(goal: Goal, shown: "_Ordered") -> dict[str, Any]:
    """The fields of a search's result that have an entry for each layout shown."""
    ranked = shown.ranked
    return {
        "layouts": ranked.predictions,
        "values": tuple(map(goal.objective.display_value, ranked.value.tolist())),
        "quantities": tuple(goal.named_quantities(prediction) for prediction in ranked.predictions),
        "bounds_s": tuple(ranked.bound_s.tolist()),
        "robustness": shown.robustness,
    }


def _candidates(
    task: SearchTask, at_least: int, rejected: Counter[Rejection], report: Report
) -> Candidates:
    """Every possible layout with its memory and bound, or, if only the step time ranks, those that
    may be among the best."""
    question = task.question
    keeps_all = task.options.every or not task.goal.plain or question.space.fewer_devices
    try:
        return price(question, rejected, report, None if keeps_all else at_least)
    except LayoutError as error:
        raise LayoutError(str(nothing_divides(question, error, rejected))) from None


def _explained(
    task: SearchTask,
    candidates: Candidates,
    numbers: Int[np.ndarray, " some"],
    report: Report,
) -> Ranking:
    """Predict layouts in full, with even stages or with those that the framework chooses."""
    # Grids hold even stages; frameworks that balance stages by cost are explained with their cut.
    report("explain", 0, len(numbers))
    goal, strict = task.goal, task.options.strict
    layouts = [task.question.as_run(layout) for layout in candidates.layouts(numbers)]
    predictions = [explain(goal.step_problem, layout, strict=strict) for layout in layouts]
    return ranking(goal, predictions, candidates.bound_s[numbers].tolist())


def _improved(
    task: SearchTask,
    candidates: Candidates,
    evaluated: Evaluated,
    even: Ranking,
    report: Report,
) -> Improved:
    """The best layouts, with their stages divided anew where that may help."""
    question, goal, method = task.question, task.goal, task.options.method
    framework = question.problem.framework
    takes_other_cuts = framework.capabilities.uneven_stages and not framework.launch.stages_by_cost
    cuts_stages = takes_other_cuts or question.space.any_framework
    if not cuts_stages or not evaluated.complete:
        method = "enumerate"
    elif question.problem.cluster.kinds and method == "enumerate":
        method = "auto"  # even stages are of no use on unlike devices

    # The pool holds further layouts of even stages that a cut could bring to the top, though they
    # are not among those explained.
    satisfying = evaluated.number[np.isfinite(evaluated.value)]
    pool = candidates.layouts(satisfying[:POOL]) if method != "enumerate" else []
    try:
        choices = launch_choices(question.space, framework)
        return improve(goal, method, len(evaluated.number), even.predictions, pool, choices, report)
    except KeyboardInterrupt:
        return Improved(
            "enumerate",
            "interrupted before uneven stages were tried for all promising layouts",
            complete=False,
        )


class _Certificate(NamedTuple):
    """Lower bounds that no layout of the space can undercut."""

    lower_bound: float
    """Lower bound on the value of the goal."""
    lower_bound_s: float
    unresolved: int
    """Number of layouts that an interrupt left unevaluated and that may be better than the best
    found."""


def _certificate(
    question: Question, score: Score, evaluated: Evaluated, ranked: Ranking
) -> _Certificate:
    """Bound the value and the step time of every layout of the space from below.

    A lower bound is the least of the evaluated values and of the bounds of all other layouts.
    Stages cut anew may be faster than both.
    """
    # After a complete search, all unseen layouts have bounds above the last wanted layout, so
    # that they leave nothing open.
    unseen = np.ones(len(score.bound), bool)
    unseen[evaluated.number] = unseen[evaluated.dominated] = False
    open_bounds = (
        np.zeros(0) if evaluated.complete else score.bound[unseen & np.isfinite(score.bound)]
    )
    bound = open_bounds
    bound_s = score.candidates.bound_s[unseen]
    if question.step_problem.kinds:
        # An evaluated layout may be faster with another order of the kinds of nodes, or another
        # cut.
        bound, bound_s = score.bound, score.candidates.bound_s
    best_value = ranked.value[0] if ranked.predictions else np.inf
    return _Certificate(
        lower_bound=float(min(ranked.value.min(initial=np.inf), bound.min(initial=np.inf))),
        lower_bound_s=float(min(ranked.step_s.min(initial=np.inf), bound_s.min(initial=np.inf))),
        unresolved=int((open_bounds < best_value).sum()),
    )


class _Ordered(NamedTuple):
    """Ranked layouts in the order that the user asked for, with how sure it is."""

    ranked: Ranking
    robustness: Robustness | None
    """None without any layout."""

    def first(self, count: int) -> "_Ordered":
        """The first layouts, with their robustness against all of these."""
        if self.robustness is None:
            return self
        places = range(min(count, len(self.ranked.predictions)))
        return _Ordered(self.ranked.at(places), self.robustness.among(places))


def _robustly_ordered(goal: Goal, options: SearchOptions, ranked: Ranking) -> _Ordered:
    """Order layouts by the options' robust criterion; without one, leave them as they are."""
    if not ranked.predictions:
        return _Ordered(ranked, None)
    sure = robustness(goal, ranked.predictions)
    places = sure.order(options.robust) if options.robust else range(len(ranked.predictions))
    return _Ordered(ranked.at(places), sure.among(places))


def _recommendation(goal: Goal, prediction: Prediction | None, min_fit: float) -> Recommendation:
    """The layout to try first, with its objective as shown."""
    value = float("nan")
    if prediction is not None:
        value = goal.objective.display_value(float(goal.value(goal.quantities_of([prediction]))[0]))
    return Recommendation(prediction=prediction, value=value, min_fit=min_fit)


def _impossible(
    question: Question, goal: Goal, candidates: Candidates, executor: Executor, report: Report
) -> Impossible:
    """The reason why no layout exists: none satisfies the constraints, or none fits into memory."""
    report("explain", 0, 0)
    if candidates.feasible > 0:
        return nothing_satisfies(question, goal, executor)
    return nothing_fits(question, candidates)


def _count_rejected(
    rejected: Counter[Rejection], goal: Goal, score: Score, evaluated: Evaluated
) -> None:
    """Count the possible layouts that are not ranked, evaluated or not."""
    # These were evaluated in full and turned out to violate a constraint.
    failed = len(evaluated.number) - evaluated.satisfying
    if failed:
        rejected[Rejection(Reason.CONSTRAINTS)] += failed

    # A variant that recomputes or offloads less fits too, and cannot be slower.
    if len(evaluated.dominated):
        rejected[Rejection(Reason.VARIANT)] += len(evaluated.dominated)

    # All others have a bound above the last wanted layout, or an interrupt left them.
    ruled_out_count = (
        int(np.isfinite(score.bound).sum()) - len(evaluated.number) - len(evaluated.dominated)
    )
    ruled_out = Reason.SLOWER if goal.plain else Reason.WORSE
    if ruled_out_count:
        rejected[Rejection(ruled_out if evaluated.complete else Reason.NOT_EVALUATED)] += (
            ruled_out_count
        )


def _beyond(question: Question, goal: Goal, best_value: float, executor: Executor) -> Beyond | None:
    """The best of all layouts, if it beats all that the framework can run."""
    best = fastest(question.beyond_framework, goal, executor)
    if best is None or not best.value < best_value:
        return None
    # The layout found is the framework's own best, up to rounding.
    refused = question.problem.framework.cannot_run(best.layout)
    if not refused:
        return None
    gain = np.inf
    if np.isfinite(best_value) and best_value:
        gain = (best_value - best.value) / abs(best_value)
    return Beyond(
        layout=best.layout,
        notation=question.problem.framework.notation(best.layout, question.problem.model),
        value=goal.objective.display_value(best.value),
        step_time_s=best.step_time_s,
        gain=gain,
        cannot_run=refused,
    )
