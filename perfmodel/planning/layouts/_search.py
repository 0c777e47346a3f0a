"""Search: price every layout, evaluate those that could win, explain the best."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from jaxtyping import Float, Int

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.cost import PricesKernels
from perfmodel.display import Report, shows_progress
from perfmodel.errors import (
    LayoutError,
    PerfModelError,
    Reason,
    Rejection,
    UnknownNameError,
)
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._executor import Executor, open_executor
from perfmodel.planning.layouts._impossible import (
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
    best_of_batches,
)
from perfmodel.planning.layouts._robust import robustness
from perfmodel.planning.layouts._space import Space
from perfmodel.planning.layouts.evaluation import (
    Evaluated,
    Evaluations,
    evaluate,
    fastest,
    fingerprint,
)
from perfmodel.planning.layouts.questions import Question, ask
from perfmodel.planning.layouts.search_words import (
    SEARCH_WORDS,
    SearchKeywords,
    SearchOptions,
    SpaceWords,
    apply_search_keywords,
    file_words,
)
from perfmodel.prediction import explain
from perfmodel.spec import Cluster, Framework, Job, Model, Problem

POOL = 64
"""Number of the best layouts whose stages may be worth dividing anew."""
ROBUST_POOL = 24
"""Number of the best layouts that a robust order ranks."""
NUMBERING = 2
"""Version of the numbering of layouts; raised whenever the same question numbers its layouts differently."""


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
    progress: Report | None = None,
    global_batch: int | Sequence[int] | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **fields: Unpack[SearchKeywords],
) -> SearchResult:
    """Rank the layouts of a problem by predicted step time, or another objective.

        search("gpt3-175b", "dgx-a100", devices=1024, global_batch=1536, top=5)

    Memory and a lower bound of the step time are worked out for every layout of the space at once; those whose
    bound does not rule them out are evaluated exactly. The bounds carry over to every objective and constraint
    (`Goal` says why). An interrupt (Ctrl-C) during evaluation returns the best layouts so far and the bounds
    that hold by then, with `complete=False`.

    Args:
        model, cluster: a problem, or catalog names, files or objects, or a job file, as in `predict`.
        space: which layouts to try, or a function that returns the space of a problem; `default_space` if not given.
        options: the objective, and how the search works.
        calibration: as in `predict`.
        settings: changes of the machine, as `whatif` takes them (`"inter_node_bandwidth=2x"`).
        kernels: prices of kernels instead of the calibration's.
        progress: called with the name of each stage and how far it is.
        global_batch: sequences per step over all replicas; several are ranked together.
        seq_len, dtype, job, framework: as in `predict`.
        devices: number of devices to lay the model out on.
        fields: fields of the job, of the space (`SpaceWords`: `fix`, `schedules`, `vary`, `fewer_devices`), of
            `SearchOptions` and of `Tariff` by name. The last two override those of `options`.

    Raises:
        LayoutError: if no layout is possible at all (the message counts the reasons).
        UnknownNameError: for an unknown model, cluster, word, method, objective or quantity.
        PerfModelError: no devices, no layouts to rank or no batch; an invalid formula; a price that is not known;
            a `resume` file of another search; no Dask, or no scheduler at the address.
    """
    stated: dict[str, Any] = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "devices": devices,
        "job": job,
        "framework": framework,
    }
    stated = {name: value for name, value in stated.items() if value is not None} | {**fields}

    # A job file's [search] table comes behind what the caller states; a space of the caller replaces its own.
    file = catalog.unfiled(model)
    if file is not None:
        for name, value in file_words(file).items():
            if name not in stated and (space is None or SEARCH_WORDS[name] is not SpaceWords):
                stated[name] = value
    batches = stated.get("global_batch")
    if isinstance(batches, Sequence):
        if not batches:
            raise PerfModelError("search: no global batch is given; give at least one")
        stated |= {"batches": batches, "global_batch": batches[0]}
    options, space, stated = apply_search_keywords(stated, options, space)
    for name in stated:
        if name not in job_files.PROBLEM_WORDS:
            raise UnknownNameError("argument of search", name, {*job_files.PROBLEM_WORDS, *SEARCH_WORDS})

    # Several global batches are as many independent questions.
    model_or_file: Any = file or model
    problem = catalog.problem(model_or_file, cluster, **stated)
    problems = [problem.replace(global_batch=batch) for batch in options.batches] or [problem]
    questions = []
    for batch_problem in problems:
        question = ask(batch_problem, space=space, calibration=calibration, settings=settings, kernels=kernels)
        questions.append(question)
    several = bool(options.batches)
    if several and options.robust:
        raise PerfModelError(
            "search: --robust orders layouts of one global batch; give a single --global-batch, or leave --robust out"
        )

    # Step times of different batches do not compare: a larger batch takes longer and does more.
    # Throughput does compare.
    objective = options.objective or ("tokens_per_s" if several else "step_time")
    goals = []
    for question in questions:
        goals.append(Goal.parse(question.step_problem, objective, options.constraints, options.tariff))
    results = _search_in_turn(questions, goals, options, progress or (lambda *_: None))
    if not several:
        return results[0]
    tried = tuple(question.problem.job.global_batch for question in questions)
    return best_of_batches(results, tried, goals[0].objective, options.top)


def _search_in_turn(
    questions: Sequence[Question], goals: Sequence[Goal], options: SearchOptions, report: Report
) -> list[SearchResult]:
    """Results of one question after another, up to an interrupt; always at least one result."""
    results: list[SearchResult] = []
    with open_executor(options.workers, options.dask) as executor:
        for question, goal in zip(questions, goals, strict=True):
            # The results of earlier questions rule out layouts that cannot be among the best.
            reached = chain.from_iterable(result.values for result in results)
            values = sorted(goal.objective.display_value(value) for value in reached)
            cutoff = values[options.top - 1] if len(values) >= options.top else np.inf
            file = _resume_file(question, options)
            try:
                results.append(_search(question, goal, options, cutoff, executor, file, report))
            except KeyboardInterrupt:
                # An interrupt in the first question has nothing to return. Later ones return what
                # the questions before found.
                if not results:
                    raise
                break
            if not results[-1].complete:
                break
    return results


def _resume_file(question: Question, options: SearchOptions) -> Path | None:
    """The file that a question is resumed from; with several batches, each has its own file."""
    if not options.resume:
        return None
    file = Path(options.resume)
    if not options.batches:
        return file
    return file.with_name(f"{file.stem}-{question.problem.job.global_batch}{file.suffix}")


def _search(
    question: Question,
    goal: Goal,
    options: SearchOptions,
    cutoff: float,
    executor: Executor,
    file: Path | None,
    report: Report,
) -> SearchResult:
    """The best layouts of one question; those above `cutoff` may be left out."""
    started = time.perf_counter()

    # A resume file belongs to one question: to the values that its step times follow from, not to the
    # names of the fields that hold them.
    digest = fingerprint(NUMBERING, tuple(question.context), question.space, question.devices)
    known = Evaluations.open(file, digest)
    rejected: Counter[Rejection] = Counter()
    # A robust order may prefer a layout that is far from first by its median.
    at_least = max(options.top, ROBUST_POOL if options.robust else 0)

    # Bounds of all layouts, then exact step times of those that the bounds leave open.
    candidates = _candidates(question, goal, options, at_least, rejected, report)
    score = Score(goal, candidates)
    score.count_impossible(rejected)
    sought = int(np.isfinite(score.bound).sum()) if options.every else at_least
    evaluated = evaluate(
        score,
        sought,
        question.context,
        executor,
        known,
        report,
        cutoff,
        options.distinct,
        prune=options.distinct and not options.every,
    )

    # Every combination that is not ranked is counted once, under the first reason that holds.
    _count_rejected(rejected, goal, score, evaluated)
    satisfying = int(np.isfinite(evaluated.value).sum())
    # They are ranked ascending, and infinite where a constraint does not hold.
    distinct = evaluated.distinct[evaluated.distinct < satisfying]

    # Only the layouts that are shown get a full prediction with interval and account; ranking
    # needs step times alone. Then the stages of the most promising ones are cut anew, and both
    # are ranked together.
    even = _explained(
        question,
        goal,
        candidates,
        evaluated.number[distinct[:at_least]],
        options.strict,
        report,
    )
    improved = _improved(question, goal, candidates, evaluated, even, options.method, report)
    ranked = even.with_cut(launchable_cuts(question, goal, improved))

    # The certificate: what no layout of the space can undercut.
    lower_bound, lower_bound_s, open_bounds = _certain(question, score, evaluated, ranked)
    best_value = float(ranked.value.min(initial=np.inf))
    first = ranked.value[0] if ranked.predictions else np.inf
    unresolved = int((open_bounds < first).sum())
    complete = evaluated.complete and improved.complete

    # Predictions err together, so a robust order may differ from that of the medians. The
    # recommended layout is chosen in this order, before the list is shortened to `top`.
    sure = None
    if ranked.predictions:
        sure = robustness(goal, ranked.predictions)
        places = sure.order(options.robust) if options.robust else range(len(ranked.predictions))
        sure, ranked = sure.among(places), ranked.at(places)
    recommended = recommend(
        question,
        goal,
        options,
        candidates,
        ranked,
        known,
        executor,
        report,
        complete=complete,
    )
    if sure is not None:
        shown_places = range(min(options.top, len(ranked.predictions)))
        sure, ranked = sure.among(shown_places), ranked.at(shown_places)

    # Neither an interrupted search nor one that another batch cut short has seen all layouts, and so cannot say what
    # keeps them from running.
    decided = complete and cutoff == np.inf
    impossible = beyond = None
    if decided and not ranked.predictions:
        report("explain", 0, 0)
        fits = candidates.feasible > 0
        impossible = nothing_satisfies(question, goal, executor) if fits else nothing_fits(question, candidates)
    if decided and any(why.reason is Reason.FRAMEWORK for why in rejected):
        report("beyond the framework", 0, 0)
        beyond = _beyond(question, goal, best_value, executor)
    report("done", candidates.feasible, candidates.feasible)
    shown = goal.objective.display_value
    recommended_value = float("nan")
    if recommended is not None:
        recommended_value = shown(float(goal.value(goal.of([recommended]))[0]))
    return SearchResult(
        evaluated=len(evaluated.number),
        feasible=candidates.feasible,
        seconds=time.perf_counter() - started,
        layouts=ranked.predictions,
        method=improved.method,
        why=improved.why,
        improvements=improved.improvements,
        objective=goal.objective.name,
        values=tuple(map(shown, ranked.value.tolist())),
        recommendation=Recommendation(
            prediction=recommended,
            value=recommended_value,
            min_fit=options.min_fit,
        ),
        quantities=tuple(goal.named_quantities(prediction) for prediction in ranked.predictions),
        lower_bound=shown(lower_bound),
        constraints=tuple(map(str, goal.constraints)),
        framework=question.problem.framework.label,
        beyond=beyond,
        bounds_s=tuple(ranked.bound_s.tolist()),
        rejections=dict(rejected.most_common()),
        evaluation=EvaluatedLayouts(
            candidates=candidates,
            number=evaluated.number,
            step_time_s=evaluated.step_s,
            alike=satisfying - len(distinct),
        ),
        lower_bound_s=lower_bound_s,
        progress=Progress(complete=complete, unresolved=unresolved),
        space=question.space,
        impossible=impossible,
        robust=options.robust,
        robustness=sure,
    )


def _candidates(
    question: Question,
    goal: Goal,
    options: SearchOptions,
    at_least: int,
    rejected: Counter[Rejection],
    report: Report,
) -> Candidates:
    """Every possible layout with its memory and bound, or, if only the step time ranks, those that may be among the
    best."""
    keeps_all = options.every or not goal.plain or question.space.fewer_devices
    try:
        return price(question, rejected, report, None if keeps_all else at_least)
    except LayoutError as error:
        raise LayoutError(str(nothing_divides(question, error, rejected))) from None


def _explained(
    question: Question,
    goal: Goal,
    candidates: Candidates,
    numbers: Int[np.ndarray, " some"],
    strict: bool,
    report: Report,
) -> Ranking:
    """Full predictions of layouts with even stages, or with the stages that the framework chooses."""
    # Grids hold even stages; frameworks that balance stages by cost are explained with their cut.
    report("explain", 0, len(numbers))
    layouts = [question.as_run(layout) for layout in candidates.layouts(numbers)]
    predictions = [explain(goal.step_problem, layout, strict=strict) for layout in layouts]
    return ranking(goal, predictions, candidates.bound_s[numbers].tolist())


def _improved(
    question: Question,
    goal: Goal,
    candidates: Candidates,
    evaluated: Evaluated,
    even: Ranking,
    method: str,
    report: Report,
) -> Improved:
    """The best layouts, with their stages divided anew where that may help."""
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


def _certain(
    question: Question, score: Score, evaluated: Evaluated, ranked: Ranking
) -> tuple[float, float, Float[np.ndarray, " left"]]:
    """Return lower bounds of value and step time over the space, and the bounds of layouts that an interrupt left
    unevaluated.

    A lower bound is the least of what was evaluated and of the bounds of what was not. Stages cut anew may be faster
    than both.
    """
    # After a complete search, all unseen layouts have bounds above the last wanted layout, so
    # that they leave nothing open.
    unseen = np.ones(len(score.bound), bool)
    unseen[evaluated.number] = unseen[evaluated.dominated] = False
    open_bounds = np.zeros(0) if evaluated.complete else score.bound[unseen & np.isfinite(score.bound)]
    bound, bound_s = open_bounds, score.candidates.bound_s[unseen]
    if question.step_problem.kinds:  # those evaluated too have orders of the kinds and cuts that were not
        bound, bound_s = score.bound, score.candidates.bound_s
    value = float(min(ranked.value.min(initial=np.inf), bound.min(initial=np.inf)))
    return (
        value,
        float(min(ranked.step_s.min(initial=np.inf), bound_s.min(initial=np.inf))),
        open_bounds,
    )


def _count_rejected(rejected: Counter[Rejection], goal: Goal, score: Score, evaluated: Evaluated) -> None:
    """Count the possible layouts that are not ranked, evaluated or not."""
    # These were evaluated in full and turned out to violate a constraint.
    failed = len(evaluated.number) - int(np.isfinite(evaluated.value).sum())
    if failed:
        rejected[Rejection(Reason.CONSTRAINTS)] += failed

    # A variant that recomputes or offloads less fits too, and cannot be slower.
    if len(evaluated.dominated):
        rejected[Rejection(Reason.VARIANT)] += len(evaluated.dominated)

    # All others have a bound above the last wanted layout, or an interrupt left them.
    ruled_out_count = int(np.isfinite(score.bound).sum()) - len(evaluated.number) - len(evaluated.dominated)
    ruled_out = Reason.SLOWER if goal.plain else Reason.WORSE
    if ruled_out_count:
        rejected[Rejection(ruled_out if evaluated.complete else Reason.NOT_EVALUATED)] += ruled_out_count


def _beyond(question: Question, goal: Goal, best_value: float, executor: Executor) -> Beyond | None:
    """The best of all layouts, if the framework cannot run it and it is better than the best that it can."""
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
