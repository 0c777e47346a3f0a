"""A run compared with its prediction: the record, and its verdict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from perfmodel.display import health_html, health_page
from perfmodel.ingest.logs import PhaseTimer
from perfmodel.ingest.tables import write_text
from perfmodel.planning.health._other_job import OtherSetting
from perfmodel.planning.health._series import StepSeries
from perfmodel.planning.health._shown import Cause
from perfmodel.prediction import Prediction
from perfmodel.units import duration

Match = Literal["same job", "too fast", "too slow", "impossible"]
NAMED_CAUSES: Final = 3
DECIDED: Final = 0.5
"""A cause that the log does not show is likelier than all others together from this probability
on."""


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
    """Measured usual step relative to the predicted one, minus 1."""
    slower_than: float
    """Share of known sites of this kind that are faster with this job, by the prediction's
    interval."""
    healthy: bool
    """True where the step is usual for known sites and no fault is certain."""
    match: Match = "same job"
    """Whether the step can be one of the predicted job: `same job`; `too fast` and `too slow` if it
    lies far outside the interval and no fault explains it; `impossible` if the FLOPs alone would
    take longer at the peak rate."""
    least_s: float = 0.0
    """Time that the step's FLOPs take at the peak rate of the devices."""
    other_settings: tuple[OtherSetting, ...] = ()
    """Settings that would explain the step if the run had other values of them than the script;
    empty if the step can be one of the predicted job."""
    fault: Cause | None
    """A cause that is certain and accounts for a large part of the step."""
    no_fault_probability: float
    """Probability that the run has no fault: that a step is this slow on a healthy site."""
    causes: tuple[Cause, ...]
    """Causes, the likeliest first, `NAMED_CAUSES` at most."""
    next_measurement: str
    """Measurement that distinguishes between the causes, or confirms the only one; empty without a
    cause."""
    undecided: str
    """Why the log cannot tell the likeliest causes apart, and what to log in the next run; empty if
    it can."""
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
    """Bytes that the measured and the expected peak count: the bytes `reserved` by the allocator,
    or `allocated`."""
    expected_peak_bytes: float | None
    """Predicted peak, as the same counter shows it; None where it is not predicted."""
    timers: Mapping[str, PhaseTimer]
    """Phases of a step on the fastest and the slowest rank, where the log has timers."""

    @property
    def suspected(self) -> Cause | None:
        """A hidden fault that is likelier than all others together and than none, although the step
        is not unusual."""
        guessed = [cause for cause in self.causes if DECIDED <= cause.probability < 1]
        return guessed[0] if guessed and self.healthy else None

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
            "match": self.match,
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
            "other_settings": [asdict(other) for other in self.other_settings],
            "next_measurement": self.next_measurement,
            "undecided": self.undecided,
            "contradictions": list(self.contradictions),
            "remarks": list(self.remarks),
        }


def _verdict(health: RunHealth) -> str:
    """Say whether the run is healthy, and where its step lies among comparable sites."""
    share = f"{health.slower_than:.0%}" if health.slower_than < 0.995 else "more than 99 %"
    place = f"slower than at {share} of comparable sites"
    if health.slower_than < 0.5:
        share = f"{1 - health.slower_than:.0%}" if health.slower_than > 0.005 else "more than 99 %"
        place = f"faster than at {share} of comparable sites"
    match health.match:
        case "impossible":
            return (
                f"not this job: the measured {duration(health.series.usual_s)} per step are less than the "
                f"{duration(health.least_s)} that its FLOPs take at the devices' peak rate"
            )
        case "too fast":
            return f"probably not this job: {place}, far below the predicted interval"
        case "too slow":
            return f"not healthy, or not this job: {place}, and slower than faults of usual size explain"
        case "same job":
            pass
    if health.healthy and health.suspected is not None:
        cause = health.suspected
        return f"in doubt: {cause.title} (probability {cause.probability:.0%}); the usual step is {place}"
    if health.healthy:
        but = ", but the log contradicts the script" if health.contradictions else ""
        return f"healthy{but}: {place}"
    if health.fault is None:
        likeliest = f"; likeliest cause: {health.causes[0].title}" if health.causes else ""
        return f"not healthy: {place}{likeliest}"
    return f"not healthy: {health.fault.title}; the usual step is {place}"
