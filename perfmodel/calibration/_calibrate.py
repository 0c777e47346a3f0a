"""Calibrates a cluster for one model by measuring its most important events first."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibration._active import BATCH, HALF_WIDTH, Progress, Selection, StepShares, select
from perfmodel.calibration._model_plan import ModelPlan
from perfmodel.calibration.beliefs import Beliefs
from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels
from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure import Plan, run_plan, write_plan
from perfmodel.measure.estimate import recorded_s
from perfmodel.ops import Op
from perfmodel.prediction import EventShares, StepProblem, event_shares, priced_events
from perfmodel.spec import Layout


@dataclass(frozen=True)
class Believed:
    """Prices of kernels or collectives from beliefs, except those that stay unchanged."""

    beliefs: Beliefs
    unchanged: PricesKernels | PricesCollectives
    """Prices of events that are not measured."""
    unmeasured: frozenset[Op] = frozenset()
    """Ops that `unchanged` prices."""

    def times(self, place: Any, ops: Sequence[Op]) -> EventTimes:
        """Expected times on the beliefs' device with their 90 % intervals."""
        # Events without a collector keep the calibration's price.
        believed = [i for i, op in enumerate(ops) if op not in self.unmeasured]
        unchanged = [i for i, op in enumerate(ops) if op in self.unmeasured]
        parts = []
        if believed:
            parts.append((believed, self._believed([ops[i] for i in believed])))
        if unchanged:
            unchanged_ops: Any = [ops[i] for i in unchanged]
            parts.append((unchanged, self.unchanged.times(place, unchanged_ops)))
        return EventTimes.together(len(ops), parts)

    def _believed(self, ops: Sequence[Op]) -> EventTimes:
        """Times of ops by the beliefs, with their intervals."""
        beliefs = self.beliefs
        log_time = beliefs.log_time(ops)
        half = HALF_WIDTH * np.sqrt(beliefs.variance(beliefs.locate(ops)))
        low, middle, high = np.exp([log_time - half, log_time, log_time + half])
        names = tuple("measured" if op in beliefs.measured else "learned" for op in ops)
        return EventTimes(middle, low, high, names)


@dataclass(frozen=True)
class LayoutSteps:
    """Steps of a model's layouts."""

    step_problem: StepProblem
    layouts: tuple[Layout, ...]
    unmeasured: frozenset[Op] = frozenset()
    """Events that keep the problem's predicted times."""

    def at(self, beliefs: Beliefs) -> StepShares:
        """Evaluate each layout with its events at their expected times."""
        kernels, collectives = self.step_problem.kernels, self.step_problem.collectives

        # Price the layouts at the believed times, and take each event's share of the critical
        # path.
        priced = self.step_problem.repriced(
            Believed(beliefs, kernels, self.unmeasured),
            Believed(beliefs, collectives, self.unmeasured),
        )
        shares_of_layouts = [event_shares(priced, layout) for layout in self.layouts]
        index: dict[Op, int] = {}
        for share in shares_of_layouts:
            for op in share.ops:
                if op not in self.unmeasured:
                    index.setdefault(op, len(index))

        # The part of each step's critical path that each event takes.
        shares = np.zeros((len(shares_of_layouts), len(index)))
        for row, share in zip(shares, shares_of_layouts, strict=True):
            for op, seconds in zip(share.ops, share.critical_s.tolist(), strict=True):
                if op in index:
                    row[index[op]] += seconds / share.step_time_s
        family_half_widths = np.array(
            [self._family_half_width(share) for share in shares_of_layouts]
        )
        step_time_s = np.array([share.step_time_s for share in shares_of_layouts])
        return StepShares(step_time_s, tuple(index), shares, family_half_widths)

    def _family_half_width(self, share: EventShares) -> float:
        """Half-width due to events at the problem's own prices, with errors common to a family."""
        indices = [i for i, op in enumerate(share.ops) if op in self.unmeasured]
        ops = [share.ops[i] for i in indices]
        if not ops:
            return 0.0
        times = priced_events(self.step_problem, ops)
        half = (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)
        # Errors within a family add up, those of different families are independent.
        families: dict[str, float] = {}
        for op, value in zip(ops, (share.critical_s[indices] * half).tolist(), strict=True):
            families[op.family] = families.get(op.family, 0.0) + value
        return float(np.sqrt(sum(v**2 for v in families.values())) / share.step_time_s)


Run = Callable[[Plan, Path], Any]
"""Measures a plan into tables of a folder, as `run_plan` does."""


def run_apart(plan: Plan, folder: Path) -> None:
    """Run `run_plan` in another process, as threads must be pinned before JAX starts.

    Raises:
        CalibrationError: with what `run_plan` refused.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        refused = pool.submit(_run, plan, folder).result()
    if refused:
        raise CalibrationError(refused)


def _run(plan: Plan, folder: Path) -> str:
    """Run a plan, and return the reason if it was refused, else an empty text."""
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
    """Measure only those events of a model plan that the step times of its layouts depend on.

    Tables and cards are written to `folder` after every batch, with the choices so far in
    `plan.toml`. A later call continues from the rows there. `perfmodel fit` makes a calibration
    from the tables.

    Args:
        wanted: the result of `model_plan`; its calibration prices events before they are measured.
        target_half_width: half-width of every layout's 90 % interval, as a share of the step time,
            at which to stop.
        budget: measurements at most.
        run: function that measures a plan.
        progress: called after every batch.

    Raises:
        CalibrationError: if a measurement fails.
        PerfModelError: if nothing can be measured, or for a target or budget that makes no sense.
    """
    folder = Path(folder)
    plan = wanted.plan
    steps = LayoutSteps(
        wanted.step_problem,
        tuple(cost.layout for cost in wanted.layouts),
        frozenset(wanted.unmeasured),
    )

    # Rows that an interrupted calibration left in the folder count as measured.
    chosen = recorded_s(plan, folder)

    def measure(ops: Sequence[Op]) -> Mapping[Op, float]:
        # The plan on disk is written before it is measured, so that a crash leaves a plan that
        # can be run.
        chosen.update(dict.fromkeys(ops, 0.0))
        part = of_plan(plan, chosen)
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(folder / "plan.toml", part)
        run(part, folder)
        return recorded_s(part, folder)

    return select(
        steps,
        [*plan.kernels, *plan.collectives],
        measure,
        base=_base(wanted.step_problem),
        device=wanted.step_problem.cluster.device,
        target_half_width=target_half_width,
        budget=budget,
        batch=batch,
        measured=chosen.copy(),
        progress=progress,
    )


def of_plan(plan: Plan, ops: Mapping[Op, float]) -> Plan:
    """The part of a plan that measures `ops`."""
    kernels = tuple(op for op in plan.kernels if op in ops)
    return replace(
        plan, kernels=kernels, collectives=tuple(op for op in plan.collectives if op in ops)
    )


def _base(problem: StepProblem) -> Callable[[Sequence[Op]], np.ndarray]:
    """The present calibration's prices."""
    return lambda ops: np.maximum(priced_events(problem, ops).time_s, 1e-9)
