"""Analyses the step times of a log: warm-up, typical step, stalls and their occasions, drift."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import LoggedStep, TrainingLog

StallKind = Literal["checkpoint", "evaluation", "periodic", "irregular"]
_REPORTED: Final[tuple[StallKind, ...]] = ("checkpoint", "evaluation")
LEAST_STEPS: Final = 3
"""Fewest lines about steps after the warm-up from which anything can be concluded."""
_MOVING_CLOCKS: Final = ("hf-trainer", "levanter")
"""Formats whose clock is the progress bar's, whose step time is already a moving mean."""
_WARM: Final = 1.15
"""The first steps are warm-up as long as they exceed the usual step by this factor."""
_WINDOW: Final = 15
"""Number of lines over which the median step is taken."""
_STALL_DEVIATIONS: Final = 6.0
_STALL_SHARE: Final = 0.08
"""A line is a stall if it exceeds its neighbours by this many robust standard deviations and by
this share of the step."""
_MAD_TO_SD: Final = 1.4826
_LEAST_PAUSE_S: Final = 3.0
"""Shortest pause between steps that is recorded; clocks in logs are often whole seconds."""
_REGULAR: Final = 0.15
"""Stalls are periodic where the middle half of their distances lies within this share of the median
distance."""
_LEAST_DRIFT: Final = 0.02
_LEAST_DRIFT_LINES: Final = 12
_CERTAIN_Z: Final = 3.0
_SMALL_BATCH: Final = 0.75
"""Largest share of the final batch at which an earlier, smaller batch shows which part of a step
does not depend on the batch."""


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Pauses in training that have the same reason."""

    kind: StallKind
    """Reason for the stalls, if the log states it."""
    count: int
    """Number of stalls."""
    seconds_each: float
    """Median seconds of one."""
    seconds_per_step: float
    """Total seconds of the stalls divided by the number of steps."""
    every: int | None
    """Steps from one stall to the next, if they are regular."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A change of the step time over the run."""

    kind: Literal["trend", "jump"]
    """A trend over the whole run, or a jump at one step."""
    change: float
    """Relative change of the usual step from the beginning to the end of the log."""
    at_step: int
    """Step at which the time jumps; the first step of a trend."""


