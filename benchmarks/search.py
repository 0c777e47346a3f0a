"""Searching layouts: pricing the whole space, exact evaluation with structures cached, and whole
searches."""

import time
from collections import Counter

import numpy as np
from timing import best_cpu_s, best_s

from perfmodel import catalog
from perfmodel.planning.layouts import (
    Candidates,
    SearchSpace,
    default_space,
    enumerate_grids,
    gather,
    search,
    with_options,
    with_schedules,
)
from perfmodel.prediction import (
    StepProblem,
    durations,
    evaluate,
    layout_batches,
    prepared,
    step_problem,
)
from perfmodel.prediction.grids import price_grids
from perfmodel.spec import Job, Model, Problem
from perfmodel.timeline import ProgramBatch, makespan_many

MODEL = catalog.model("gpt3-175b")
CLUSTER = catalog.cluster("dgx-a100")
JOB = Job(global_batch=1536, seq_len=2048)
EVALUATED = 20_000
SINGLY = 200


def problem_on(devices: int) -> Problem:
    """The job on so many devices."""
    return Problem(model=MODEL, cluster=CLUSTER, job=JOB, devices=devices)


def whole_space(devices: int) -> SearchSpace:
    """Every schedule and every option."""
    return with_options(
        with_schedules(default_space(problem_on(devices)), "all"),
        "all",
        CLUSTER,
    )


def priced(problem: StepProblem, space: SearchSpace, devices: int) -> tuple[Candidates, float]:
    """Price all layouts with memory and bound; also returns the seconds that this took."""
    start = time.perf_counter()
    grids = enumerate_grids(space, problem_on(devices), Counter())
    candidates = gather(price_grids(problem, list(grids)), CLUSTER.device.memory_bytes, Counter())
    return candidates, time.perf_counter() - start


def exact_evaluations(
    model: Model, devices: int, global_batch: int
) -> dict[str, dict[str, object]]:
    """Layouts of the default space that fit, a random part of them, all evaluated in one call and
    one by one."""
    job = Job(global_batch=global_batch, seq_len=2048)
    problem = step_problem(model, CLUSTER, job)
    question = Problem(model=model, cluster=CLUSTER, job=job, devices=devices)
    grids = enumerate_grids(default_space(question), question, Counter())
    candidates = gather(price_grids(problem, list(grids)), CLUSTER.device.memory_bytes, Counter())
    layouts = candidates.layouts(sample(candidates, EVALUATED))
    singly = layouts[:: len(layouts) // SINGLY][:SINGLY]
    together_s = best_s(lambda: evaluate(problem, layouts), 4) / len(layouts)
    singly_s = best_s(lambda: [evaluate(problem, [layout]) for layout in singly], 2) / len(singly)

    # The loops over ops alone: what an evaluation cannot do without.
    batches = layout_batches(problem, layouts)
    batch = ProgramBatch(tuple(prepared(of_program.spec).compiled for of_program in batches))
    seconds = [durations(problem, of_program) for of_program in batches]
    makespan_many(batch, seconds)
    cpu_s = best_cpu_s(lambda: evaluate(problem, layouts), 4) / len(layouts)
    loops_s = best_cpu_s(lambda: makespan_many(batch, seconds), 4) / len(layouts)
    ops_of_programs = [
        len(of_program.lanes) * prepared(of_program.spec).structure.duration.size
        for of_program in batches
    ]
    ops = sum(ops_of_programs) / len(layouts)
    return {
        f"exact_evaluations_per_s_{model.name}_{devices}_devices": {
            "ratio": 1 / together_s,
            "unit": "layouts/s",
            "target": 5e4,
            "baseline": f"{len(layouts):,} layouts, {len(batches):,} cached programs of {ops:,.0f} ops on average",
        },
        f"together_over_singly_{model.name}_{devices}_devices": {
            "ratio": singly_s / together_s,
            "unit": "x",
            "baseline": "the same evaluated one after the other",
        },
        f"exact_evaluation_over_its_loops_{model.name}_{devices}_devices": {
            "ratio": cpu_s / loops_s,
            "unit": "x",
            "baseline": "the loops over ops alone, processor time",
            "cpu_seconds": cpu_s,
            "loops_cpu_seconds": loops_s,
        },
    }


def sample(candidates: Candidates, count: int) -> np.ndarray:
    """Numbers of layouts that fit."""
    # What does not fit has an infinite bound.
    fits = np.flatnonzero(np.isfinite(candidates.bound_s))
    return np.sort(np.random.default_rng(0).choice(fits, min(count, len(fits)), replace=False))


def run() -> dict[str, dict[str, object]]:
    """Rates of pricing and of exact evaluation, and seconds of whole searches."""
    space = whole_space(1024)
    priced(step_problem(MODEL, CLUSTER, JOB), space, 1024)  # pipelines into the cache
    _, seconds = priced(step_problem(MODEL, CLUSTER, JOB), space, 1024)
    everything = sum(grid.size for grid in enumerate_grids(space, problem_on(1024), Counter()))
    results: dict[str, dict[str, object]] = {
        "layouts_priced_per_s": {
            "ratio": everything / seconds,
            "unit": "layouts/s",
            "target": 1e6,
            "baseline": f"{everything:,} layouts of GPT-3 175B on 1,024 devices, memory and bound of each",
        }
    }
    for model, devices, batch in (("gpt3-13b", 128, 512), (MODEL.name, 1024, JOB.global_batch)):
        results |= exact_evaluations(catalog.model(model), devices, batch)
    for devices, target_s in ((1024, 3.0), (16384, 20.0)):
        space = whole_space(devices)
        # the first compiles
        searches = [
            search(MODEL, CLUSTER, devices=devices, global_batch=1536, space=space)
            for _ in range(3)
        ]
        fastest = min(searches, key=lambda result: result.seconds)
        results[f"search_gpt3_{devices}_devices"] = {
            "ratio": fastest.seconds,
            "unit": "s",
            "target": target_s,
            "baseline": f"every schedule and option; {fastest.certificate}, {fastest.evaluated:,} evaluated",
        }
    return results
