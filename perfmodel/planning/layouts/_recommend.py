"""The layout that a search recommends: the best of those that are likely to fit into memory."""

from typing import Final

import numpy as np
from jaxtyping import Int

from perfmodel.display import Report
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._improve import Ranking, ranking
from perfmodel.planning.layouts._objective import Score
from perfmodel.planning.layouts._task import SearchTask
from perfmodel.planning.layouts.evaluation import StepTimes, evaluate
from perfmodel.prediction import Prediction, explain
from perfmodel.prediction.memory import fit_probabilities

FIRST_SOUGHT: Final = 16
"""Number of layouts below the memory limit that are examined first. It is quadrupled until one of
them is likely to fit."""
SMALLEST: Final = 512
"""Number of layouts with the least memory, among which the likeliest to fit is chosen."""


def recommend(
    task: SearchTask,
    candidates: Candidates,
    ranked: Ranking,
    step_times: StepTimes,
    report: Report,
    *,
    complete: bool = True,
) -> Prediction | None:
    """Find the best layout that fits with a probability of at least `options.min_fit`.

    Where there is none, the layout that fits most likely; None where no layout satisfies the goal.

    Args:
        task: the question; its options give the least probability, and whether times may be
            extrapolated.
        candidates: all layouts of the question.
        ranked: the best of them, in the order of the search.
        step_times: those that were evaluated already, and what evaluates more of them.
        report: called with the name of each stage and how far it is.
        complete: False after an interrupt, when only `ranked` is looked at.
    """
    goal, min_fit = task.goal, task.options.min_fit
    if ranked.predictions and ranked.predictions[0].fits_probability >= min_fit:
        return ranked.predictions[0]
    sure = [
        prediction for prediction in ranked.predictions if prediction.fits_probability >= min_fit
    ]
    safe = sure[:1]

    # The ranking holds one of several layouts that differ in recompute alone: a slower one of them,
    # which it leaves out, may be the best that fits surely.
    if complete and candidates.feasible:
        report("look for a layout that is sure to fit", 0, 0)
        safe += _best_safe(task, candidates, step_times)
    if safe:
        values = goal.value(goal.quantities_of(safe))
        return safe[int(np.argmin(values))]
    return _likeliest(task, candidates if complete else None, ranked)


def _best_safe(task: SearchTask, candidates: Candidates, step_times: StepTimes) -> list[Prediction]:
    """The best layout of even stages that fits with a probability of at least `options.min_fit`, if
    there is one."""
    problem, goal = task.question.step_problem, task.goal

    # A counter never shows less than what a layout needs, so that a layout which needs more than
    # this is ruled out before it is evaluated. The remaining layouts are examined in the order of
    # the objective.
    share = problem.site.memory_spread().share_that_fits(task.options.min_fit)
    largest_bytes = max(
        on_kind.cluster.device.memory_bytes for on_kind in problem.kinds or (problem,)
    )
    score = Score(goal, candidates.within(min(share, 1.0) * largest_bytes))
    possible = int(np.isfinite(score.bound).sum())

    sought, n_seen = FIRST_SOUGHT, 0

    # The order by value is known only as far as it is evaluated. Look at ever longer prefixes of
    # it, each prefix's new part only.
    while n_seen < possible:
        evaluated = evaluate(score, sought, step_times, lambda *_: None)
        numbers = evaluated.number[np.isfinite(evaluated.value)][n_seen:sought]
        prediction = _first_safe(task, candidates, numbers)
        if prediction is not None:
            return [prediction]
        if not len(numbers) or not evaluated.complete:
            return []
        n_seen = sought
        sought = 4 * sought
    return []


def _first_safe(
    task: SearchTask, candidates: Candidates, numbers: Int[np.ndarray, " some"]
) -> Prediction | None:
    """The first of some layouts that fits with a probability of at least `options.min_fit`."""
    question, options = task.question, task.options
    layouts = [question.as_run(layout) for layout in candidates.layouts(numbers)]
    for layout, probability in zip(
        layouts, fit_probabilities(question.step_problem, layouts), strict=True
    ):
        if probability >= options.min_fit:
            return explain(question.step_problem, layout, strict=options.strict)
    return None


def _likeliest(
    task: SearchTask, candidates: Candidates | None, ranked: Ranking
) -> Prediction | None:
    """The layout likeliest to fit, of those ranked and of the candidates with least memory."""
    likeliest = max(
        ranked.predictions, key=lambda prediction: prediction.fits_probability, default=None
    )
    if candidates is None or not candidates.feasible:
        return likeliest
    question, goal = task.question, task.goal
    problem = question.step_problem

    # Layouts that need less memory are mostly, but not always, likelier to fit. Work out the
    # probabilities of the smallest ones, and take the likeliest that satisfies the constraints.
    possible = np.flatnonzero(np.isfinite(Score(goal, candidates).bound))
    smallest = possible[np.argsort(candidates.peak_bytes(possible), kind="stable")][:SMALLEST]
    layouts = [question.as_run(layout) for layout in candidates.layouts(smallest)]
    probabilities = np.array(fit_probabilities(problem, layouts))
    for place in np.argsort(-probabilities, kind="stable").tolist():
        if likeliest is not None and probabilities[place] <= likeliest.fits_probability:
            break
        prediction = explain(problem, layouts[place], strict=task.options.strict)
        if ranking(goal, [prediction], [0.0]).predictions:  # it satisfies the constraints
            return prediction
    return likeliest