@dataclass(frozen=True, kw_only=True)
class SmallBatch:
    """Steps before a growing batch reached its final size."""

    global_batch: int
    """Sequences per step of the smallest batch in the log."""
    step_s: float
    """Median step time with this batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeries:
    """Steps of a run after its warm-up."""

    steps: tuple[int, ...]
    seconds: Float[np.ndarray, " lines"]
    """Seconds per step, by line of the log."""
    covered: Float[np.ndarray, " lines"]
    """Number of steps that each line covers."""
    warm_up_steps: int
    warm_up_s: float
    """Additional seconds that the warm-up took, compared with the same number of usual steps."""
    usual_s: float
    """The median step without stalls."""
    scatter: float
    """Robust standard deviation of the usual steps, relative."""
    mean_s: float
    """All time after the warm-up per step, stalls and pauses included."""
    stalls: tuple[Stalls, ...]
    drift: Drift | None
    small_batch: SmallBatch | None
    """Steps with the smallest batch, where the batch grows over the run."""
    restarts: int
    skipped_steps: int
    untimed_events: int = 0
    """Checkpoints and evaluations whose duration the log neither states nor shows by the time of
    day."""

    @property
    def before_drift_s(self) -> float:
        """The typical step at the beginning of the run, or over the whole run without drift."""
        if self.drift is None:
            return self.usual_s
        if self.drift.kind == "trend":
            return self.usual_s / (1 + self.drift.change / 2)
        before = np.array(self.steps) < self.drift.at_step
        return float(np.median(self.seconds[before])) if before.any() else self.usual_s

    @property
    def drift_s(self) -> float:
        """Seconds by which the drift lengthens the mean step; 0 if steps do not slow down."""
        if self.drift is None or self.drift.change <= 0:
            return 0.0
        # A trend has reached half of its change in the mean; a jump counts for the steps after it.
        share = 0.5
        if self.drift.kind == "jump":
            after = np.array(self.steps) >= self.drift.at_step
            share = float(self.covered[after].sum() / self.covered.sum())
        return self.before_drift_s * self.drift.change * share


def step_series(
    log: TrainingLog,
    tokens_per_step: float,
    devices: int,
    global_batch: int,
    save_every: int | None = None,
) -> StepSeries:
    """Analyse the step times of a log.

    Args:
        log: log of the run.
        tokens_per_step, devices, global_batch: figures of the job, for logs that give a throughput
            alone.
        save_every: steps between checkpoints, as the launch script has it.

    Raises:
        PerfModelError: the log has fewer than `LEAST_STEPS` lines with a time after the warm-up.
    """
    timed = _timed_steps(log, tokens_per_step, devices, global_batch)
    steps = np.array([step.step for step, _ in timed])
    seconds = np.array([seconds for _, seconds in timed])
    clock_s = np.array([np.nan if step.clock_s is None else step.clock_s for step, _ in timed])
    covered = _covered(steps)

    # Pauses between steps show by the clock, or the log states them.
    has_clock = log.format not in _MOVING_CLOCKS and not np.isnan(clock_s).all()
    pauses_s = (
        _pauses(clock_s, seconds, covered) if has_clock else _stated_pauses(log, steps, covered)
    )

    # Split off the warm-up, but leave enough lines to say something.
    warm = min(_warm_up(seconds), len(seconds) - LEAST_STEPS)
    steps_after = steps[warm:]
    seconds_after = seconds[warm:]
    covered_after = covered[warm:]
    pauses_after_s = pauses_s[warm:]
    # The pause before the first line that counts belongs to the warm-up.
    pauses_after_s[:1] = 0.0

    stalled = _stalled_lines(seconds_after)
    lost_s = np.where(stalled.is_stall, stalled.residual_s * covered_after, 0.0) + pauses_after_s
    is_usual = ~stalled.is_stall
    usual_seconds = seconds_after[is_usual] if is_usual.any() else seconds_after
    usual_s = float(np.median(usual_seconds))
    total = float(covered_after.sum())
    stalls = _stalls(log, steps_after, covered_after, lost_s, total, save_every)
    return StepSeries(
        steps=tuple(steps_after.tolist()),
        seconds=seconds_after,
        covered=covered_after,
        warm_up_steps=int(covered[:warm].sum()),
        warm_up_s=float(((seconds[:warm] - usual_s) * covered[:warm]).sum()),
        usual_s=usual_s,
        scatter=stalled.scatter_s / usual_s,
        mean_s=float((seconds_after * covered_after + pauses_after_s).sum()) / total,
        stalls=stalls,
        drift=_drift(steps_after[is_usual], seconds_after[is_usual]),
        small_batch=_small_batch(log, tokens_per_step, devices, global_batch),
        restarts=log.count("restart"),
        skipped_steps=sum(step.skipped_steps for step in log.steps) + log.count("overflow"),
        untimed_events=0 if has_clock else _untimed_events(log, stalls),
    )


class _StalledLines(NamedTuple):
    """Which lines of a log are stalls."""

    is_stall: Bool[np.ndarray, " lines"]
    residual_s: Float[np.ndarray, " lines"]
    """Seconds per step beyond the running median."""
    scatter_s: float
    """Robust standard deviation of the residuals."""


def _stalled_lines(seconds: Float[np.ndarray, " lines"]) -> _StalledLines:
    """A line is a stall if it stands out above the running median of its neighbours, by robust
    deviations and as a share of the step. The running median follows a drift, which is no stall."""
    baseline_s = _running_median(seconds)
    residual_s = seconds - baseline_s
    scatter_s = _MAD_TO_SD * float(np.median(np.abs(residual_s)))
    is_stall = residual_s > np.maximum(_STALL_DEVIATIONS * scatter_s, _STALL_SHARE * baseline_s)
    return _StalledLines(is_stall, residual_s, scatter_s)


def _timed_steps(
    log: TrainingLog, tokens_per_step: float, devices: int, global_batch: int
) -> list[tuple[LoggedStep, float]]:
    """Steps of the job whose time the log gives, with their seconds (raises `PerfModelError` if
    they are too few)."""
    # A batch that is ramped up makes steps longer: only those at the final batch are of the job.
    batches = [step.global_batch for step in log.steps if step.global_batch]
    final_batch = batches[-1] if batches else None
    timed = []
    for step in log.steps:
        step_s = step.seconds_of(tokens_per_step, devices, global_batch)
        if step_s is not None and step.global_batch in (None, final_batch):
            timed.append((step, step_s))
    if len(timed) < LEAST_STEPS + 1:
        raise PerfModelError(
            f"{log.path}: {len(timed)} lines give the time of a step; a check needs at least {LEAST_STEPS + 1}. Give a "
            "longer log"
        )
    return timed


def _untimed_events(log: TrainingLog, stalls: Sequence[Stalls]) -> int:
    """Number of checkpoints and evaluations that leave no trace in a log without a clock."""
    timed_kinds = {stall.kind for stall in stalls}
    untimed_kinds = set(_REPORTED) - timed_kinds
    return sum(event.kind in untimed_kinds and event.seconds is None for event in log.events)


def _small_batch(
    log: TrainingLog, tokens_per_step: float, devices: int, global_batch: int
) -> SmallBatch | None:
    """The usual step with the smallest batch of a log whose batch grows; None where there are too
    few such steps."""
    batches = [step.global_batch for step in log.steps if step.global_batch]
    if not batches or min(batches) > _SMALL_BATCH * batches[-1]:
        return None
    smallest = min(batches)
    tokens = tokens_per_step * smallest / global_batch
    seconds = []
    # The first line holds compilation.
    for step in log.steps[1:]:
        if step.global_batch == smallest:
            step_s = step.seconds_of(tokens, devices, smallest)
            if step_s is not None:
                seconds.append(step_s)
    if len(seconds) < LEAST_STEPS:
        return None
    return SmallBatch(global_batch=smallest, step_s=float(np.median(seconds)))


def _covered(steps: np.ndarray) -> Float[np.ndarray, " lines"]:
    """Steps that each line covers: those since the line before it."""
    intervals = np.diff(steps)
    median_interval = float(np.median(intervals[intervals > 0])) if (intervals > 0).any() else 1.0
    # After a restart, or where the file begins, the line before is not there. The first line of a
    # run often is about its first step alone.
    first = min(median_interval, max(1.0, float(steps[0])))
    later = np.where(intervals > 0, intervals, median_interval)
    return np.concatenate([[first], later]).astype(float)


def _warm_up(seconds: Float[np.ndarray, " lines"]) -> int:
    """Number of lines at the beginning that are slower than the rest; the first line always counts,
    because it includes compilation."""
    # The second half of the log is warm.
    later_s = float(np.median(seconds[len(seconds) // 2 :]))
    slow = seconds > _WARM * later_s
    return max(1, int(np.argmin(slow)) if not slow.all() else 1)


def _pauses(
    clock_s: Float[np.ndarray, " lines"],
    seconds: Float[np.ndarray, " lines"],
    covered: Float[np.ndarray, " lines"],
) -> Float[np.ndarray, " lines"]:
    """Seconds of pause before each line, by the clock of the log, beyond the time of its steps; 0
    without a clock."""
    elapsed_s = np.diff(clock_s, prepend=clock_s[:1])
    pause_s = elapsed_s - seconds * covered

    # Clocks in logs are often rounded to seconds, which would give every line a small pause.
    least_s = np.maximum(_LEAST_PAUSE_S, 0.5 * seconds)
    return np.where(np.isfinite(pause_s) & (pause_s > least_s), pause_s, 0.0)


def _stated_pauses(
    log: TrainingLog, steps: np.ndarray, covered: Float[np.ndarray, " lines"]
) -> Float[np.ndarray, " lines"]:
    """Seconds of pause before each line that the log states for its checkpoints and evaluations."""
    pauses_s = np.zeros(len(steps))
    for event in log.events:
        after = (steps - covered <= event.after_step) & (event.after_step < steps)
        if event.kind in _REPORTED and event.seconds is not None and after.any():
            pauses_s[np.argmax(after)] += event.seconds
    return pauses_s


def _running_median(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Median of the values around each."""
    half = _WINDOW // 2
    medians = []
    for i in range(len(values)):
        around = values[max(0, i - half) : i + half + 1]
        medians.append(np.median(around))
    return np.array(medians)


