"""Compares a run's log with its prediction and explains the difference."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import erf, exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from perfmodel.catalog import StatedLayout
from perfmodel.display import Report, health_html, health_page
from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import PhaseTimer, TrainingLog, read_log
from perfmodel.ingest.tables import write_text
from perfmodel.planning.health._causes import (
    CHECKPOINTS,
    DATA_LOADING,
    EVALUATIONS,
    PERIODIC_STALLS,
    SKIPPED_STEPS,
    SLOWS_DOWN,
    faults,
    sync_seconds,
    with_batch,
)
from perfmodel.planning.health._contradictions import WhatRan, flops_remark, what_ran
from perfmodel.planning.health._evidence import Observed, weigh
from perfmodel.planning.health._measurements import most_telling
from perfmodel.planning.health._series import Stalls, StepSeries, step_series
from perfmodel.planning.what_if import Scenario, step_s
from perfmodel.prediction import (
    GAUSS_90,
    Prediction,
    StepProblem,
    check_layout,
    explain,
    layout_of,
    step_problem_of,
)
from perfmodel.spec import Layout, Problem
from perfmodel.units import GIB, duration

NAMED_CAUSES: Final = 3
_UNUSUAL: Final = 0.9
"""Share of sites than which a run is slower, from which it is called unusual."""
_CERTAIN: Final = 0.8
_GOOD_PART: Final = 0.05
"""A run has a fault where a cause of this probability explains this share of the step."""
_LEAST_PROBABILITY: Final = 0.01
_WORTH_NAMING: Final = 0.01
"""Share of the step that a cause has to explain to be named."""
_SKIPPED: Final = 0.02
_FULL: Final = 0.95
"""Share of the device's memory from which the allocator has to look for room."""
_GOOD_SITE: Final = 1.2815515655446004
"""90 % quantile of the normal distribution: the best tenth of sites."""
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
    """1 where the log itself shows it."""
    evidence: str
    """Observations that speak for the cause."""
    remedy: str


@dataclass(frozen=True, kw_only=True)
class RunHealth:
    """A run compared with its prediction."""

    log: str
    """File of the log."""
    format: str
    """Format of the log."""
    prediction: Prediction
    """Prediction of the job that ran according to the log."""
    series: StepSeries = field(repr=False)
    """Step times of the log, without warm-up, and its stalls."""
    excess_share: float
    """Measured usual step over the predicted one, less 1."""
    slower_than: float
    """Share of known sites of this kind that are faster with this job, by the prediction's interval."""
    healthy: bool
    """True where the step is usual for known sites and no fault is certain."""
    fault: Cause | None
    """A cause that is certain and accounts for a large part of the step."""
    no_fault_probability: float
    """Probability that the run has no fault: that a step is this slow on a healthy site."""
    causes: tuple[Cause, ...]
    """Causes, the likeliest first, `NAMED_CAUSES` at most."""
    next_measurement: str
    """Measurement that distinguishes between the causes, or confirms the only one; empty without a cause."""
    typical_site_s: float
    """Step time on a typical site."""
    good_site_s: float
    """Step time on a site of the best tenth."""
    contradictions: tuple[str, ...]
    """Sentences on where the log contradicts the script."""
    remarks: tuple[str, ...]
    """Further facts of the log that an engineer should know."""
    peak_bytes: float | None
    """Peak of memory that the log reports; None where it reports none."""
    peak_counter: str
    """Bytes that the measured and the expected peak count: the bytes `reserved` by the allocator, or `allocated`."""
    expected_peak_bytes: float | None
    """Predicted peak, as the same counter shows it; None where it is not predicted."""
    timers: Mapping[str, PhaseTimer]
    """Phases of a step on the fastest and the slowest rank, where the log has timers."""

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        return _verdict(self)

    def __str__(self) -> str:
        from perfmodel.planning.health._text import health_text

        return health_text(self)

    def to_html(self) -> str:
        """Return the report as a self-contained page with a picture of the steps."""
        return health_page(self.log, self._repr_html_())

    def write(self, path: Path | str) -> None:
        """Write the page atomically."""
        write_text(path, self.to_html())

    def _repr_html_(self) -> str:
        return health_html(self.to_dict(), self.series.steps, self.series.seconds.tolist())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        series = self.series
        return {
            "log": self.log,
            "format": self.format,
            "verdict": self.verdict,
            "healthy": self.healthy,
            "measured": {
                "step_time_s": series.usual_s,
                "mean_step_time_s": series.mean_s,
                "steps": int(series.covered.sum()),
                "warm_up_steps": series.warm_up_steps,
                "warm_up_s": series.warm_up_s,
                "scatter": series.scatter,
                "skipped_steps": series.skipped_steps,
                "restarts": series.restarts,
                "peak_memory_bytes": self.peak_bytes,
            },
            "predicted": {
                "step_time_s": self.prediction.step_time_s,
                "step_time_lo_s": self.prediction.step_time_lo_s,
                "step_time_hi_s": self.prediction.step_time_hi_s,
                "peak_memory_bytes": self.expected_peak_bytes,
                "layout": self.prediction.layout_notation,
            },
            "excess_share": self.excess_share,
            "slower_than_share_of_sites": self.slower_than,
            "no_fault_probability": self.no_fault_probability,
            "typical_site_s": self.typical_site_s,
            "good_site_s": self.good_site_s,
            "timers": {phase: asdict(timer) for phase, timer in self.timers.items()},
            "stalls": [asdict(stalls) for stalls in series.stalls],
            "drift": None if series.drift is None else asdict(series.drift),
            "causes": [asdict(cause) for cause in self.causes],
            "next_measurement": self.next_measurement,
            "contradictions": list(self.contradictions),
            "remarks": list(self.remarks),
        }


