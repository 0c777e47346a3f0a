"""Times a call by repeating it until the median is precise enough.

Outlier policy: a sample is set aside for a cause, never for its value. The one cause is
interference: other work held the processor for more than a set share of the sample. Slow samples
without it stay; the median barely moves by them and the standard deviation shows them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.measure.timing._meter import Meter
from perfmodel.units import positive


def median_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Confidence interval of the median of independent values, by two order statistics.

    The number of values below the true median is binomial(n, 1/2) whatever the distribution, so
    [x_(j+1), x_(n-j)] covers it with probability 1 - 2 P(B <= j) (order statistics counted from
    one); the largest j that keeps `confidence` is taken. Le Boudec, Performance Evaluation of
    Computer and Communication Systems, theorem 2.1; recommended for timings by Hoefler and Belli,
    SC15, section 3.2.

    Returns:
        (low, high), or `None` where no such interval exists (fewer than 6 values at 95 %).

    Raises:
        PerfModelError: if `confidence` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise PerfModelError(f"confidence must lie between 0 and 1, got {confidence!r}")
    # Sum the binomial coefficients of 0, 1, ... from below: in whole numbers, as 2^n outgrows
    # floating point. `ways` is the coefficient of the next index, `cut` the last index that keeps
    # the confidence.
    n = len(values)
    below = 0
    ways = 1
    cut = -1
    while cut + 1 < n / 2:
        below += ways
        if 2 * below / (1 << n) > 1 - confidence:
            break
        cut += 1
        ways = ways * (n - cut) // (cut + 1)
    if cut < 0:
        return None
    ordered = sorted(values)
    return ordered[cut], ordered[n - 1 - cut]


def relative_half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Half-width of the median's interval relative to the median; infinite without an interval."""
    # Infinite is wider than any rule allows, so that sampling goes on.
    interval = median_interval(values, confidence)
    if interval is None:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / median(values)


WARMUP_CALLS: Final = 2
"""Calls before the first sample, whose times do not count."""
MIN_CLEAN: Final = 3
"""Undisturbed samples that suffice to leave the disturbed ones out."""


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Stopping rule of a measurement, and selection of samples."""

    half_width: float = 0.02
    """Wanted half-width of the median's confidence interval, as a share of the median."""
    confidence: float = 0.95
    """Probability that the interval covers the true median."""
    min_repeats: int = 8
    """Number of kept samples before the interval is checked; at 95 % it needs at least 6."""
    max_repeats: int = 200
    """Undisturbed samples after which the measurement ends, however wide the interval is."""
    max_s: float = 1.0
    """Time after which no further sample starts, including samples that are set aside."""
    min_sample_s: float = 2e-3
    """Calls are bundled until a sample takes this long, well above the clock's resolution."""
    interference_limit: float = 0.06
    """Largest share of a sample's processor time that others may take; samples above it are set
    aside."""

    def __post_init__(self) -> None:
        for name in ("half_width", "max_s", "min_sample_s"):
            positive(f"stopping rule: {name}", getattr(self, name))
        if not 0 < self.confidence < 1 or not 0 <= self.interference_limit < 1:
            raise PerfModelError(
                "stopping rule: confidence and interference_limit are shares between 0 and 1"
            )
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise PerfModelError(
                f"stopping rule: 1 <= min_repeats <= max_repeats, got {self.min_repeats} and {self.max_repeats}"
            )

    def resolved_by(self, meter: Meter) -> "StoppingRule":
        """The rule with samples long enough for the meter's counters."""
        return replace(self, min_sample_s=max(self.min_sample_s, meter.min_sample_s))


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed bundle of calls."""

    calls: int
    wall_s: float
    """Seconds of all the calls together."""
    interference: float
    """Share [0, 1] of the processor time within `wall_s` that other work took."""

    @property
    def call_s(self) -> float:
        """Mean seconds of a call."""
        return self.wall_s / self.calls


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Statistics of a call from the kept samples."""

    median_s: float
    std_s: float
    """Standard deviation over the kept samples; 0 for a single one."""
    n_repeats: int
    """Number of samples that were kept."""
    n_set_aside: int
    """Samples left out for interference; 0 if too few were clean and all are used."""
    half_width: float
    """Reached half-width as a share of the median; infinite below 6 samples."""
    interference: float
    """Mean interference of the samples used; above the rule's limit only if there were too few
    clean ones."""