# ---- stalls ----


def _stalls(
    log: TrainingLog,
    steps: np.ndarray,
    covered: Float[np.ndarray, " lines"],
    lost_s: Float[np.ndarray, " lines"],
    total_steps: float,
    save_every: int | None,
) -> tuple[Stalls, ...]:
    """Stalls by the event that the log reports; those without one are periodic or irregular."""
    stalled = lost_s > 0
    stalls_by_kind: list[Stalls] = []
    for kind in _REPORTED:
        is_logged = _lines_beside(log, kind, steps, covered)
        stalls_by_kind += _kind_of_stalls(
            kind, steps, covered, lost_s, stalled & is_logged, total_steps
        )
        stalled &= ~is_logged

    # A script that saves every N steps explains stalls at multiples of N in logs that do not report
    # checkpoints.
    if save_every and stalled.any():
        saved_within = steps // save_every > (steps - covered) // save_every
        saved_just_before = (steps - 1) % save_every == 0
        after_save = saved_within | saved_just_before
        if after_save[stalled].mean() > 0.8:
            stalls_by_kind += _kind_of_stalls(
                "checkpoint", steps, covered, lost_s, stalled, total_steps
            )
            stalled = np.zeros_like(stalled)

    kind = "periodic" if _period(steps[stalled], covered[stalled]) else "irregular"
    stalls_by_kind += _kind_of_stalls(kind, steps, covered, lost_s, stalled, total_steps)
    return tuple(sorted(stalls_by_kind, key=lambda stalls: -stalls.seconds_per_step))


