"""Measured runs, and their log errors with derivatives with respect to the parameters."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float

from perfmodel.display import Report
from perfmodel.errors import PerfModelError
from perfmodel.prediction import (
    EAGER,
    Site,
    StepProblem,
    layout_batches,
    prepared,
    step_derivatives,
    step_problem,
)
from perfmodel.prediction.composition import Prepared, layout_coordinates
from perfmodel.prediction.sites import Adjustment
from perfmodel.program import Kind, ProgramSpec
from perfmodel.spec import Cluster, Framework, Job, Layout, Model
from perfmodel.timeline import Timeline
from perfmodel.units import duration
from perfmodel.workload import step_flops


@dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration that was run and timed."""

    name: str
    model: Model
    cluster: Cluster
    job: Job
    layout: Layout
    measured_s: float
    """Seconds per step."""
    framework: Framework = EAGER
    site: Site = field(default_factory=Site)
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """Measured starts and ends of the ops in the layout's program, if a trace exists; the fit then
    also uses the times of each stage's passes, reductions and updates."""

    def __post_init__(self) -> None:
        if not 0 < self.measured_s < float("inf"):
            raise PerfModelError(
                f"run {self.name}: measured step time must be positive and finite, got {self.measured_s}"
            )


TOO_SLOW = 100.0
"""Multiple of the prediction above which a time is probably in another unit, if its thousandth is
plausible."""
PLAUSIBLE = 10.0
"""Largest factor between a plausible step and its prediction."""


def check_units(runs: Sequence[Run], predicted_s: np.ndarray) -> None:
    """Refuse runs whose step times cannot be in seconds per step.

    Raises:
        PerfModelError: naming the first such run: milliseconds, or shorter than its arithmetic at
            the peak rate.
    """
    for run, expected_s in zip(runs, predicted_s.tolist(), strict=True):
        # Shorter than its arithmetic at the peak rate is impossible: the batch or the unit is
        # wrong.
        least_s = arithmetic_s(run)
        if run.measured_s < least_s:
            raise PerfModelError(
                f"run {run.name}: a step of {duration(run.measured_s)} is shorter than the {duration(least_s)} that "
                f"its FLOPs take at the peak rate of {run.layout.devices:,} {run.cluster.device.name}; give "
                "the seconds of a whole global batch, and the model, batch and devices that ran"
            )
        # A slow step is a slow step; one that would be plausible as milliseconds is in the wrong
        # unit.
        in_ms = run.measured_s / 1000
        plausible = max(expected_s / PLAUSIBLE, least_s) <= in_ms <= expected_s * PLAUSIBLE
        if run.measured_s > TOO_SLOW * expected_s and plausible:
            raise PerfModelError(
                f"run {run.name}: a step of {duration(run.measured_s)} is {run.measured_s / expected_s:,.0f} times "
                f"the predicted {duration(expected_s)}, as if milliseconds were read as seconds; give seconds"
            )


def arithmetic_s(run: Run) -> float:
    """Model FLOPs of the step at the peak rate of all devices; fp32 may run as tf32."""
    dtypes = ("fp32", "tf32") if run.job.dtype == "fp32" else (run.job.dtype,)
    rate = max(run.cluster.device.peak.flops_per_s(dtype) for dtype in dtypes)
    return step_flops(run.model, run.job).total / run.layout.devices / rate


_LEAST_SHARE = 0.01
"""Least share of the measured step; classes with less are dominated by the resolution of the
clock."""


@dataclass(frozen=True, eq=False)
class _Traced:
    """Sums of op durations by kind and stage in one run's timeline."""

    counts: Float[np.ndarray, "sums classes"]
    """Ops of each class in each sum."""
    measured_s: Float[np.ndarray, " sums"]
    weight: Float[np.ndarray, " sums"]
    """Weight of each sum: the stages of a kind repeat one another and together count as one
    observation."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Runs of one step problem."""

    problem: StepProblem
    runs: tuple[int, ...]
    """Indices in the list of all runs."""


