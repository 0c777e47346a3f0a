"""A cluster calibrated for one model: its events measured in the order in which the step time asks for them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibration._active import BATCH, Progress, Selection, select
from perfmodel.calibration._model_plan import ModelPlan
from perfmodel.calibration._steps import LayoutSteps
from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure import Plan, recorded_s, run_plan, write_plan
from perfmodel.ops import Op
from perfmodel.prediction import StepProblem, priced_events

Run = Callable[[Plan, Path], Any]
"""Measures a plan into tables of a folder, as `run_plan` does."""


def run_apart(plan: Plan, folder: Path) -> None:
    """`run_plan` in a process of its own, since kernels are pinned to a core before JAX starts.

    Raises:
        CalibrationError: with what `run_plan` refused.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        if problem := pool.submit(_run, plan, folder).result():
            raise CalibrationError(problem)


def _run(plan: Plan, folder: Path) -> str:
    try:
        run_plan(plan, folder)
    except PerfModelError as error:
        return str(error)
    return ""


def calibrate_model(
    wanted: ModelPlan,
    folder: Path | str,
    *,
    target_half_width: float = 0.05,
    budget: int | None = None,
    batch: int = BATCH,
    run: Run = run_apart,
    progress: Progress = lambda state: None,
) -> Selection:
    """Measure as many of a model plan's events as its layouts' step times need.

    Tables and cards are written to `folder` after every batch, with `plan.toml`, what was chosen so far. Started
    again, it goes on from the rows there; `perfmodel fit` makes a calibration of the tables.

    Args:
        wanted: from `model_plan`; its calibration prices events before they are measured.
        target_half_width: half-width of every layout's 90 % interval, as a share of the step time, at which to stop.
        budget: measurements at most.
        run: what measures a plan.
        progress: called after every batch.

    Raises:
        CalibrationError: if a measurement fails.
        PerfModelError: if nothing can be measured, or for a target or budget that makes no sense.
    """
    folder, plan = Path(folder), wanted.plan
    steps = LayoutSteps(
        wanted.step_problem, tuple(cost.layout for cost in wanted.layouts), frozenset(wanted.unmeasured)
    )
    chosen = recorded_s(plan, folder)

    def measure(ops: Sequence[Op]) -> Mapping[Op, float]:
        chosen.update(dict.fromkeys(ops, 0.0))
        part = of_plan(plan, chosen)
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(folder / "plan.toml", part)
        run(part, folder)
        return recorded_s(part, folder)

    return select(
        steps, [*plan.kernels, *plan.collectives], measure, base=_base(wanted.step_problem),
        device=wanted.step_problem.cluster.device, target_half_width=target_half_width, budget=budget, batch=batch,
        measured=chosen.copy(), progress=progress,
    )  # fmt: skip


def of_plan(plan: Plan, ops: Mapping[Op, float]) -> Plan:
    """The part of a plan that measures `ops`."""
    kernels = tuple(op for op in plan.kernels if op in ops)
    return replace(plan, kernels=kernels, collectives=tuple(op for op in plan.collectives if op in ops))


def _base(problem: StepProblem) -> Callable[[Sequence[Op]], np.ndarray]:
    """The present calibration's prices."""
    return lambda ops: np.maximum(priced_events(problem, ops).time_s, 1e-9)