SampleCalls = Callable[[int], Sample]
"""Function that runs a number of calls once and returns the time of all together."""


def time_calls(sample: SampleCalls, rule: StoppingRule) -> Timing:
    """Median time of one call.

    Warms up, bundles calls to `rule.min_sample_s`, then samples until the relative half-width of
    the median's confidence interval is within `rule.half_width` or a cap is reached. Testing the
    interval after each sample lowers its coverage a little below nominal; `rule.min_repeats` limits
    that. Where the time is up with fewer than `MIN_CLEAN` clean samples among disturbed ones, all
    samples are used and `Timing.interference` tells.

    Raises:
        PerfModelError: if a sample reports a time of zero or less (a broken clock).
    """
    for _ in range(WARMUP_CALLS):
        positive("time of a warm-up call", sample(1).wall_s)

    # Sample until the median is known well enough, or a cap is reached.
    clean_samples: list[Sample] = []
    disturbed: list[Sample] = []
    spent_s = 0.0
    calls = 1
    fastest_s = float("inf")
    while spent_s < rule.max_s and len(clean_samples) < rule.max_repeats:
        latest = sample(calls)
        positive("time of a sample", latest.wall_s)
        spent_s += latest.wall_s
        fastest_s = min(fastest_s, latest.call_s)

        # A sample too short to resolve anything is forgotten, and more calls are bundled.
        needed = ceil(rule.min_sample_s / fastest_s)
        if needed > 2 * calls and spent_s < rule.max_s:
            calls = needed
            continue

        if latest.interference > rule.interference_limit:
            disturbed.append(latest)
        else:
            clean_samples.append(latest)
        if len(clean_samples) >= rule.min_repeats:
            clean_s = [clean.call_s for clean in clean_samples]
            if relative_half_width(clean_s, rule.confidence) <= rule.half_width:
                break

    # Disturbed samples are better than next to none.
    enough_clean = len(clean_samples) >= MIN_CLEAN or not disturbed
    used = clean_samples if enough_clean else [*clean_samples, *disturbed]
    times_s = [used_sample.call_s for used_sample in used]
    return Timing(
        median_s=median(times_s),
        std_s=stdev(times_s) if len(used) > 1 else 0.0,
        n_repeats=len(used),
        n_set_aside=len(disturbed) if enough_clean else 0,
        half_width=relative_half_width(times_s, rule.confidence),
        interference=fmean(used_sample.interference for used_sample in used),
    )


def run_for(sample: SampleCalls, duration_s: float, bundle_s: float) -> None:
    """Run calls one after another for a while, in bundles of about `bundle_s`.

    Under a power limit a device lowers its clock within seconds of work, and keeps it low while the
    work goes on.
    """
    spent_s, calls = 0.0, 1
    while spent_s < duration_s:
        latest = sample(calls)
        positive("time of a sample", latest.wall_s)
        spent_s += latest.wall_s
        calls = max(1, ceil(bundle_s / latest.call_s))


class Effort(NamedTuple):
    """Seconds of one measurement."""

    least: float
    """Effort on a quiet machine, where the fewest samples suffice."""
    most: float
    """Effort where the interval stays too wide and the rule's caps end the sampling."""


def measuring_s(rule: StoppingRule, call_s: float) -> Effort:
    """Seconds that `time_calls` takes for a call of `call_s`, by its stopping rule.

    Compiling the program and filling its inputs come on top.
    """
    return Effort(
        least=sampling_s(rule, call_s, rule.min_repeats),
        most=sampling_s(rule, call_s, rule.max_repeats),
    )


def sampling_s(rule: StoppingRule, call_s: float, samples: int) -> float:
    """Seconds of the warm-up and a number of samples.

    Calls of less than half of `rule.min_sample_s` are bundled to samples that long; no sample
    starts after `rule.max_s`.
    """
    # Bundling begins where a sample would need more than twice the calls, as in `time_calls`. The
    # last sample starts before `rule.max_s` and ends after it.
    sample_s = call_s if 2 * call_s >= rule.min_sample_s else rule.min_sample_s
    return WARMUP_CALLS * call_s + min(samples * sample_s, rule.max_s + sample_s)
