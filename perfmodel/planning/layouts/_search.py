"""Search: price every layout, evaluate those that could win, explain the best."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel import catalog
from perfmodel.cost import PricesKernels
from perfmodel.display import shows_progress
from perfmodel.errors import LayoutError, PerfModelError, Reason, Rejection, UnknownNameError
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._evaluate import Evaluated, Evaluations, evaluate, fingerprint
from perfmodel.planning.layouts._executor import Executor, Here, open_executor
from perfmodel.planning.layouts._impossible import Impossible, nothing_divides, nothing_fits, nothing_satisfies
from perfmodel.planning.layouts._improve import Improved, improve
from perfmodel.planning.layouts._objective import Goal, Score
from perfmodel.planning.layouts._pricing import price
from perfmodel.planning.layouts._question import Progress, Question, SearchOptions, ask
from perfmodel.planning.layouts._result import Beyond, SearchResult, best_of_batches
from perfmodel.planning.layouts._robust import robustness
from perfmodel.planning.layouts._words import SEARCH_WORDS, Space, SpaceWords, file_words, worded
from perfmodel.prediction import Prediction, explain
from perfmodel.spec import Cluster, Framework, Layout, Model, Problem

POOL = 64
"""Layouts, the best, whose stages may be worth cutting anew."""
ROBUST_POOL = 24
"""Layouts, the best, among which a robust order chooses."""
NUMBERING = 2
"""Rises whenever layouts of the same question get other numbers."""
SAME = 1e-9
"""Relative difference of step times below which a cut is that of an even layout."""


@shows_progress("search")
def search(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    *,
    space: Space | None = None,
    options: SearchOptions | None = None,
    calibration: Path | str | None = None,
    settings: Sequence[str] = (),
    kernels: PricesKernels | None = None,
    progress: Progress | None = None,
    **words: Any,
) -> SearchResult:
    """Rank the layouts of a problem by predicted step time, or another objective.

        search("gpt3-175b", "dgx-a100", devices=1024, global_batch=1536, top=5)

    Memory and a lower bound of the step time are worked out for every layout of the space at once; those whose
    bound does not rule them out are evaluated exactly. The bounds carry over to every objective and constraint
    (`Goal` says why). An interrupt (Ctrl-C) during evaluation returns the best so far, `complete=False`: with what is
    certain then, and no more.

    Args:
        model, cluster: a problem, or catalog names, files or objects, or a job file, as in `predict`.
        space: which layouts to try, or a function that tells it for a problem; `default_space` if not given.
        options: what is best and how it is looked for.
        calibration: as in `predict`.
        settings: of the machine, as `whatif` takes them (`"inter_node_bandwidth=2x"`).
        kernels: prices of kernels instead of the calibration's.
        progress: told what is being done.
        words: the problem in words, as `catalog.problem` takes them (`devices`, `global_batch`, `seq_len`, `job`,
            `framework`), of its space (`SpaceWords`: `fix`, `schedules`, `vary`, `fewer_devices`), and fields of
            `SearchOptions` and `Tariff`, which go before those of `options`. Several batches given as `global_batch`
            are its `batches`.

    Raises:
        LayoutError: if no layout is possible at all (the message counts the reasons).
        UnknownNameError: for an unknown model, cluster, word, method, objective or quantity.
        PerfModelError: no devices, no layouts to rank or no batch; a formula that is none; a price that nothing tells;
            a `resume` file of another search; no Dask, or no scheduler at the address.
    """
    if (file := catalog.unfiled(model)) is not None:
        of_file = file_words(file)
        words = {w: v for w, v in of_file.items() if space is None or SEARCH_WORDS[w] is not SpaceWords} | words
    named: Any = file or model
    if isinstance(batches := words.get("global_batch"), Sequence):
        if not batches:
            raise PerfModelError("search: there is no global batch to try; give at least one")
        words |= {"batches": batches, "global_batch": batches[0]}
    options, space, words = worded(words, options, space)
    if unknown := next((word for word in words if word not in catalog.PROBLEM_WORDS), None):
        raise UnknownNameError("word of a search", unknown, {*catalog.PROBLEM_WORDS, *SEARCH_WORDS})
    problem, several = catalog.problem(named, cluster, **words), bool(options.batches)
    problems = [problem.replace(global_batch=batch) for batch in options.batches] or [problem]
    questions = [
        ask(each, space=space, calibration=calibration, settings=settings, kernels=kernels) for each in problems
    ]
    if several and options.robust:
        raise PerfModelError("search: a robust order is of one global batch; give one, or no --robust")
    objective = options.objective or ("tokens_per_s" if several else "step_time")
    goals = [
        Goal.parse(question.step_problem, objective, options.constraints, options.tariff) for question in questions
    ]
    files = [Path(options.resume) if options.resume else None] * len(questions)
    if several:
        files = [file and file.with_name(f"{file.stem}-{q.problem.job.global_batch}{file.suffix}")
                 for file, q in zip(files, questions, strict=True)]  # fmt: skip
    found: list[SearchResult] = []
    with open_executor(options.workers, options.dask) as executor:
        for question, goal, file in zip(questions, goals, files, strict=True):
            values = sorted(goal.objective.shown(value) for result in found for value in result.values)
            cutoff = values[options.top - 1] if len(values) >= options.top else np.inf
            try:
                found.append(_search(question, goal, options, cutoff, executor, file, progress or (lambda *_: None)))
            except KeyboardInterrupt:
                if not found:
                    raise
                break
            if not found[-1].complete:
                break
    tried = tuple(question.problem.job.global_batch for question in questions)
    return best_of_batches(found, tried, goals[0].objective, options.top) if several else found[0]


def _search(
    question: Question,
    goal: Goal,
    options: SearchOptions,
    cutoff: float,
    executor: Executor,
    file: Path | None,
    report: Progress,
) -> SearchResult:
    """The best layouts of one question, of which those above `cutoff` need not be found."""
    robust, top = options.robust, options.top
    framework, within = question.problem.framework, not question.space.any_framework
    cuts_stages = framework.uneven_stages or framework.stages_by_cost or not within
    method = options.method if cuts_stages else "enumerate"
    if question.problem.cluster.kinds and method == "enumerate" and cuts_stages:
        method = "auto"  # even stages are of no use on unlike devices
    started = time.perf_counter()
    step_problem = question.step_problem
    known = Evaluations.open(file, fingerprint(NUMBERING, question.context, question.space, question.devices))
    rejected: Counter[Rejection] = Counter()
    all_of = options.every or not goal.plain or question.space.fewer_devices
    try:
        wanted = None if all_of else max(options.top, ROBUST_POOL if robust else 0)
        candidates = price(question, rejected, report, wanted)
    except LayoutError as error:
        raise LayoutError(str(nothing_divides(question, error, rejected))) from None
    score = Score(goal, candidates)
    score.count_impossible(rejected)
    wanted = max(top, ROBUST_POOL if robust else 0)
    sought = int(np.isfinite(score.bound).sum()) if options.every else wanted
    found = evaluate(
        score, sought, question.context, executor, known, report, cutoff, options.distinct,
        prune=options.distinct and not options.every,
    )  # fmt: skip
    _count_rejected(rejected, goal, score, found)
    kept = int(np.isfinite(found.value).sum())
    numbers = found.number[found.distinct[found.distinct < kept][:wanted]]
    report("explain", 0, len(numbers))
    best = [explain(step_problem, layout, strict=options.strict) for layout in candidates.layouts(numbers)]
    value = goal.value(goal.of(best)) if best else np.zeros(0)
    step_s = np.array([p.step_time_s for p in best])
    order = np.lexsort((step_s, value))[: int(np.isfinite(value).sum())].tolist()
    left = np.ones(len(score.bound), bool)
    left[found.number] = left[found.dominated] = False
    open_bounds = np.zeros(0) if found.complete else score.bound[left & np.isfinite(score.bound)]
    unknown = float(open_bounds.min(initial=np.inf))
    lower_bound = float(value[order].min(initial=unknown))
    bounds_s = candidates.bound_s
    lower_bound_s = float(step_s[order].min(initial=bounds_s[left].min(initial=np.inf)))
    ranked = [best[i] for i in order]
    values, bounds = value[order].tolist(), bounds_s[numbers[order]].astype(float).tolist()
    pool = candidates.layouts(found.number[: min(POOL, kept)]) if method != "enumerate" else []
    try:
        improved = improve(goal, method if found.complete else "enumerate", len(found.number), ranked, pool, report)
        complete = found.complete
    except KeyboardInterrupt:
        improved, complete = Improved("enumerate", "interrupted before all promising stages were cut anew"), False
    for improvement in improved.improvements:
        if within and not _launchable(framework, improvement.result.layout):
            continue
        p = improvement.result.prediction
        p_value = float(goal.value(goal.of([p]))[0])
        if np.isfinite(p_value) and not any(abs(p.step_time_s / q.step_time_s - 1) < SAME for q in ranked):
            ranked, values = [*ranked, p], [*values, p_value]
            bounds = [*bounds, improvement.result.certificate.lower_bound_s]
    order = np.lexsort(([p.step_time_s for p in ranked], values)).tolist()
    sure = None
    if ranked:
        sure = robustness(goal, [ranked[i] for i in order])
        chosen = (sure.order(robust) if robust else list(range(len(order))))[:top]
        sure, order = sure.kept(chosen), [order[i] for i in chosen]
    # stages cut anew may be faster than all even ones
    lower_bound = min([lower_bound, *values])
    lower_bound_s = min([lower_bound_s, *(p.step_time_s for p in ranked)])
    if step_problem.kinds:  # other orders of the kinds and cuts than the candidates have
        lower_bound = min(lower_bound, float(score.bound.min(initial=np.inf)))
        lower_bound_s = min(lower_bound_s, float(bounds_s.min(initial=np.inf)))
    impossible = None
    if not ranked and complete and cutoff == np.inf:
        report("explain", 0, 0)
        impossible = _why_not(question, goal, candidates, executor)
    beyond = None
    if complete and cutoff == np.inf and any(why.reason is Reason.FRAMEWORK for why in rejected):
        report("beyond the framework", 0, 0)
        beyond = _beyond(question, goal, min(values, default=np.inf), executor)
    report("done", candidates.feasible, candidates.feasible)
    shown = goal.objective.shown
    return SearchResult(
        evaluated=len(found.number),
        feasible=candidates.feasible,
        seconds=time.perf_counter() - started,
        layouts=tuple(ranked[i] for i in order),
        method=improved.method,
        why=improved.why,
        improvements=improved.improvements,
        objective=goal.objective.name,
        values=tuple(shown(values[i]) for i in order),
        quantities=tuple(quantities_of(goal, ranked[i]) for i in order),
        lower_bound=shown(lower_bound),
        constraints=tuple(map(str, goal.constraints)),
        framework=framework.label,
        beyond=beyond,
        bounds_s=tuple(bounds[i] for i in order),
        rejections=dict(rejected.most_common()),
        step_time_s=found.step_s,
        number=found.number,
        candidates=candidates,
        lower_bound_s=lower_bound_s,
        complete=complete,
        space=question.space,
        unresolved=int((open_bounds < (values[order[0]] if order else np.inf)).sum()),
        alike=kept - int((found.distinct < kept).sum()),
        impossible=impossible,
        robust=robust,
        robustness=sure,
    )


def _count_rejected(rejected: Counter[Rejection], goal: Goal, score: Score, found: Evaluated) -> None:
    """Add the possible layouts that are not ranked: evaluated in vain, or not at all."""
    failed = len(found.number) - int(np.isfinite(found.value).sum())
    if failed:
        rejected[Rejection(Reason.CONSTRAINTS)] += failed
    if len(found.dominated):
        rejected[Rejection(Reason.VARIANT)] += len(found.dominated)
    left = int(np.isfinite(score.bound).sum()) - len(found.number) - len(found.dominated)
    if not left:
        return
    if not found.complete:
        rejected[Rejection(Reason.NOT_EVALUATED)] += left
    else:
        rejected[Rejection(Reason.SLOWER if goal.plain else Reason.WORSE)] += left


def _launchable(framework: Framework, layout: Layout) -> bool:
    """Whether a framework runs a layout whose stages were cut anew; none of the catalog takes other numbers of layers
    to recompute stage by stage."""
    by_stage = len(set(layout.recompute_full_layers or ())) > 1
    return not framework.refused(layout) and not (by_stage and framework.name != "generic")


def _beyond(question: Question, goal: Goal, best_value: float, executor: Executor) -> Beyond | None:
    """The best of all layouts, if the framework cannot run it and it is better than the best that it can."""
    best = fastest(question.beyond_framework, goal, executor)
    if best is None or not best.value < best_value:
        return None
    refused = question.problem.framework.cannot_run(best.layout)
    gain = (best_value - best.value) / abs(best_value) if np.isfinite(best_value) and best_value else np.inf
    return Beyond(
        layout=best.layout,
        value=goal.objective.shown(best.value),
        step_time_s=best.step_time_s,
        gain=gain,
        cannot_run=refused,
    )


def _why_not(question: Question, goal: Goal, candidates: Candidates, executor: Executor) -> Impossible:
    """Why no layout is possible, and what would change that."""
    if not candidates.feasible:
        return nothing_fits(question, candidates)

    def best(asked: Question, wanted: Goal) -> tuple[float, str] | None:
        found = fastest(asked, wanted, executor)
        return found and (found.value, str(found.layout))

    return nothing_satisfies(question, goal, best)


@dataclass(frozen=True)
class BestLayout:
    """The best layout of a question."""

    layout: Layout
    value: float
    """Of the objective, as it is minimised."""
    step_time_s: float


def fastest(question: Question, goal: Goal, executor: Executor | None = None) -> BestLayout | None:
    """The best layout alone, exactly but unexplained; None where none fits and satisfies the constraints.

    Raises:
        LayoutError: no layout is possible at all.
    """
    priced = price(question, Counter())
    score = Score(replace(goal, step_problem=question.step_problem), priced)
    found = evaluate(score, 1, question.context, executor or Here(), Evaluations(), lambda *_: None)
    if not len(found.value) or not np.isfinite(found.value[0]):
        return None
    return BestLayout(priced.layouts(found.number[:1])[0], float(found.value[0]), float(found.step_s[0]))


def quantities_of(goal: Goal, prediction: Prediction) -> dict[str, float]:
    """What objective and constraints name of a layout, and its money and energy where the tariff tells them."""
    names = set(goal.objective.formula.names).union(*(constraint.names for constraint in goal.constraints))
    tariff = goal.tariff
    priced = tariff.price_per_device_hour is not None
    listed = tariff.price_per_device_hour == goal.step_problem.cluster.device.usd_per_hour
    names |= {"cost"} if priced and (tariff.tokens or not listed) else set()  # a list price tells little by itself
    names |= {"energy_j"} if tariff.power_w is not None and tariff.idle_power_w is not None else set()
    names |= {"train_time_s"} if tariff.tokens is not None else set()
    quantity = goal.of([prediction])
    return {name: float(np.ravel(quantity(name).lo)[0]) for name in sorted(names)}
