"""Search: the layouts of a problem, ranked; several global batches are ranked together."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.cost import PricesKernels
from perfmodel.display import Report, shows_progress
from perfmodel.errors import (
    PerfModelError,
    UnknownNameError,
)
from perfmodel.planning.layouts._answer import answer
from perfmodel.planning.layouts._executor import Executor, open_executor
from perfmodel.planning.layouts._objective import Goal
from perfmodel.planning.layouts._result import (
    SearchResult,
    best_of_batches,
)
from perfmodel.planning.layouts._space import Space
from perfmodel.planning.layouts._task import SearchTask
from perfmodel.planning.layouts.questions import Question, ask
from perfmodel.planning.layouts.search_words import (
    SEARCH_WORDS,
    SearchKeywords,
    SearchOptions,
    SpaceWords,
    apply_search_keywords,
    file_words,
)
from perfmodel.spec import Cluster, Framework, Job, Model, Problem


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

    Memory and a lower bound of the step time are worked out for every layout of the space at once;
    those whose bound does not rule them out are evaluated exactly. The bounds carry over to every
    objective and constraint (`Goal` says why). An interrupt (Ctrl-C) during evaluation returns the
    best layouts so far and the bounds that hold by then, with `complete=False`.

    Args:
        model, cluster: a problem, or catalog names, files or objects, or a job file, as in
            `predict`.
        space: layouts to try, or a function that returns the space of a problem; `default_space` if
            not given.
        options: the objective, and how the search works.
        calibration: as in `predict`.
        settings: changes of the machine, as `whatif` takes them (`"inter_node_bandwidth=2x"`).
        kernels: prices of kernels instead of the calibration's.
        progress: called with the name of each stage and how far it is.
        global_batch: sequences per step over all replicas; several are ranked together.
        seq_len, dtype, job, framework: as in `predict`.
        devices: number of devices to lay the model out on.
        fields: fields of the job, of the space (`SpaceWords`: `fix`, `schedules`, `vary`,
            `fewer_devices`), of `SearchOptions` and of `Tariff` by name. The last two override
            those of `options`.

    Raises:
        LayoutError: if no layout is possible at all (the message counts the reasons).
        UnknownNameError: for an unknown model, cluster, word, method, objective or quantity.
        PerfModelError: no devices, no layouts to rank or no batch; an invalid formula; a price that
            is not known; a `resume` file of another search; no Dask, or no scheduler at the
            address.
    """
    optional: dict[str, Any] = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "devices": devices,
        "job": job,
        "framework": framework,
    }
    stated = {name: value for name, value in optional.items() if value is not None} | {**fields}
    file = catalog.unfiled(model)
    if file is not None:
        stated = _completed(stated, file_words(file), space)
    options, space, of_problem = apply_search_keywords(_by_batches(stated), options, space)
    _require_known(of_problem)

    # Several global batches are as many independent questions.
    model_or_file: Any = file or model
    problem = catalog.problem(model_or_file, cluster, **of_problem)
    problems = [problem.replace(global_batch=batch) for batch in options.batches] or [problem]
    questions = []
    for batch_problem in problems:
        question = ask(
            batch_problem, space=space, calibration=calibration, settings=settings, kernels=kernels
        )
        questions.append(question)
    several = bool(options.batches)
    if several and options.robust:
        raise PerfModelError(
            "search: --robust orders layouts of one global batch; give a single --global-batch, or leave --robust out"
        )

    # Step times of different batches do not compare: a larger batch takes longer and does more.
    # Throughput does compare.
    objective = options.objective or ("tokens_per_s" if several else "step_time")
    tasks = []
    for question in questions:
        goal = Goal.parse(question.step_problem, objective, options.constraints, options.tariff)
        tasks.append(SearchTask(question, goal, options))
    with open_executor(options.workers, options.dask) as executor:
        results = _search_in_turn(tasks, executor, progress or (lambda *_: None))
    if not several:
        return results[0]
    tried = tuple(question.problem.job.global_batch for question in questions)
    return best_of_batches(results, tried, tasks[0].goal.objective, options.top)


def _completed(
    stated: dict[str, Any], of_file: Mapping[str, Any], space: Space | None
) -> dict[str, Any]:
    """The keywords that the caller states, completed by the [search] table of a job file; a space
    of the caller replaces the file's."""
    completed = dict(stated)
    for name, value in of_file.items():
        if name not in stated and (space is None or SEARCH_WORDS[name] is not SpaceWords):
            completed[name] = value
    return completed


def _by_batches(stated: dict[str, Any]) -> dict[str, Any]:
    """Keywords in which several global batches are those of the options, and the first stands for
    the problem.

    Raises:
        PerfModelError: no global batch in the list.
    """
    batches = stated.get("global_batch")
    if not isinstance(batches, Sequence):
        return stated
    if not batches:
        raise PerfModelError("search: no global batch is given; give at least one")
    return stated | {"batches": batches, "global_batch": batches[0]}


def _require_known(of_problem: Mapping[str, Any]) -> None:
    """Raise `UnknownNameError` for a keyword of neither the search nor the problem."""
    for name in of_problem:
        if name not in job_files.PROBLEM_WORDS:
            raise UnknownNameError(
                "argument of search", name, {*job_files.PROBLEM_WORDS, *SEARCH_WORDS}
            )


def _search_in_turn(
    tasks: Sequence[SearchTask], executor: Executor, report: Report
) -> list[SearchResult]:
    """Results of one question after another, up to an interrupt; always at least one result."""
    results: list[SearchResult] = []
    for task in tasks:
        # The results of earlier questions rule out layouts that cannot be among the best.
        reached = chain.from_iterable(result.values for result in results)
        values = sorted(task.goal.objective.display_value(value) for value in reached)
        top = task.options.top
        cutoff = values[top - 1] if len(values) >= top else np.inf
        file = _resume_file(task.question, task.options)
        try:
            results.append(answer(task, cutoff, executor, file, report))
        except KeyboardInterrupt:
            # An interrupt in the first question has nothing to return. A later interrupt returns
            # the results of the questions before.
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