def check_run(
    problem: Problem,
    layout: StatedLayout,
    log: TrainingLog | Path | str,
    *,
    calibration: Path | str | None = None,
    save_every: int | None = None,
    progress: Report | None = None,
) -> RunHealth:
    """Compare a run's log with its prediction, and name the likeliest causes of the difference.

        launch = pm.read_launch("train.sh")
        print(pm.check_run(launch.problem("dgx-h100"), launch.layout, "train.log"))

    Args:
        problem: what the launch script runs, and on which cluster.
        layout: of the launch script, in any form that `predict` takes.
        log: what the job printed, or what `read_log` read of it.
        calibration: directory made by `perfmodel fit` that replaces the shipped one.
        save_every: steps between checkpoints, for logs that do not report them.
        progress: called with the name of each stage and how far it is.

    Raises:
        TableError, PerfModelError: not a log, too short a log, or a log of another job than the script's.
    """
    if isinstance(log, (str, Path)):
        log = read_log(log)
    intended, _ = layout_of(problem.replace(devices=None), layout)
    job = what_ran(problem, intended, log)

    # Predict the job that ran: the structure that the log states, with the options that the
    # script asks for.
    step_problem = step_problem_of(job.problem, calibration)
    intended, _ = layout_of(job.problem, job.intended)
    expected = explain(step_problem, intended)
    tokens = job.problem.job.global_batch * job.problem.job.seq_len
    series = step_series(log, tokens, expected.devices, job.problem.job.global_batch, save_every)
    if progress:
        progress("causes", 0, 1)

    # Known sites scatter about the prediction, so that a healthy run lies somewhere in its
    # interval.
    deviation = log_deviation(expected)

    # What the log itself shows (checkpoints, slow steps, options that differ) is named first; hidden faults are left
    # the rest.
    excess = log_ratio(series.usual_s, expected.step_time_s)
    timers = _timers(log, job.problem.job.global_batch, expected)
    small_batch = _small_batch(series, step_problem, intended)
    observed = _observed(log, series, expected, deviation, job, timers, small_batch)
    shown = _shown_causes(series, log.format, timers, expected, _option_causes(step_problem, job, expected))
    beside_usual_step = (CHECKPOINTS, EVALUATIONS, SLOWS_DOWN)
    explained_s = sum(cause.explains_s for cause in shown if cause.name not in beside_usual_step)

    # Hidden faults share what the shown causes leave of the excess.
    candidates = faults(
        step_problem,
        intended,
        expected.step_time_s,
        has_sync_timers=observed.sync_s is not None,
        small_batch=None if small_batch is None else small_batch.global_batch,
    )
    hidden, no_fault = weigh(observed, candidates)
    named = {cause.name for cause in shown}
    left_s = max(0.0, observed.most_explained_s - explained_s)
    begins = ""
    if observed.jump is not None and series.drift is not None:
        left_s = series.drift_s
        begins = f"if it begins at step {series.drift.at_step:,}; "
    guessed = []
    for likely in hidden:
        if likely.fault.name in named or likely.probability <= _LEAST_PROBABILITY:
            continue
        description = likely.severity.description
        guessed.append(
            Cause(
                name=likely.fault.name,
                title=likely.fault.title,
                explains_s=left_s if begins else min(likely.explains_s, left_s),
                probability=likely.probability,
                evidence=f"{begins}fits best: {description}" if description else "",
                remedy=likely.fault.remedy,
            )
        )

    # The share of known sites that would be faster: a normal law of the logarithm.
    slower_than = 0.5 * (1 + erf(excess / deviation / sqrt(2)))

    # Order by expected seconds: probability times what the cause would explain.
    least_s = _WORTH_NAMING * expected.step_time_s
    causes = [cause for cause in (*shown, *guessed) if cause.explains_s > least_s]
    causes = sorted(causes, key=lambda cause: -cause.probability * cause.explains_s)[:NAMED_CAUSES]
    fault = next((cause for cause in causes if _is_certain(cause, expected.step_time_s)), None)
    probability = {cause.name: cause.probability * cause.explains_s for cause in causes}
    counter = observed.peak_counter
    return RunHealth(
        log=log.path,
        format=log.format,
        prediction=expected,
        series=series,
        excess_share=series.usual_s / expected.step_time_s - 1,
        slower_than=slower_than,
        healthy=slower_than <= _UNUSUAL and fault is None,
        fault=fault,
        no_fault_probability=no_fault,
        causes=tuple(causes),
        next_measurement=most_telling(probability).text if causes else "",
        typical_site_s=expected.step_time_s,
        good_site_s=expected.step_time_s * exp(-_GOOD_SITE * deviation),
        contradictions=tuple(contradiction.sentence for contradiction in job.contradictions),
        remarks=_remarks(job, log, series, expected, step_problem.flops),
        peak_bytes=observed.peak_bytes,
        peak_counter=counter,
        expected_peak_bytes=expected.memory_counted_bytes.get(counter),
        timers=timers,
    )