class Observations:
    """All runs of one device, ready for evaluation under any parameters."""

    def __init__(self, runs: Sequence[Run], base: Path | None) -> None:
        self.runs = tuple(runs)
        self.groups = tuple(_groups(runs, base))
        # Runs that brought a trace add observations of their events to that of their step time.
        self._traced: dict[int, _Traced] = {}
        for group in self.groups:
            programs = self._programs(group)
            for i in group.runs:
                timeline = runs[i].timeline
                if timeline is not None:
                    self._traced[i] = _traced(runs[i], timeline, prepared(programs[i]))
        # Observations: the step times of all runs first, then the sums of traced events by class.
        self.weight = np.concatenate(
            [np.ones(len(runs)), *(t.weight for t in self._traced.values())]
        )
        self.coordinates = self._coordinates()
        self._measured_s = np.array([run.measured_s for run in runs])

    def _programs(self, group: _Group) -> dict[int, ProgramSpec]:
        """The pipeline program of each run of a group."""
        # One call for all layouts of the problem, so that their events are priced together.
        batches = layout_batches(group.problem, [self.runs[i].layout for i in group.runs])
        programs: dict[int, ProgramSpec] = {}
        for batch in batches:
            programs |= {group.runs[lane]: batch.spec for lane in batch.lanes}
        return programs

    def _coordinates(self) -> Float[np.ndarray, "runs coordinates"]:
        coordinates = {}
        for group in self.groups:
            for i in group.runs:
                coordinates[i] = layout_coordinates(group.problem.setting, self.runs[i].layout)
        return np.array([coordinates[i] for i in range(len(self.runs))])

    def log_errors(self, adjustment: Adjustment) -> Float[np.ndarray, " observations"]:
        """log(predicted / measured) of each step, followed by the terms of timelines."""
        return self.log_errors_and_gradient(adjustment, ())[0]

    def log_errors_and_gradient(
        self, adjustment: Adjustment, names: Sequence[str], report: Report | None = None
    ) -> tuple[Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]]:
        """`log_errors` and their derivatives with respect to the named parameters."""
        n = len(self.runs)
        step_errors = np.zeros(n)
        step_gradients = np.zeros((n, len(names)))
        trace_errors: dict[int, np.ndarray] = {}
        trace_gradients: dict[int, np.ndarray] = {}
        for done, group in enumerate(self.groups):
            # All layouts of one problem share their events, so that one call evaluates them with
            # gradients.
            places = list(group.runs)
            layouts = [self.runs[place].layout for place in places]
            derivatives = step_derivatives(group.problem.adjusted(adjustment), layouts, names)
            step_errors[places] = np.log(derivatives.step_s / self._measured_s[places])
            step_gradients[places] = derivatives.by_parameter / derivatives.step_s[:, None]

            # A trace adds one observation for each sum of durations: log of predicted over
            # measured seconds.
            for lane, place in enumerate(places):
                traced = self._traced.get(place)
                if traced is None:
                    continue
                predicted_s = traced.counts @ derivatives.durations_s[lane]
                by_parameter = traced.counts @ derivatives.durations_by_parameter[lane].T
                trace_errors[place] = np.log(predicted_s / traced.measured_s)
                trace_gradients[place] = by_parameter / predicted_s[:, None]
            if report:
                report("runs", done, len(self.groups))

        # Traces follow the steps in the order of `weight`.
        errors = [step_errors, *(trace_errors[place] for place in self._traced)]
        gradients = [step_gradients, *(trace_gradients[place] for place in self._traced)]
        return np.concatenate(errors), np.concatenate(gradients)


def _groups(runs: Sequence[Run], base: Path | None) -> list[_Group]:
    """Runs that share a step problem, and that problem."""
    # Runs of the same model, cluster and job differ in layout only and share a step problem.
    by_model: dict[tuple, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        by_model[run.model, run.cluster, run.job, run.framework, run.site].append(i)
    groups = []
    for (model, cluster, job, framework, site), members in by_model.items():
        problem = step_problem(model, cluster, job, base, framework, site).adjusted(None)
        groups.append(_Group(problem, tuple(members)))
    return groups


def _traced(run: Run, timeline: Timeline, prepared: Prepared) -> _Traced:
    """Sum a measured timeline's durations by kind of op and stage."""
    predicted, structure = prepared.structure, timeline.structure
    columns = ("duration", "class_kind", "class_stage", "class_segment")
    if not all(
        np.array_equal(getattr(predicted, name), getattr(structure, name)) for name in columns
    ):
        raise PerfModelError(
            f"run {run.name}: its timeline does not belong to layout {run.layout.label} of {run.model.name}; make "
            "the structure with predict(..., timeline=True) and put the measured times into it"
        )
    n_classes = structure.n_classes
    measured_s = np.bincount(structure.duration, timeline.end_s - timeline.start_s, n_classes)
    count = np.bincount(structure.duration, minlength=n_classes)

    # Durations are added up by kind of op and stage. Classes that took no time tell nothing, and
    # sums that are short beside the step mostly tell of the clock.
    kinds = np.where(measured_s > 0, structure.class_kind, Kind.ZERO)
    stages = structure.class_stage
    counts: list[np.ndarray] = []
    sums_s: list[float] = []
    kind_of_sum: list[int] = []
    for kind, stage in sorted(set(zip(kinds.tolist(), stages.tolist(), strict=True))):
        members = (kinds == kind) & (stages == stage)
        sum_s = float(measured_s[members].sum())
        if kind != Kind.ZERO and sum_s >= _LEAST_SHARE * run.measured_s:
            counts.append(np.where(members, count, 0.0))
            sums_s.append(sum_s)
            kind_of_sum.append(kind)

    # The stages of a kind together count as one observation.
    stages_of_kind = Counter(kind_of_sum)
    weight = np.array([1.0 / stages_of_kind[kind] for kind in kind_of_sum])
    return _Traced(np.array(counts).reshape(-1, n_classes), np.array(sums_s), weight)
