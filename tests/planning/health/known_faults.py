"""Faults that layouts can have, and the step under each severity, kept in `known_faults.csv`.

Prices are constant rates of kernels, and of links their latency and bandwidth, so that new weights
move nothing. A change that is meant to move answers is followed by

    PYTHONPATH=tests python tests/planning/health/known_faults.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from constant_rates import SITE, Links, Rates
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.planning.health._causes import faults
from perfmodel.prediction import EAGER, StepProblem, evaluate, step_problem
from perfmodel.spec import Job, Layout, Transformer

TABLE = Path(__file__).with_suffix(".csv")
LAYOUTS = {
    "one device": Layout(recompute="selective"),
    "one node": Layout(dp=8, zero=1),
    "stages": Layout(
        tp=2,
        pp=4,
        dp=2,
        zero=1,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        tp_overlap=True,
    ),
    "replicated stages": Layout(tp=2, pp=4, dp=2, schedule="chimera"),
}
SMALL_BATCH = 16


def problem(cluster: str = "dgx-a100", **changes: bool) -> StepProblem:
    """A step at constant rates."""
    model = catalog.model("gpt3-1.3b")
    assert isinstance(model, Transformer)
    job = Job(global_batch=32, seq_len=1024).replace(**changes)
    priced = step_problem(
        replace(model, layers=4), catalog.cluster(cluster), job, None, EAGER, site=SITE
    )
    return priced.repriced(Rates(), Links())


def figures(
    problem: StepProblem,
    layout: Layout,
    *,
    has_timers: bool = False,
    small_batch: int | None = None,
) -> dict[str, float]:
    """Every fault with its severities, relative to the step without a fault."""
    (step_s,) = evaluate(problem, [layout]).step_time_s.tolist()
    figures = {"step": step_s}
    for place, fault in enumerate(
        faults(problem, layout, step_s, has_timers=has_timers, small_batch=small_batch)
    ):
        name = f"{place}.{fault.name}"
        figures |= {f"{name}.prior": fault.prior, f"{name}.later": float(fault.may_begin_later)}
        for degree, severity in enumerate(fault.severities):
            figures |= {
                f"{name}.{degree}.weight": severity.weight,
                f"{name}.{degree}.step": severity.step_s / step_s,
                f"{name}.{degree}.sync": (severity.gradient_sync_s or 0.0) / step_s,
                f"{name}.{degree}.small": (severity.small_batch_s or 0.0) / step_s,
                f"{name}.{degree}.passes": (severity.passes_s or 0.0) / step_s,
                f"{name}.{degree}.clock": severity.clock_share,
                f"{name}.{degree}.peak": sum((severity.peak_bytes or {}).values()),
            }
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """Every layout by its steps alone, one with timers and a growing batch too; then other settings
    of the job, and a device without a power law."""
    for name, layout in LAYOUTS.items():
        yield StoredCase(name, name, figures(problem(), layout))
    several = LAYOUTS["stages"]
    yield StoredCase(
        "stages",
        "timers and a growing batch",
        figures(problem(), several, has_timers=True, small_batch=SMALL_BATCH),
    )
    yield StoredCase("v100", "v100", figures(problem("v100-100g", flash_attention=False), Layout()))
    blocking = problem(blocking_launches=True)
    yield StoredCase("one device", "blocking launches", figures(blocking, LAYOUTS["one device"]))


if __name__ == "__main__":
    write_cases(TABLE, cases())