def log_deviation(prediction: Prediction) -> float:
    """Standard deviation of the log step time over known sites, from the 90 % interval."""
    return log(prediction.step_time_hi_s / prediction.step_time_lo_s) / (2 * GAUSS_90)


def log_ratio(measured_s: float, predicted_s: float) -> float:
    """Log of measured over predicted."""
    return log(measured_s / predicted_s)


def _observed(
    log: TrainingLog,
    series: StepSeries,
    expected: Prediction,
    deviation: float,
    job: WhatRan,
    timers: Mapping[str, PhaseTimer],
    small_batch: "_ExpectedSmallBatch | None",
) -> Observed:
    """Put the log's figures beside the expected ones."""
    # Where the log has both counters, the one of the allocator's reserve: it is what fills a device.
    counter = "reserved" if log.reserved_bytes is not None else "allocated"
    drift = series.drift
    jump = None
    if drift is not None and drift.kind == "jump" and drift.change > 0:
        jump = 1 + drift.change
    batch_ratio = None
    if series.small_batch is not None:
        batch_ratio = series.before_drift_s / series.small_batch.step_s
    return Observed(
        # What slows down later on is a cause of its own.
        steady_s=series.before_drift_s,
        expected_s=expected.step_time_s,
        deviation=deviation,
        expected_sync_s=sync_seconds(expected),
        # Under ZeRO 3 DeepSpeed gathers and reduces within the passes that it times.
        times_sync=log.format != "deepspeed" or job.intended.zero < 3,
        one_rank=log.format == "deepspeed",
        timers=timers,
        jump=jump,
        batch_ratio=batch_ratio,
        expected_small_batch_s=None if small_batch is None else small_batch.step_s,
        pipeline=job.intended.pp > 1,
        peak_bytes=log.reserved_bytes if log.reserved_bytes is not None else log.allocated_bytes,
        peak_counter=counter,
        expected_peak_bytes=expected.memory_counted_bytes.get(counter),
    )


class _ExpectedSmallBatch(NamedTuple):
    """A step with the smallest batch of a log, as predicted."""

    global_batch: int
    step_s: float


def _small_batch(series: StepSeries, problem: StepProblem, layout: Layout) -> _ExpectedSmallBatch | None:
    """Predict the step with the smallest batch of the log; None where the batch is always the same."""
    if series.small_batch is None:
        return None
    global_batch = series.small_batch.global_batch
    try:
        check_layout(problem.model, problem.cluster, with_batch(problem, global_batch).job, layout)
        return _ExpectedSmallBatch(global_batch, step_s(with_batch(problem, global_batch), layout, Scenario()))
    except PerfModelError:
        # A batch that these replicas cannot share: the log's lines mean something else.
        return None


