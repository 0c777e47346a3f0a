"""Compares a run's log with its prediction and explains the difference."""

from collections.abc import Mapping, Sequence
from math import erf, exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from perfmodel.calibration import Run, arithmetic_s
from perfmodel.catalog import StatedLayout
from perfmodel.display import Report
from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import PhaseTimer, TrainingLog, read_log
from perfmodel.planning.health._causes import (
    CHECKPOINTS,
    EVALUATIONS,
    SLOWS_DOWN,
    Fault,
    faults,
    passes_seconds,
    sync_seconds,
    with_batch,
)
from perfmodel.planning.health._contradictions import WhatRan, flops_remark, what_ran
from perfmodel.planning.health._evidence import LEAST_DEVIATION, Likely, Observed, weigh
from perfmodel.planning.health._measurements import most_telling, undecided_sentence
from perfmodel.planning.health._other_job import OtherSetting, other_settings
from perfmodel.planning.health._run_health import DECIDED, NAMED_CAUSES, Match, RunHealth
from perfmodel.planning.health._series import StepSeries, step_series
from perfmodel.planning.health._shown import Cause, option_causes, shown_causes
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
from perfmodel.units import GIB

_UNUSUAL: Final = 0.9
"""A run that is slower than this share of sites is called unusual."""
_FAR_OUTSIDE: Final = 2.0
"""A step is far outside the 90 % interval from this multiple of its half-width on."""
_CERTAIN: Final = 0.8
_GOOD_PART: Final = 0.05
"""A run has a fault where a cause of this probability explains this share of the step."""
_LEAST_PROBABILITY: Final = 0.01
_BESIDE_USUAL_STEP: Final = (CHECKPOINTS, EVALUATIONS, SLOWS_DOWN)
"""Causes that lengthen the run, but not its usual step before a drift."""
_SUREST_GUESS: Final = 0.999
"""Highest probability of a cause that the log does not show."""
_WORTH_NAMING: Final = 0.01
"""Share of the step that a cause has to explain to be named."""
_FULL: Final = 0.95
"""Share of the device's memory above which the allocator may have to free memory first."""
_GOOD_SITE: Final = 1.2815515655446004
"""90 % quantile of the standard normal distribution, for the best tenth of sites."""


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
        problem: the job of the launch script, and its cluster.
        layout: layout of the launch script, in any form that `predict` takes.
        log: file of the job's output, or the result of `read_log`.
        calibration: directory made by `perfmodel fit` that replaces the shipped one.
        save_every: steps between checkpoints, for logs that do not report them.
        progress: called with the name of each stage and how far it is.

    Raises:
        TableError, PerfModelError: not a log, too short a log, or a log of another job than the
            script's.
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

    deviation = log_deviation(expected)
    slower_than = _share_of_faster_sites(series, expected)
    timers = _timers(log, job.problem.job.global_batch, expected)
    small_batch = _small_batch(series, step_problem, intended)
    observed = _observed(log, series, expected, deviation, job, timers, small_batch)
    logged_causes = shown_causes(
        series, log.format, timers, expected, option_causes(step_problem, job, expected)
    )

    # Hidden faults share what the causes that the log shows leave of the excess.
    candidates = faults(
        step_problem,
        intended,
        expected.step_time_s,
        has_timers=observed.sync_s is not None or observed.passes_ratio is not None,
        small_batch=None if small_batch is None else small_batch.global_batch,
    )
    hidden, no_fault = weigh(observed, candidates)
    guessed_causes = _guessed_causes(hidden, logged_causes, observed, series)

    # A step that neither sites nor faults explain is probably one of another job, and says
    # nothing about faults of this one.
    least_s = _shortest_possible_s(problem, job, intended, log, series)
    match = _match(observed, series, candidates, logged_causes, least_s)
    others: tuple[OtherSetting, ...] = ()
    if match != "same job":
        guessed_causes = []
        others = other_settings(
            job.problem,
            intended,
            series.usual_s,
            GAUSS_90 * deviation,
            stated=_stated(log),
            calibration=calibration,
        )
    causes = _worth_naming(logged_causes, guessed_causes, _WORTH_NAMING * expected.step_time_s)
    fault = next((cause for cause in causes if _is_certain(cause, expected.step_time_s)), None)
    return RunHealth(
        log=log.path,
        format=log.format,
        prediction=expected,
        series=series,
        excess_share=series.usual_s / expected.step_time_s - 1,
        slower_than=slower_than,
        healthy=slower_than <= _UNUSUAL and fault is None and match == "same job",
        match=match,
        least_s=least_s,
        other_settings=others,
        fault=fault,
        no_fault_probability=no_fault,
        causes=tuple(causes),
        next_measurement=_other_job_advice(match, others) or _next_measurement(causes),
        undecided=_undecided(causes, log, series),
        typical_site_s=expected.step_time_s,
        good_site_s=expected.step_time_s * exp(-_GOOD_SITE * deviation),
        contradictions=tuple(contradiction.sentence for contradiction in job.contradictions),
        remarks=_remarks(job, log, series, expected, step_problem.flops),
        peak_bytes=observed.peak_bytes,
        peak_counter=observed.peak_counter,
        expected_peak_bytes=observed.expected_peak_bytes,
        timers=timers,
    )


