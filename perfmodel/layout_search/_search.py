"""Search: price every layout, evaluate those that could win, explain the best."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfmodel import catalog
from perfmodel.display import shows_progress
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.layout_search._batches import best_of_batches
from perfmodel.layout_search._candidates import Candidates
from perfmodel.layout_search._checkpoint import Evaluations, fingerprint
from perfmodel.layout_search._evaluate import Evaluated, evaluate
from perfmodel.layout_search._executor import Executor, Here, open_executor
from perfmodel.layout_search._impossible import Impossible, nothing_divides, nothing_fits, nothing_satisfies
from perfmodel.layout_search._improve import METHODS, improve
from perfmodel.layout_search._objective import Goal, Score
from perfmodel.layout_search._quantities import Tariff
from perfmodel.layout_search._question import Progress, Question, price
from perfmodel.layout_search._result import SearchResult
from perfmodel.layout_search._robust import ORDERS, robustness
from perfmodel.layout_search._space import Space, default_space
from perfmodel.prediction import EAGER, Framework, Prediction, explain
from perfmodel.spec import Cluster, Job, Layout, Model
from perfmodel.what_if import Scenario

POOL = 64
"""Layouts, the best, whose stages may be worth cutting anew."""
ROBUST_POOL = 24
"""Layouts, the best, among which a robust order chooses."""
SAME = 1e-9
"""Relative difference of step times below which a cut is that of an even layout."""


@shows_progress("search")
def search(
    model: Model | str,
    cluster: Cluster | str,
    *,
    devices: int,
    global_batch: int | Sequence[int],
    seq_len: int | None = None,
    method: str = "enumerate",
    objective: str | None = None,
    constraints: Sequence[str] = (),
    tariff: Tariff | None = None,
    robust: str = "",
    top: int = 10,
    job: Job | None = None,
    space: Space | Callable[[Job], Space] | None = None,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    settings: Sequence[str] = (),
    strict: bool = False,
    progress: Progress | None = None,
    workers: int = 1,
    dask: str = "",
    resume: Path | str | None = None,
) -> SearchResult:
    """Rank the layouts of `model` on `devices` devices of `cluster` by predicted step time, or another objective.

    Memory and a lower bound of the step time are worked out for every layout of the space at once; those whose
    bound does not rule them out are evaluated exactly. The bounds carry over to every objective and constraint
    (`Goal` says why). An interrupt (Ctrl-C) during evaluation returns the best so far, `complete=False`.

    Args:
        model, cluster: catalog names, files, or objects, as in `predict`.
        devices: devices to lay the model out on (at most so many, if the space says `fewer_devices`).
        global_batch: sequences per step; several are tried one after the other, and ranked together.
        seq_len, job, calibration, framework, strict: as in `predict`; the batch is always `global_batch`'s if there are
            several, else `job`'s.
        method: `enumerate` (even stages, exact), `auto` (then uneven stages and recompute by stage for the layouts
            that a bound promises a gain for, by dynamic programming), or `relax` (these cuts by relaxation, rounding
            and local search). The result says what was done and why.
        objective: one of `OBJECTIVES`, or a formula over `QUANTITIES` to be minimised; by default `step_time`,
            of several batches `tokens_per_s`.
        constraints: comparisons of such formulas that layouts must satisfy, such as `"memory_bytes < 70e9"`.
        tariff: prices, powers, and tokens to train on, where they are not the catalog's.
        robust: order by one of `ORDERS` instead (`regret`, `upper`, `best`), among the `ROBUST_POOL` best, as the
            errors of predictions would have it; see `Robustness`.
        top: layouts to rank.
        space: which layouts to try, or a function that tells it for a job; `default_space` if not given.
        settings: of the machine, as `whatif` takes them (`"inter_node_bandwidth=2x"`).
        progress: told what is being done.
        workers: processes that evaluate.
        dask: address of a Dask scheduler whose workers evaluate instead.
        resume: file that keeps what was evaluated; if it is there, the search goes on from it.

    Raises:
        LayoutError: if no layout is possible at all (the message counts the reasons).
        UnknownNameError: for an unknown model, cluster, method, objective or quantity.
        PerfModelError: no layouts to rank or no batch; a formula that is none; a price that nothing tells; a `resume`
            file of another search; no Dask, or no scheduler at the address.
    """
    if method not in METHODS:
        raise UnknownNameError("search method", method, METHODS)
    if robust and robust not in ORDERS:
        raise UnknownNameError("robust order", robust, ORDERS)
    if top < 1:
        raise PerfModelError(f"search: top must be at least 1 layout, got {top}")
    several = not isinstance(global_batch, int)
    if several and not len(global_batch):
        raise PerfModelError("search: there is no global batch to try; give at least one")
    questions = [
        ask(
            model, cluster, devices=devices, global_batch=batch, seq_len=seq_len, space=space, calibration=calibration,
            job=replace(job, global_batch=batch) if job and several else job,
            framework=framework, settings=settings,
        )
        for batch in (global_batch if several else [global_batch])
    ]  # fmt: skip
    if several and robust:
        raise PerfModelError("search: a robust order is of one global batch; give one, or no --robust")
    objective = objective or ("tokens_per_s" if several else "step_time")
    goals = [Goal.parse(question.fixed, objective, constraints, tariff) for question in questions]
    files = [Path(resume) if resume else None] * len(questions)
    if several:
        files = [file and file.with_name(f"{file.stem}-{q.job.global_batch}{file.suffix}")
                 for file, q in zip(files, questions, strict=True)]  # fmt: skip
    found: list[SearchResult] = []
    with open_executor(workers, dask) as executor:
        for question, goal, file in zip(questions, goals, files, strict=True):
            values = sorted(goal.objective.shown(value) for result in found for value in result.values)
            cutoff = values[top - 1] if len(values) >= top else np.inf
            found.append(
                _search(
                    question, goal, method, robust, top, executor, file, strict, progress or (lambda *_: None), cutoff
                )
            )
    return best_of_batches(found, goals[0].objective, top) if several else found[0]


def ask(
    model: Model | str,
    cluster: Cluster | str,
    *,
    devices: int,
    global_batch: int,
    seq_len: int | None = None,
    job: Job | None = None,
    space: Space | Callable[[Job], Space] | None = None,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    settings: Sequence[str] = (),
) -> Question:
    """The question that the arguments of `search` ask.

    Raises:
        PerfModelError: no devices, and as `search`.
    """
    if devices < 1:
        raise PerfModelError(f"search: devices must be at least 1, got {devices}")
    model = catalog.model(model) if isinstance(model, str) else model
    cluster = catalog.cluster(cluster) if isinstance(cluster, str) else cluster
    job = job or Job(global_batch=global_batch, seq_len=seq_len or model.seq_len)
    if space is None:
        space = default_space(model, cluster, job, devices)
    question = Question(
        model=model,
        cluster=cluster,
        job=job,
        devices=devices,
        space=space if isinstance(space, Space) else space(job),
        calibration=Path(calibration) if calibration is not None else None,
        framework=framework or EAGER,
    )
    return question.in_scenario(Scenario.parse(settings))


def _search(
    question: Question,
    goal: Goal,
    method: str,
    robust: str,
    top: int,
    executor: Executor,
    file: Path | None,
    strict: bool,
    report: Progress,
    cutoff: float,
) -> SearchResult:
    """The best layouts of one question; those above `cutoff` need not be found."""
    started = time.perf_counter()
    fixed = question.fixed
    known = Evaluations.open(file, fingerprint(question.context, question.space, question.devices))
    rejected: Counter[str] = Counter()
    try:
        candidates = price(question, rejected, report)
    except LayoutError as error:
        raise LayoutError(str(nothing_divides(question, error))) from None
    score = Score(goal, candidates)
    score.count_impossible(rejected)
    wanted = max(top, ROBUST_POOL if robust else 0)
    found = evaluate(score, wanted, question.context, executor, known, report, cutoff)
    _count_rejected(rejected, goal, score, found)
    kept = int(np.isfinite(found.value).sum())
    numbers = found.number[: min(wanted, kept)]
    report("explain", 0, len(numbers))
    best = [explain(fixed, layout, strict=strict) for layout in candidates.layouts(numbers)]
    value = goal.value(goal.of(best)) if best else np.zeros(0)
    step_s = np.array([p.step_time_s for p in best])
    order = np.lexsort((step_s, value))[: int(np.isfinite(value).sum())].tolist()
    left = np.ones(len(score.bound), bool)
    left[found.number] = False
    unknown = np.inf if found.complete else float(score.bound[left].min(initial=np.inf))
    lower_bound = float(value[order].min(initial=unknown))
    bounds_s = candidates.bound_s
    lower_bound_s = float(step_s[order].min(initial=bounds_s[left].min(initial=np.inf)))
    ranked = [best[i] for i in order]
    values, bounds = value[order].tolist(), bounds_s[numbers[order]].astype(float).tolist()
    pool = candidates.layouts(found.number[: min(POOL, kept)]) if method != "enumerate" else []
    improved = improve(goal, method, len(found.number), ranked, pool, report)
    for improvement in improved.improvements:
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
    lower_bound = min([lower_bound, *values])
    impossible = None
    if not ranked and found.complete and cutoff == np.inf:
        report("explain", 0, 0)
        impossible = _why_not(question, goal, candidates, executor)
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
        bounds_s=tuple(bounds[i] for i in order),
        rejected=dict(rejected.most_common()),
        step_time_s=found.step_s,
        number=found.number,
        candidates=candidates,
        lower_bound_s=lower_bound_s,
        complete=found.complete,
        impossible=impossible,
        robust=robust,
        robustness=sure,
    )


def _count_rejected(rejected: Counter[str], goal: Goal, score: Score, found: Evaluated) -> None:
    """Add the possible layouts that are not ranked: evaluated in vain, or not at all."""
    failed = len(found.number) - int(np.isfinite(found.value).sum())
    if failed:
        rejected["does not satisfy the constraints"] += failed
    left = int(np.isfinite(score.bound).sum()) - len(found.number)
    if not left:
        return
    if not found.complete:
        rejected["not evaluated"] += left
    elif goal.plain:
        rejected["cannot be among the best: a lower bound on their time is longer"] += left
    else:
        rejected["cannot be among the best: the objective is worse even at a lower bound on their time"] += left


def _why_not(question: Question, goal: Goal, candidates: Candidates, executor: Executor) -> Impossible:
    """Why no layout is possible, and what would change that."""
    if not candidates.feasible:
        return nothing_fits(question, candidates)

    def best(asked: Question, wanted: Goal) -> tuple[float, str] | None:
        found = fastest(asked, wanted, executor)
        return found and (found.value, str(found.layout))

    return nothing_satisfies(question, goal, best)


@dataclass(frozen=True)
class Found:
    """The best layout of a question."""

    layout: Layout
    value: float
    """Of the objective, as it is minimised."""
    step_time_s: float


def fastest(question: Question, goal: Goal, executor: Executor | None = None) -> Found | None:
    """The best layout alone, exactly but unexplained; None where none fits and satisfies the constraints.

    Raises:
        LayoutError: no layout is possible at all.
    """
    priced = price(question, Counter())
    score = Score(replace(goal, fixed=question.fixed), priced)
    found = evaluate(score, 1, question.context, executor or Here(), Evaluations(), lambda *_: None)
    if not len(found.value) or not np.isfinite(found.value[0]):
        return None
    return Found(priced.layouts(found.number[:1])[0], float(found.value[0]), float(found.step_s[0]))


def quantities_of(goal: Goal, prediction: Prediction) -> dict[str, float]:
    """What objective and constraints name of a layout, and its money and energy where the tariff tells them."""
    names = set(goal.objective.formula.names).union(*(constraint.names for constraint in goal.constraints))
    tariff = goal.tariff
    names |= {"cost"} if tariff.price_per_device_hour is not None else set()
    names |= {"energy_j"} if tariff.power_w is not None and tariff.idle_power_w is not None else set()
    names |= {"train_time_s"} if tariff.tokens is not None else set()
    quantity = goal.of([prediction])
    return {name: float(np.ravel(quantity(name).lo)[0]) for name in sorted(names)}
