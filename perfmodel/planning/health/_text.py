"""A checked run on one screen."""

from typing import TYPE_CHECKING, Final

from perfmodel.planning.health._causes import REPORTED
from perfmodel.prediction.text import throughput_words
from perfmodel.units import GIB, batch_words, duration, figure, number_of, plural, span

_LARGE_EXCESS: Final = 1.0
"""Excess over the prediction from which a factor is easier to read than percent."""

if TYPE_CHECKING:
    from perfmodel.planning.health._run_health import RunHealth


def health_text(health: "RunHealth") -> str:
    """The report as text: verdict, measured and predicted figures, causes, next measurement."""
    prediction, series = health.prediction, health.series
    lines = [
        health.verdict,
        *(f"contradiction: {sentence}" for sentence in health.contradictions),
        *health.remarks,
        "",
        f"{prediction.model} on {number_of(prediction.devices, 'device')} of {prediction.cluster}, "
        f"{batch_words(prediction.global_batch, prediction.seq_len, prediction.sample_unit)}",
        *_measured(health),
        *_over_the_run(health),
    ]
    if series.warm_up_steps:
        steps = plural("step", series.warm_up_steps)
        longer = f", {duration(series.warm_up_s)} longer than usual" if series.warm_up_s > 0 else ""
        lines.append(f"not counted: {series.warm_up_steps} {steps} of warm-up{longer}")
    lines += _causes(health)
    lines += _other_settings(health)
    return "\n".join(lines)


def _causes(health: "RunHealth") -> list[str]:
    """Return lines on the likeliest causes and on the measurement that distinguishes them."""
    # A step in the middle of comparable sites has no cause to be guessed.
    is_usual = health.healthy and health.no_fault_probability > 0.5
    causes = [cause for cause in health.causes if cause.probability == 1 or not is_usual]
    if not causes:
        return []
    likeliest = "likeliest causes, and the seconds per step that each would explain"
    if all(cause.probability == 1 for cause in causes):
        likeliest = "shown by the log, with the seconds per step that each costs"
    elif health.healthy and health.suspected is None:
        likeliest = f"there may be no fault. If there is one, the {likeliest}"
    lines = ["", likeliest]
    for place, cause in enumerate(causes, start=1):
        surely = f"probability {min(cause.probability, 0.99):.0%}"
        if cause.probability == 1:
            surely = "shown by the log"
        lines.append(f"{place}. {cause.title}: {duration(cause.explains_s)} ({surely})")
        if cause.evidence:
            lines.append(f"   {cause.evidence}")
        lines.append(f"   remedy: {cause.remedy}")

    # Causes that the log shows are certain. With guessed causes, there is a chance that nothing is
    # wrong.
    if any(cause.probability < 1 for cause in causes):
        if health.no_fault_probability >= 0.005:
            no_fault = f"{health.no_fault_probability:.0%}"
        else:
            no_fault = "below 1%"
        lines.append(
            f"probability that there is no fault and the site is just slower than most: {no_fault}"
        )
        if health.undecided:
            lines.append(health.undecided)
    # What the log reports by itself needs no measurement.
    if health.match == "same job" and any(cause.name not in REPORTED for cause in causes):
        to_tell_apart = ", to distinguish them" if len(causes) > 1 else ""
        lines += ["", f"next{to_tell_apart}: {health.next_measurement}"]
    return lines


def _other_settings(health: "RunHealth") -> list[str]:
    """Return lines on the settings that would explain a step which cannot be one of this job."""
    if health.match == "same job":
        return []
    lines = ["", "no single setting of the script explains this step"]
    if health.other_settings:
        lines = [
            "",
            "each of these settings would explain the step, if the run differs from the script",
        ]
    for place, other in enumerate(health.other_settings, start=1):
        lines.append(
            f"{place}. {other.setting}: {other.run} instead of {other.script} (predicted "
            f"{duration(other.step_time_s)})"
        )
    return [*lines, f"next: {health.next_measurement}"]


def _measured(health: "RunHealth") -> list[str]:
    """Lines that compare the measured step with the prediction."""
    prediction, series = health.prediction, health.series
    interval = span(duration(prediction.step_time_lo_s), duration(prediction.step_time_hi_s))
    lines = [
        f"step time: measured {duration(series.usual_s)}, predicted {duration(prediction.step_time_s)}, "
        f"{_relative(health.excess_share)}",
        f"nine in ten comparable sites take {interval}; the fastest tenth takes at most "
        f"{duration(health.good_site_s)}",
    ]
    measured_rate = throughput_words(prediction, prediction.devices, step_s=series.mean_s)
    predicted_figure, _ = throughput_words(prediction, prediction.devices).split()
    throughput = f"{measured_rate} per device (predicted {predicted_figure})"
    if series.stalls:
        lines.append(f"with all stalls: {duration(series.mean_s)} per step, {throughput}")
    else:
        lines.append(f"throughput: {throughput}")
    if health.peak_bytes is not None and health.expected_peak_bytes is not None:
        measured, predicted = health.peak_bytes / GIB, health.expected_peak_bytes / GIB
        lines.append(
            f"peak memory ({health.peak_counter}): measured {measured:.1f} GiB, predicted {predicted:.1f} GiB"
        )
    return lines


def _relative(excess_share: float) -> str:
    """The measured step relative to the predicted one: percent, or a factor if it is large."""
    if excess_share < _LARGE_EXCESS:
        return f"{excess_share:+.1%}"
    return f"{figure(1 + excess_share, 3)} times as long"


def _over_the_run(health: "RunHealth") -> list[str]:
    """Return lines on scatter, timers, stalls and drift over the run."""
    series = health.series
    lines = [
        f"steps vary by {series.scatter:.1%} around their trend; {int(series.covered.sum()):,} steps counted"
    ]
    if health.timers:
        ranges = []
        for phase, timer in health.timers.items():
            # Some frameworks time one rank only, and phases that a job does not have.
            range_of_ranks = span(duration(timer.least_s), duration(timer.most_s))
            if timer.most_s > 0:
                ranges.append(f"{phase.replace('_', ' ')} {range_of_ranks}")
        head = "timers"
        if any(timer.least_s < timer.most_s for timer in health.timers.values()):
            head = "timers, from the fastest to the slowest rank"
        lines.append(f"{head}: {', '.join(ranges)}")
    for stalls in series.stalls:
        period_text = f", every {stalls.every:,} steps" if stalls.every else ""
        lines.append(
            f"stalls ({stalls.kind}): {stalls.count}{period_text}, {duration(stalls.seconds_each)} each, "
            f"{stalls.seconds_per_step / series.mean_s:.1%} of the run"
        )
    if series.drift is not None:
        at_step = f" at step {series.drift.at_step:,}" if series.drift.kind == "jump" else ""
        lines.append(f"drift: steps change by {series.drift.change:+.1%} over the run{at_step}")
    if series.skipped_steps:
        lines.append(f"skipped updates: {series.skipped_steps}")
    return lines