def _share_of_faster_sites(series: StepSeries, expected: Prediction) -> float:
    """Share of sites whose usual step would be shorter than the run's."""
    # Known sites scatter about the prediction, so that a healthy run lies somewhere in its
    # interval. The share of them that would be faster follows a normal law of the logarithm.
    excess = log_ratio(series.usual_s, expected.step_time_s)
    return 0.5 * (1 + erf(excess / log_deviation(expected) / sqrt(2)))


def _shortest_possible_s(
    problem: Problem, job: WhatRan, layout: Layout, log: TrainingLog, series: StepSeries
) -> float:
    """Seconds of the job's arithmetic alone at the peak rate of the devices."""
    run = Run(
        name=log.path,
        model=problem.model,
        cluster=problem.cluster,
        job=job.problem.job,
        layout=layout,
        measured_s=series.usual_s,
    )
    return arithmetic_s(run)


def _match(
    observed: Observed,
    series: StepSeries,
    candidates: Sequence[Fault],
    logged_causes: Sequence[Cause],
    least_s: float,
) -> Match:
    """Whether the measured step can be one of the predicted job, on some site with some fault."""
    if series.usual_s < least_s:
        return "impossible"
    far = exp(_FAR_OUTSIDE * GAUSS_90 * max(observed.deviation, LEAST_DEVIATION))
    if observed.steady_s * far < observed.expected_s:
        return "too fast"

    # The slowest step that anything explains: the severest fault, or what the log shows.
    slowest_s = observed.expected_s + sum(
        cause.explains_s for cause in logged_causes if cause.name not in _BESIDE_USUAL_STEP
    )
    for fault in candidates:
        slowest_s = max(slowest_s, *(severity.step_s for severity in fault.severities))
    return "too slow" if observed.steady_s > slowest_s * far else "same job"


def _stated(log: TrainingLog) -> set[str]:
    """Fields of job and layout that the log states."""
    stated = set(log.settings)
    if any(step.global_batch for step in log.steps):
        stated.add("global_batch")
    return stated


def _other_job_advice(match: Match, others: Sequence[OtherSetting]) -> str:
    """What to do about a step that cannot be one of this job; empty if it can."""
    if match == "same job":
        return ""
    settings = "these settings" if others else "model, cluster, devices, batch and sequence length"
    advice = f"compare {settings} with the arguments that the run printed, mend the script, and check again"
    if match == "too slow":
        advice += "; if they agree, run twenty steps on synthetic data"
    return advice


def _next_measurement(causes: Sequence[Cause]) -> str:
    """The measurement that tells the causes apart best, each weighted by the seconds that it is
    expected to cost."""
    if not causes:
        return ""
    return most_telling({cause.name: cause.probability * cause.explains_s for cause in causes}).text


def _guessed_causes(
    hidden: Sequence[Likely], logged_causes: Sequence[Cause], observed: Observed, series: StepSeries
) -> list[Cause]:
    """Turn likely hidden faults into causes, except those that the log shows anyhow."""
    # Faults explain what the shown causes leave of the usual step. Where steps take longer from one
    # of them on, it is this jump that faults explain.
    explained_s = sum(
        cause.explains_s for cause in logged_causes if cause.name not in _BESIDE_USUAL_STEP
    )
    left_s = max(0.0, observed.most_explained_s - explained_s)
    begins = ""
    if observed.jump is not None and series.drift is not None:
        left_s = series.drift_s
        begins = f"if it begins at step {series.drift.at_step:,}; "
    named = {cause.name for cause in logged_causes}
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
                probability=min(likely.probability, _SUREST_GUESS),
                evidence=f"{begins}fits best: {description}" if description else "",
                remedy=likely.fault.remedy,
            )
        )
    return guessed