def _timers(log: TrainingLog, global_batch: int, expected: Prediction) -> dict[str, PhaseTimer]:
    """Timers of the log, in the phases of other frameworks where DeepSpeed divides a step differently."""
    timers = dict(log.timers)
    if log.format != "deepspeed":
        return timers

    # DeepSpeed's rate counts from the forward pass to the end of the update. What passes between
    # two lines beyond it is spent outside: mostly on waiting for data.
    outside_s = []
    for step in log.steps[1:]:
        if step.seconds and step.samples_per_s:
            outside_s.append(step.seconds - global_batch / step.samples_per_s)
    if outside_s and "data" not in timers:
        waiting_s = max(0.0, median(outside_s))
        timers["data"] = PhaseTimer(least_s=waiting_s, most_s=waiting_s)

    # Its timer of the update holds the gathering of updated weights.
    optimizer = timers.get("optimizer")
    if optimizer is not None:
        gather_s = max(0.0, optimizer.most_s - expected.breakdown_s.get("optimizer", 0.0))
        timers["weight_gather"] = PhaseTimer(least_s=gather_s, most_s=gather_s)
    return timers


# ---- causes that the log shows by itself ----


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


def _shown_causes(
    series: StepSeries,
    log_format: str,
    timers: Mapping[str, PhaseTimer],
    expected: Prediction,
    options: Sequence[Cause],
) -> list[Cause]:
    """Return the causes that the log itself shows: stalls, options that differ, drift, skipped steps, slow loaders."""
    causes = [_stall_cause(stalls) for stalls in series.stalls]
    causes += options
    drift = series.drift
    if drift is not None and drift.change > 0:
        how = "little by little" if drift.kind == "trend" else f"at step {drift.at_step:,}"
        causes.append(
            Cause(
                name=SLOWS_DOWN,
                title=f"steps become {drift.change:.1%} slower over the run, {how}",
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

    # The loader's own timer is proof enough, whatever made it slow.
    data = timers.get("data")
    if data is not None and data.most_s > _DATA_TIMER_SHARE * expected.step_time_s:
        title = "steps wait for their data"
        evidence = f"the slowest rank's loader takes {duration(data.most_s)} of each step"
        if log_format == "deepspeed":
            title = "each step waits before its forward pass, as for data"
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
    every = f", every {stalls.every:,} steps" if stalls.every else ""
    times = "once" if stalls.count == 1 else f"{stalls.count} times"
    return Cause(
        name=cause.name,
        title=cause.title,
        explains_s=stalls.seconds_per_step,
        probability=1.0,
        evidence=f"{times}{every}, {duration(stalls.seconds_each)} each",
        remedy=cause.remedy,
    )


_OPTION_CAUSES: Final[Mapping[str, str]] = {
    "overlap_grad_reduce": "overlap_off",
    "overlap_param_gather": "overlap_off",
    "tp_overlap": "tp_overlap_off",
    "recompute": "full_recompute",
}


def _option_causes(problem: StepProblem, job: WhatRan, expected: Prediction) -> list[Cause]:
    """Options that ran otherwise than in the script, by what they cost together."""
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
    evidence = "; ".join(contradiction.sentence for contradiction in job.contradictions if contradiction.is_option)
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


def _is_certain(cause: Cause, step_s: float) -> bool:
    return cause.probability >= _CERTAIN and cause.explains_s >= _GOOD_PART * step_s


def _remarks(
    job: WhatRan,
    log: TrainingLog,
    series: StepSeries,
    expected: Prediction,
    model_flops: float,
) -> tuple[str, ...]:
    """Further facts of the log that an engineer should know."""
    remarks = [flops_remark(job.problem, log, model_flops, expected.devices)]
    peak = log.reserved_bytes
    if peak is not None and peak > _FULL * expected.memory_capacity_bytes:
        remarks.append(
            f"the allocator holds {peak / GIB:.1f} of {expected.memory_capacity_bytes / GIB:.1f} GiB: it may have "
            "to free memory during a step; use expandable segments or a smaller micro-batch"
        )
    if log.count("allocator_retry"):
        remarks.append("the log reports that the allocator flushed its cache; reduce memory use")
    if series.restarts:
        remarks.append(f"the run was restarted {series.restarts} times")
    return tuple(filter(None, remarks))


def _verdict(health: RunHealth) -> str:
    share = f"{health.slower_than:.0%}" if health.slower_than < 0.995 else "more than 99 %"
    place = f"slower than {share} of comparable sites"
    if health.slower_than < 0.5:
        place = f"faster than {1 - health.slower_than:.0%} of comparable sites"
    if health.healthy:
        but = ", but the log contradicts the script" if health.contradictions else ""
        return f"healthy{but}: {place}"
    if health.fault is None:
        return f"not healthy: {place}"
    return f"not healthy: {health.fault.title}; the usual step is {place}"
