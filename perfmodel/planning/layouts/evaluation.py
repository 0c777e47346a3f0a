"""Evaluates every layout that could still be among the best, most promising first; results are kept
on disk, so that an interrupted search can be continued."""

import hashlib
import io
import zipfile
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from perfmodel import prediction
from perfmodel.display import Report, shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_bytes
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._executor import HERE, Executor
from perfmodel.planning.layouts._objective import Goal, Score
from perfmodel.planning.layouts._pricing import price
from perfmodel.planning.layouts.questions import Context, Question, model_of
from perfmodel.spec import Layout


def fingerprint(*what: object) -> str:
    """A hash of the search and of the package's version."""
    return hashlib.sha256(repr((version("perfmodel"), *what)).encode()).hexdigest()


@dataclass
class Evaluations:
    """Known step times by layout number."""

    path: Path | None = None
    """File that the step times are kept in, if any."""
    search: str = ""
    """`fingerprint` of the search."""
    step_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, search: str) -> "Evaluations":
        """Read the results of an earlier run from `path`; empty if the file is new.

        Raises:
            PerfModelError: the file is of another search, or none of ours.
        """
        if path is None or not path.exists():
            return cls(path, search)
        try:
            # `np.load` does not unpickle by default, so that a stranger's file can do no harm.
            with np.load(path) as file:
                same_search = str(file["search"]) == search
                known = dict(zip(file["number"].tolist(), file["step_s"].tolist(), strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise PerfModelError(
                f"{path} is not the saved state of a search; name another file"
            ) from None
        if not same_search:
            raise PerfModelError(
                f"{path} is the saved state of another search (model, cluster, batch, space or version differ); "
                "name another file"
            )
        return cls(path, search, known)

    def save(self) -> None:
        """Write the file, if there is one, atomically."""
        if self.path is None:
            return
        buffer = io.BytesIO()
        number = np.array(list(self.step_s), np.int64)
        step_s = np.array(list(self.step_s.values()), np.float64)
        np.savez(buffer, search=np.array(self.search), number=number, step_s=step_s)
        write_bytes(self.path, buffer.getvalue())


FIRST_BATCH = 64
"""Layouts evaluated before a bound can rule any out; more if more results are wanted."""
BATCH = 256
NEAR = 8
"""Variants are checked for this many times `BATCH` layouts with the lowest bounds at once."""
PART = 1024
"""Number of layouts in a block with a common lower bound."""
_NEVER = (np.inf, np.inf)
SHARES = 4
"""Parts of a batch for each worker, so that a slow one does not hold up the others."""


@dataclass(frozen=True)
class StepTimes:
    """Where the step times of a question's layouts come from."""

    context: Context
    """What they depend on besides the layout."""
    executor: Executor
    """Evaluates those that are not known yet."""
    known: Evaluations = field(default_factory=Evaluations)
    """Those that are known; new ones are added."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Evaluated layouts in the order of the goal, and the layouts that they ruled out."""

    number: Int[np.ndarray, " evaluated"]
    """Layouts evaluated, the best first."""
    step_s: Float[np.ndarray, " evaluated"]
    value: Float[np.ndarray, " evaluated"]
    """Values of the goal, ascending; infinite where a constraint does not hold."""
    distinct: Int[np.ndarray, " kept"]
    """Places of the layouts that do not repeat a better one (`Candidates.distinct`)."""
    dominated: Int[np.ndarray, " dominated"]
    """Layouts that only a variant rules out, not their bound (`Candidates.dominated`)."""
    complete: bool
    """Whether bounds rule out every layout that was not evaluated; False after an interrupt."""

    @property
    def satisfying(self) -> int:
        """Number of layouts that satisfy the constraints: the first ones, since the values of all
        others are infinite."""
        return int(np.isfinite(self.value).sum())

    @property
    def distinct_satisfying(self) -> Int[np.ndarray, " some"]:
        """Places of the layouts that satisfy the constraints and do not repeat a better one."""
        return self.distinct[self.distinct < self.satisfying]


def evaluate(
    score: Score,
    top: int,
    step_times: StepTimes,
    report: Report,
    cutoff: float = np.inf,
    distinct: bool = False,
    prune: bool = False,
) -> Evaluated:
    """Evaluate layouts in the order of their bounds until none of the rest can be among the best
    `top` (optionally `distinct` ones), or below `cutoff`.

    An interrupt (Ctrl-C) ends it with what is known by then.

    Args:
        prune: leave out layouts that a variant rules out (`Candidates.dominated`); only where the
            goal is the step time alone.
    """
    prune = prune and score.goal.plain
    candidates, bound, known = score.candidates, score.bound, step_times.known

    # Nothing is ruled out before at least `top` layouts have a value.
    at_first = min(max(FIRST_BATCH, top), int(np.isfinite(bound).sum()))
    evaluated: dict[int, tuple[float, float]] = {}
    dominated: list[Int[np.ndarray, " dominated"]] = []

    def promising(numbers: Int[np.ndarray, " some"]) -> Int[np.ndarray, " rest"]:
        """Drop layouts that a better variant rules out, and record them."""
        if not prune:
            return numbers
        lost = candidates.dominated(numbers)
        dominated.append(numbers[lost])
        return numbers[~lost]

    numbers = promising(_lowest(bound, at_first))
    complete = not at_first
    try:
        while not complete:
            evaluate_some(candidates, numbers, step_times)
            evaluated |= _valued(score, numbers, known)
            ranked = _ranked(candidates, evaluated, distinct)

            # A bound is never above the value, so a layout whose bound is worse than the value and
            # step time of the last wanted layout cannot displace it.
            worst_kept = _NEVER
            if len(ranked.distinct) >= top:
                last_wanted = ranked.distinct[top - 1]
                worst_kept = evaluated[int(ranked.number[last_wanted])]
            remaining = score.below(*min(worst_kept, (cutoff, np.inf)))
            settled = np.concatenate([np.array(list(evaluated), np.int64), *dominated])
            remaining = remaining[~np.isin(remaining, settled)]
            complete = not len(remaining)
            report("evaluate", len(evaluated), len(evaluated) + len(remaining))

            numbers = promising(_nearest(score, remaining))[:BATCH]
    except KeyboardInterrupt:
        # Workers may have returned some step times of the interrupted batch.
        evaluated |= _valued(score, np.array(list(known.step_s), np.int64), known)
    return replace(
        _ranked(candidates, evaluated, distinct),
        complete=complete,
        dominated=np.concatenate([np.zeros(0, np.int64), *dominated]),
    )


@dataclass(frozen=True)
class BestLayout:
    """The best layout of a question."""

    layout: Layout
    value: float
    """Value of the objective, as it is minimised."""
    step_time_s: float


def fastest(question: Question, goal: Goal, executor: Executor = HERE) -> BestLayout | None:
    """Find only the best layout, unexplained; None if none fits and meets the constraints.

    Raises:
        LayoutError: no layout is possible at all.
    """
    priced = price(question, Counter())
    score = Score(replace(goal, step_problem=question.step_problem), priced)
    evaluated = evaluate(score, 1, StepTimes(question.context, executor), lambda *_: None)
    if not len(evaluated.value) or not np.isfinite(evaluated.value[0]):
        return None
    return BestLayout(
        priced.layouts(evaluated.number[:1])[0],
        float(evaluated.value[0]),
        float(evaluated.step_s[0]),
    )


def _ranked(
    candidates: Candidates, evaluated: dict[int, tuple[float, float]], distinct: bool
) -> Evaluated:
    """Rank layouts whose value and step time are known, by number of the layout."""
    number = np.array(sorted(evaluated), np.int64)
    value, step_s = np.array([evaluated[n] for n in number.tolist()]).reshape(-1, 2).T

    # By value, then step time, then memory: among ties the layout that needs less comes first.
    order = np.lexsort((candidates.peak_bytes(number), step_s, value))
    number, step_s, value = number[order], step_s[order], value[order]
    distinct_places = np.arange(len(number))
    if distinct:
        distinct_places = candidates.distinct(
            number, list(zip(value.tolist(), step_s.tolist(), strict=True))
        )
    return Evaluated(number, step_s, value, distinct_places, np.zeros(0, np.int64), complete=False)


def _valued(
    score: Score, numbers: Int[np.ndarray, " some"], known: Evaluations
) -> dict[int, tuple[float, float]]:
    """Value and step time of layouts that were evaluated."""
    step_s = np.array([known.step_s[number] for number in numbers.tolist()])
    value = score.value(numbers, step_s)
    value_and_step = zip(value.tolist(), step_s.tolist(), strict=True)
    return dict(zip(numbers.tolist(), value_and_step, strict=True))


def _nearest(score: Score, numbers: Int[np.ndarray, " some"]) -> Int[np.ndarray, " nearest"]:
    """The layouts with the lowest bounds in their order, and among equal ones those with the
    shortest steps; of many only the first `NEAR` batches."""
    # Among millions of layouts only the nearest are sorted.
    bound = score.bound[numbers]
    if len(numbers) > NEAR * BATCH:
        nearest = np.argpartition(bound, NEAR * BATCH)[: NEAR * BATCH]
        numbers, bound = numbers[nearest], bound[nearest]
    return numbers[np.lexsort((numbers, score.candidates.bound_s[numbers], bound))]


def _lowest(bound: Float[np.ndarray, " layouts"], count: int) -> Int[np.ndarray, " count"]:
    """Numbers of the layouts with the lowest bounds, in their order."""
    if not count:
        return np.zeros(0, np.int64)
    # Sort only the layouts that can be among the `count` lowest. Each part's least bound belongs to
    # one layout, so that the `count`-th lowest of the parts' minima is at or above the `count`-th
    # lowest bound of all.
    least_of_parts = bound
    if len(bound) > PART * count:
        least_of_parts = np.minimum.reduceat(bound, np.arange(0, len(bound), PART))
    highest = np.partition(least_of_parts, count - 1)[count - 1]
    low_enough = np.flatnonzero(bound <= highest)
    return low_enough[np.argsort(bound[low_enough], kind="stable")][:count]


def evaluate_some(
    candidates: Candidates, numbers: Int[np.ndarray, " some"], step_times: StepTimes
) -> None:
    """Evaluate some layouts and store their step times."""
    executor, known = step_times.executor, step_times.known
    # A resumed search does not evaluate known layouts again. New results are saved at once, because
    # an interrupt may follow.
    numbers = np.array([n for n in numbers.tolist() if n not in known.step_s], np.int64)
    if not len(numbers):
        return
    layouts = candidates.layouts(numbers)
    shares = _shares(layouts, executor.workers)
    layouts_of_shares = [list(map(layouts.__getitem__, share)) for share in shares]
    results = executor.map(partial(_step_s, step_times.context), layouts_of_shares)
    for share, result in zip(shares, results, strict=True):
        known.step_s.update(zip(numbers[share].tolist(), result, strict=True))
    known.save()


def _shares(layouts: Sequence[Layout], workers: int) -> list[list[int]]:
    """Divide layouts among workers so that those of one program stay together; the result does not
    depend on the number of workers."""
    if workers == 1:
        return [list(range(len(layouts)))]

    # Layouts with the same schedule, chunks, ranks and number of micro-batches run the same
    # program, which is compiled once per process.
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, layout in enumerate(layouts):
        groups[layout.schedule, layout.vpp, layout.pp, layout.micro_batch * layout.dp].append(i)
    shares: list[list[int]] = [[] for _ in range(min(SHARES * workers, len(groups)))]

    # The longest group first, to the share with the least so far (longest processing time first).
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [sorted(share) for share in shares]


def _step_s(context: Context, layouts: Sequence[Layout]) -> list[float]:
    """Step times of some layouts; a worker keeps the problem from one call to the next."""
    return prediction.evaluate(model_of(context), layouts).step_time_s.tolist()


shorten_reprs(__name__)
