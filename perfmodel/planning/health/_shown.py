"""Causes that a log itself shows: stalls, drift, skipped steps, slow loaders, other options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import PhaseTimer
from perfmodel.planning.health._causes import (
    CHECKPOINTS,
    DATA_LOADING,
    EVALUATIONS,
    PERIODIC_STALLS,
    SKIPPED_STEPS,
    SLOWS_DOWN,
)
from perfmodel.planning.health._contradictions import WhatRan
from perfmodel.planning.health._series import Stalls, StepSeries
from perfmodel.planning.what_if import Scenario, step_s
from perfmodel.prediction import Prediction, StepProblem
from perfmodel.units import duration

_SKIPPED: Final = 0.02
"""Share of steps from which skipped updates are a cause."""
_DATA_TIMER_SHARE: Final = 0.03
"""Share of the step from which a timer of the data loader is a cause by itself."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A possible reason why the run is slow."""

    name: str
    title: str
    explains_s: float
    """Seconds of the mean step that it would explain."""
    probability: float
    """Probability of the cause; 1 if the log itself shows it."""
    evidence: str
    """Observations that speak for the cause."""
    remedy: str


class _StallCause(NamedTuple):
    """The cause behind stalls of one kind."""

    name: str
    title: str
    remedy: str


_STALL_CAUSES: Final[Mapping[str, _StallCause]] = {
    "checkpoint": _StallCause(
        name=CHECKPOINTS,
        title="checkpoints stop the training",
        remedy="save less often, or asynchronously",
    ),
    "evaluation": _StallCause(
        name=EVALUATIONS,
        title="evaluations stop the training",
        remedy="evaluate less often, or on fewer batches",
    ),
    "periodic": _StallCause(
        name=PERIODIC_STALLS,
        title="the job stalls at regular steps, as when a data loader runs dry",
        remedy="use more loader workers and prefetch; if checkpoints are written at these steps, save asynchronously",
    ),
    "irregular": _StallCause(
        name="irregular_stalls",
        title="the job stalls irregularly, as with slow storage or a busy network",
        remedy="check storage, data loader and other users of the cluster at the times of the stalls",
    ),
}
"""Causes by kind of stall (`Stalls.kind`)."""


def shown_causes(
    series: StepSeries,
    log_format: str,
    timers: Mapping[str, PhaseTimer],
    expected: Prediction,
    options: Sequence[Cause],
) -> list[Cause]:
    """Return the causes that the log itself shows: stalls, options that differ, drift, skipped
    steps, slow loaders."""
    causes = [_stall_cause(stalls) for stalls in series.stalls]
    causes += options
    drift = series.drift
    if drift is not None and drift.change > 0:
        description = "little by little" if drift.kind == "trend" else f"at step {drift.at_step:,}"
        causes.append(
            Cause(
                name=SLOWS_DOWN,
                title=f"steps become {drift.change:.1%} slower over the run, {description}",
                explains_s=series.drift_s,
                probability=1.0,
                evidence="seen in the step times",
                remedy="monitor clocks, temperatures, host and device memory, and other jobs on the network",
            )
        )

    # A step whose gradients overflow takes its time and trains nothing.
    steps = float(series.covered.sum()) + series.warm_up_steps
    if series.skipped_steps > _SKIPPED * steps:
        causes.append(
            Cause(
                name=SKIPPED_STEPS,
                title=f"{series.skipped_steps} of {steps:.0f} steps were skipped because gradients overflowed",
                explains_s=series.usual_s * series.skipped_steps / steps,
                probability=1.0,
                evidence="reported by the log",
                remedy="lower the initial loss scale, or train in bf16",
            )
        )

    # The loader's own timer is sufficient proof, even if the reason is unknown.
    data = timers.get("data")
    if data is not None and data.most_s > _DATA_TIMER_SHARE * expected.step_time_s:
        title = "steps wait for their data"
        evidence = f"the slowest rank's loader takes {duration(data.most_s)} of each step"
        if log_format == "deepspeed":
            title = "each step waits before its forward pass, as it would for data"
            evidence = f"{duration(data.most_s)} of each step pass outside of forward pass, backward pass and update"
        causes.append(
            Cause(
                name=DATA_LOADING,
                title=title,
                explains_s=data.most_s,
                probability=1.0,
                evidence=evidence,
                remedy="use more loader workers, prefetch, and data on local disks",
            )
        )
    return causes


def _stall_cause(stalls: Stalls) -> Cause:
    """The cause of stalls, which the log shows and which is therefore certain."""
    cause = _STALL_CAUSES[stalls.kind]
    period_text = f", every {stalls.every:,} steps" if stalls.every else ""
    times = "once" if stalls.count == 1 else f"{stalls.count} times"
    return Cause(
        name=cause.name,
        title=cause.title,
        explains_s=stalls.seconds_per_step,
        probability=1.0,
        evidence=f"{times}{period_text}, {duration(stalls.seconds_each)} each",
        remedy=cause.remedy,
    )


_OPTION_CAUSES: Final[Mapping[str, str]] = {
    "overlap_grad_reduce": "overlap_off",
    "overlap_param_gather": "overlap_off",
    "tp_overlap": "tp_overlap_off",
    "recompute": "full_recompute",
}


def option_causes(problem: StepProblem, job: WhatRan, expected: Prediction) -> list[Cause]:
    """Causes from options whose values differ between log and script, with their total cost."""
    if not job.options:
        return []
    try:
        gain_s = step_s(problem, job.ran, Scenario()) - expected.step_time_s
    except PerfModelError:
        return []
    if gain_s <= 0:
        return []

    # Options interact, so that only what they cost together is known; it stands under the first.
    first = next(iter(job.options))
    evidence = "; ".join(
        contradiction.sentence for contradiction in job.contradictions if contradiction.is_option
    )
    return [
        Cause(
            name=_OPTION_CAUSES.get(first, first),
            title="the run's options differ from the script's",
            explains_s=gain_s,
            probability=1.0,
            evidence=evidence,
            remedy="make the script's flags reach the run: a later flag or a default of the launcher overrides them",
        )
    ]