def _worth_naming(
    logged_causes: Sequence[Cause], guessed: Sequence[Cause], least_s: float
) -> list[Cause]:
    """The causes that explain more than `least_s` of a step, in the order of the seconds that each
    is expected to."""
    # The expected seconds are probability times the seconds that the cause would explain. Hidden
    # faults exclude one another and compete for the same seconds, so that among them only the
    # probability counts. Causes that the log shows come before guesses that are less likely than
    # not.
    guessed = [cause for cause in guessed if cause.explains_s > least_s]
    hidden_s = max((cause.explains_s for cause in guessed), default=0.0)
    expected_s = {cause.name: cause.probability * hidden_s for cause in guessed}
    expected_s |= {cause.name: cause.explains_s for cause in logged_causes}
    causes = [cause for cause in (*logged_causes, *guessed) if cause.explains_s > least_s]
    return sorted(causes, key=lambda cause: (cause.probability < DECIDED, -expected_s[cause.name]))[
        :NAMED_CAUSES
    ]


def _undecided(causes: Sequence[Cause], log: TrainingLog, series: StepSeries) -> str:
    """A sentence if the log cannot tell the likeliest causes apart; empty if it can."""
    unsure = [cause for cause in causes if cause.probability < DECIDED]
    if len(unsure) < 2 or causes[0] not in unsure:
        return ""
    return undecided_sentence(
        log.format,
        has_timers=bool(log.timers),
        has_clocks=log.clocks is not None,
        batch_grows=series.small_batch is not None,
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
    # Where the log has both counters, the one of the allocator's reserve: it is what fills a
    # device.
    counter = "reserved" if log.reserved_bytes is not None else "allocated"
    drift = series.drift
    jump = None
    if drift is not None and drift.kind == "jump" and drift.change > 0:
        jump = 1 + drift.change
    batch_ratio = None
    if series.small_batch is not None:
        batch_ratio = series.before_drift_s / series.small_batch.step_s
    return Observed(
        # A later slowdown is a separate cause.
        steady_s=series.before_drift_s,
        expected_s=expected.step_time_s,
        deviation=deviation,
        expected_sync_s=sync_seconds(expected),
        expected_passes_s=passes_seconds(expected),
        passes_ratio=_passes_ratio(timers, expected),
        # Under ZeRO 3 DeepSpeed gathers and reduces within the passes that it times.
        times_sync=log.format != "deepspeed" or job.intended.zero < 3,
        one_rank=log.format == "deepspeed",
        timers=timers,
        jump=jump,
        clocks=log.clocks,
        usual_clock_hz=job.problem.cluster.device.clock_hz,
        batch_ratio=batch_ratio,
        expected_small_batch_s=None if small_batch is None else small_batch.step_s,
        pipeline=job.intended.pp > 1,
        peak_bytes=log.reserved_bytes if log.reserved_bytes is not None else log.allocated_bytes,
        peak_counter=counter,
        expected_peak_bytes=expected.memory_counted_bytes.get(counter),
    )


def _passes_ratio(timers: Mapping[str, PhaseTimer], expected: Prediction) -> float | None:
    """Measured over predicted seconds of passes, on the fastest rank; None without timers."""
    passes_s = passes_seconds(expected)
    if "compute" in timers:
        return timers["compute"].least_s / passes_s if timers["compute"].least_s > 0 else None
    if "forward" not in timers:
        return None

    # Kernels divide the passes into forward and backward; gaps and collectives are taken to do so
    # alike.
    parts = expected.breakdown_s
    kernels_s = sum(parts.get(part, 0.0) for part in ("forward", "backward", "recompute"))
    forward_s = passes_s * parts.get("forward", 0.0) / kernels_s if kernels_s else 0.0
    return timers["forward"].least_s / forward_s if forward_s else None


class _ExpectedSmallBatch(NamedTuple):
    """A step with the smallest batch of a log, as predicted."""

    global_batch: int
    step_s: float


def _small_batch(
    series: StepSeries, problem: StepProblem, layout: Layout
) -> _ExpectedSmallBatch | None:
    """Predict the step with the log's smallest batch; None if the batch never changes."""
    if series.small_batch is None:
        return None
    global_batch = series.small_batch.global_batch
    try:
        check_layout(problem.model, problem.cluster, with_batch(problem, global_batch).job, layout)
        return _ExpectedSmallBatch(
            global_batch, step_s(with_batch(problem, global_batch), layout, Scenario())
        )
    except PerfModelError:
        # A batch that these replicas cannot share: the log's lines mean something else.
        return None


def _timers(log: TrainingLog, global_batch: int, expected: Prediction) -> dict[str, PhaseTimer]:
    """Timers of the log; those of DeepSpeed, which divides a step differently, are converted to the
    phases of other frameworks."""
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
    if series.untimed_events:
        remarks.append(
            f"the log reports {series.untimed_events} checkpoints and evaluations, but neither their duration nor the "
            "time of day, so their cost is not included; print time stamps, or compare with a run without them"
        )
    if series.restarts:
        remarks.append(f"the run was restarted {series.restarts} times")
    return tuple(filter(None, remarks))