def _lines_beside(
    log: TrainingLog,
    kind: StallKind,
    steps: np.ndarray,
    covered: Float[np.ndarray, " lines"],
) -> Bool[np.ndarray, " lines"]:
    """Mark the lines for which the log reports an event of a kind since the previous line.

    What stops the training there makes the later of the two lines late.
    """
    is_beside = np.zeros(len(steps), bool)
    for event in log.events:
        if event.kind == kind:
            is_beside |= (steps - covered <= event.after_step) & (event.after_step < steps)
    return is_beside


def _kind_of_stalls(
    kind: StallKind,
    steps: np.ndarray,
    covered: Float[np.ndarray, " lines"],
    lost_s: Float[np.ndarray, " lines"],
    chosen: Bool[np.ndarray, " lines"],
    total_steps: float,
) -> list[Stalls]:
    """Sum up the stalls at the chosen lines of a log; none where no line is chosen."""
    if not chosen.any():
        return []
    return [
        Stalls(
            kind=kind,
            count=int(chosen.sum()),
            seconds_each=float(np.median(lost_s[chosen])),
            seconds_per_step=float(lost_s[chosen].sum()) / total_steps,
            every=_period(steps[chosen], covered[chosen]),
        )
    ]


def _period(steps: np.ndarray, covered: Float[np.ndarray, " stalls"]) -> int | None:
    """Steps from one stall to the next, if they are about the same for at least three.

    Args:
        steps: last step of each line with a stall.
        covered: steps that each of these lines covers, within which the place of its stall is
            unknown.
    """
    intervals = np.diff(steps)
    if len(intervals) < 2:
        return None

    # The middle half of the distances is robust against a missed or an extra stall. Lines of
    # several steps, as progress bars have them, hide where in a line its stall is, so that
    # distances differ by up to twice as many.
    low, middle, high = np.quantile(intervals, [0.25, 0.5, 0.75])
    blur = 2 * (float(np.median(covered)) - 1)
    if high - low > max(1.0, _REGULAR * middle, min(blur, middle / 3)):
        return None
    # Several steps in a row are one long stall.
    if middle < 2:
        return None
    if blur > 0:
        return round(float(intervals.mean()))
    return Counter(intervals.tolist()).most_common(1)[0][0]


# ---- drift ----


def _drift(steps: np.ndarray, seconds: Float[np.ndarray, " lines"]) -> Drift | None:
    """A trend or a jump of the usual steps, where it is certain and worth a word."""
    if len(seconds) < _LEAST_DRIFT_LINES:
        return None
    trend = _trend(steps, seconds)
    jump = _jump(steps, seconds)
    candidates = []
    for candidate in (trend, jump):
        if candidate is not None and abs(candidate[0].change) > _LEAST_DRIFT:
            candidates.append(candidate)
    if not candidates:
        return None
    # Each comes with the residual that it leaves: the one that explains more counts.
    drift, _ = min(candidates, key=lambda candidate: candidate[1])
    return drift


def _trend(steps: np.ndarray, seconds: Float[np.ndarray, " lines"]) -> tuple[Drift, float] | None:
    """A line and its squared residuals, if Mann and Kendall's test finds a certain trend."""
    n = len(seconds)

    # Mann-Kendall: the sum of the signs of all pairwise differences has mean 0 and variance n (n
    # - 1) (2 n + 5) / 18 without a trend.
    signs = np.sign(seconds[None, :] - seconds[:, None])
    score = float(np.triu(signs, 1).sum())
    deviation = sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if abs(score) < _CERTAIN_Z * deviation:
        return None
    slope, offset = np.polyfit(steps, seconds, 1)
    fitted = slope * steps + offset
    squared_residuals = float(((seconds - fitted) ** 2).sum())
    change = float(fitted[-1] / fitted[0] - 1)
    return Drift(kind="trend", change=change, at_step=int(steps[0])), squared_residuals


def _jump(steps: np.ndarray, seconds: Float[np.ndarray, " lines"]) -> tuple[Drift, float] | None:
    """The best cut into two levels and its squared residuals, if they differ for certain."""
    n = len(seconds)
    margin = max(3, ceil(n / 20))
    best: tuple[Drift, float] | None = None
    for cut in range(margin, n - margin + 1):
        before = seconds[:cut]
        after = seconds[cut:]

        # Pooled variance of two levels, and the standard error of their difference.
        squares_before = ((before - before.mean()) ** 2).sum()
        squares_after = ((after - after.mean()) ** 2).sum()
        squares = float(squares_before + squares_after)
        error = sqrt(squares / max(n - 2, 1) * (1 / len(before) + 1 / len(after)))
        # The cut was chosen among many, and the best of many cuts needs stronger evidence than a
        # single one.
        if abs(after.mean() - before.mean()) < 2 * _CERTAIN_Z * error:
            continue
        if best is None or squares < best[1]:
            change = float(after.mean() / before.mean() - 1)
            best = Drift(kind="jump", change=change, at_step=int(steps[cut])), squares
    return best
