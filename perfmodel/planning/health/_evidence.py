"""Probabilities of faults, given the measured step, timers and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod
from typing import Final

from perfmodel.ingest.logs import ClockRange, PhaseTimer
from perfmodel.planning.health._causes import DATA_LOADING, SLOW_RANK, Fault, Severity

_NO_FAULT_WEIGHT: Final = 3.0
"""Prior weight of a run without any fault, relative to the faults' priors."""
LEAST_DEVIATION: Final = 0.03
"""Least standard deviation of a log step time: no two runs of one site are nearer."""
_SHARE_DEVIATION: Final = 0.3
"""Standard deviation of the share of the excess that a timer shows."""
_SYNC_DEVIATION: Final = 0.5
"""Standard deviation of log(measured / predicted) seconds of gradient synchronisation. The
overlapped share is known less well than a whole step, so only a ratio of several counts as
evidence."""
_LEAST_SYNC: Final = 0.02
"""Share of the step below which synchronisation is noise; added to both sides of that ratio."""
_WAITS_ON_ONE_RANK: Final = 0.95
"""Probability that the rank in the log is one that waits for the slow rank."""
_BATCH_DEVIATION: Final = 0.05
"""Standard deviation of the log of how much longer a step takes with the final batch than with the
smallest. A site's own speed cancels out, so that this is narrower than a step's interval."""
_TAIL_SHARE: Final = 0.1
_TAIL_WIDTH: Final = 6.0
"""Share of logs whose timers or batches are off for other reasons, and how much wider they
scatter."""
_JUMP_DEVIATION: Final = 0.05
"""Standard deviation of log(step after a jump / step before it); a site's own speed cancels out."""
_SPREAD_DEVIATION: Final = 0.06
_SPREAD_DEVIATION_IN_PIPELINES: Final = 0.15
"""Standard deviation of log(slowest / fastest rank's compute time); stages of a pipeline differ
even in healthy runs."""
_PASSES_DEVIATION: Final = 0.1
"""Standard deviation of the log of the passes' share of a step; a site's own speed cancels out."""
_CLOCK_DEVIATION: Final = 0.12
"""Standard deviation of log(highest clock of the devices / boost clock): power limits lower healthy
clocks too."""
_CLOCK_SPREAD_DEVIATION: Final = 0.03
"""Standard deviation of log(lowest / highest clock) of healthy devices of one job."""
_SLOW_BY_CLOCK: Final = 0.5
"""Probability that the clock of a slow device shows that it is slow."""
_REDUCED_SHARE: Final = 0.5
"""Share of gradient reductions in the seconds of reductions and gathers of weights: both move as
many bytes."""
_MEMORY_DEVIATION: Final = 0.15


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Measured figures from the log, with the expected ones."""

    steady_s: float
    """Usual step before any drift."""
    expected_s: float
    """Predicted step time."""
    deviation: float
    """Standard deviation of the log step time over known sites."""
    expected_sync_s: float
    """Predicted seconds of reductions and gathers of weights that the step waits for."""
    times_sync: bool
    """Whether the log times reductions and gathers of weights apart from the passes."""
    one_rank: bool
    """Whether timers are those of one rank, which meets the others only in communication."""
    timers: Mapping[str, PhaseTimer]
    """Phases of a step on the fastest and slowest rank, by name."""
    expected_passes_s: float
    """Predicted seconds of passes without waiting between stages."""
    passes_ratio: float | None
    """Measured over predicted seconds of passes on the fastest rank; None where the log does not
    time them."""
    clocks: ClockRange | None
    """Clocks of the devices; None where the log does not report them."""
    usual_clock_hz: float
    """Boost clock of the devices."""
    jump: float | None
    """Step after a jump over the step before it; None where the steps do not become slower at
    once."""
    batch_ratio: float | None
    """Measured step with the final batch over that with the smallest; None where the batch does not
    grow."""
    expected_small_batch_s: float | None
    """Predicted step with the smallest batch."""
    pipeline: bool
    """Whether there are pipeline stages, of which each has its own compute time."""
    peak_bytes: float | None
    """Peak of memory in the log; None where it has none."""
    peak_counter: str
    """Name of the counter that shows the peak."""
    expected_peak_bytes: float | None
    """Predicted peak by the same counter."""

    @property
    def excess_s(self) -> float:
        """Seconds by which the typical step is longer than expected."""
        return max(0.0, self.steady_s - self.expected_s)

    @property
    def sync_s(self) -> float | None:
        """Seconds of reductions and gathers of weights on the rank that waits least for others;
        None without timers."""
        sync = self.timers.get("gradient_sync")
        if sync is None or not self.times_sync:
            return None
        gather = self.timers.get("weight_gather")
        return sync.least_s + (gather.least_s if gather else 0.0)

    @property
    def most_explained_s(self) -> float:
        """Most seconds a fault can explain: a fast site with a fault may look normal."""
        sync_s = self.sync_s
        return (
            self.excess_s if sync_s is None else max(self.excess_s, sync_s - self.expected_sync_s)
        )


@dataclass(frozen=True, kw_only=True)
class Likely:
    """A fault and how likely it is."""

    fault: Fault
    probability: float
    severity: Severity
    """The likeliest severity of the fault."""
    explains_s: float
    """Seconds of the excess that the fault explains, on average over its severities."""


def weigh(observed: Observed, candidates: Sequence[Fault]) -> tuple[list[Likely], float]:
    """Compute the probability of each fault, likeliest first, and of no fault.

    One fault at most is assumed. Given a fault of some severity, the log of measured over predicted
    is normal around the ratio that the fault explains, with the deviation of known sites. Timers,
    memory, and how the step depends on a growing batch count too, where the log has them. If steps
    become slower at once, the step before is measured on the same site, and what begins there is
    weighed by the jump alone.
    """
    if observed.jump is not None:
        candidates = [fault for fault in candidates if fault.may_begin_later]
    # Bayes' rule over faults and severities: prior times likelihood, normalised together with the
    # hypothesis of no fault.
    weights: list[tuple[Fault, list[float]]] = []
    for fault in candidates:
        by_severity = []
        for severity in fault.severities:
            by_severity.append(
                fault.prior * severity.weight * likelihood(observed, fault, severity)
            )
        weights.append((fault, by_severity))
    none = _NO_FAULT_WEIGHT * likelihood(observed, None, None)
    total = none + sum(sum(by_severity) for _, by_severity in weights)
    if total == 0.0:
        # Every likelihood is too small for a float: nothing here explains the log, and it says
        # nothing about faults.
        return [], _NO_FAULT_WEIGHT / (_NO_FAULT_WEIGHT + sum(f.prior for f in candidates))
    likely = []
    for fault, by_severity in weights:
        fault_weight = sum(by_severity)
        if fault_weight <= 0:
            continue

        # The likeliest severity is named. A fault explains the mean over its severities by
        # posterior weight, and at most the whole excess.
        best = max(range(len(by_severity)), key=lambda i, by_severity=by_severity: by_severity[i])
        gain_s = 0.0
        for severity, weight in zip(fault.severities, by_severity, strict=True):
            gain_s += weight * max(0.0, severity.step_s - observed.expected_s)
        likely.append(
            Likely(
                fault=fault,
                probability=fault_weight / total,
                severity=fault.severities[best],
                explains_s=min(gain_s / fault_weight, observed.most_explained_s),
            )
        )
    return sorted(likely, key=lambda cause: -cause.probability), none / total


def likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Likelihood of what was observed, given a fault of this severity (None: no fault)."""
    step_s = observed.expected_s if severity is None else severity.step_s

    # Timers are medians over the run, which mix the steps before a jump with those after it.
    if observed.jump is not None:
        return _normal(log(observed.jump) - log(step_s / observed.expected_s), _JUMP_DEVIATION)
    deviation = max(observed.deviation, LEAST_DEVIATION)
    step_likelihood = _normal(log(observed.steady_s / step_s), deviation)
    other_likelihoods = (
        _batch_likelihood(observed, severity),
        _spread_likelihood(observed, fault, severity),
        _sync_likelihood(observed, fault, severity),
        _pass_likelihood(observed, fault, severity),
        _clock_likelihood(observed, fault, severity),
        _timer_share_likelihood(observed, fault, severity),
        _memory_likelihood(observed, severity),
    )
    return step_likelihood * prod(other_likelihoods)


def _batch_likelihood(observed: Observed, severity: Severity | None) -> float:
    """Likelihood of the step's growth with the batch: slow links cost once a step, slow hosts and
    devices in every micro-batch."""
    if observed.batch_ratio is None or observed.expected_small_batch_s is None:
        return 1.0
    expected = observed.expected_s / observed.expected_small_batch_s
    if severity is not None and severity.small_batch_s is not None:
        expected = severity.step_s / severity.small_batch_s
    return _heavy_tailed(log(observed.batch_ratio / expected), _BATCH_DEVIATION)


def _sync_likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Likelihood of the measured seconds of reductions and gathers of weights under a fault."""
    if observed.sync_s is None:
        return 1.0
    expected_s = observed.expected_sync_s
    if severity is not None and severity.gradient_sync_s is not None:
        expected_s = severity.gradient_sync_s
    likelihood = _communication_likelihood(observed, expected_s, waiting_s=0.0)

    # A rank counts its wait for a slow one as communication, unless it is the slow one itself or
    # has met the others at a barrier before, as in Megatron-LM's timers.
    timer = observed.timers["gradient_sync"]
    if (
        fault is not None
        and severity is not None
        and fault.name == SLOW_RANK
        and timer.least_s == timer.most_s
    ):
        waiting_s = max(0.0, severity.step_s - observed.expected_s)
        waits = _communication_likelihood(observed, expected_s, waiting_s)
        share = _WAITS_ON_ONE_RANK if observed.one_rank else 0.5
        likelihood = (1 - share) * likelihood + share * waits
    return likelihood


def _communication_likelihood(observed: Observed, expected_s: float, waiting_s: float) -> float:
    """Likelihood of the measured reductions and gathers, if these take `expected_s` and a wait for
    a slow rank."""
    timers = observed.timers
    floor_s = _LEAST_SYNC * observed.expected_s
    gather = timers.get("weight_gather")
    if gather is None:
        measured_s = timers["gradient_sync"].least_s
        return _heavy_tailed(
            log((measured_s + floor_s) / (expected_s + waiting_s + floor_s)), _SYNC_DEVIATION
        )

    # Ranks wait in the first communication after the passes, the reduction. A slow link lengthens
    # both.
    reduced_s = _REDUCED_SHARE * expected_s + waiting_s
    gathered_s = (1 - _REDUCED_SHARE) * expected_s
    reduction = log((timers["gradient_sync"].least_s + floor_s) / (reduced_s + floor_s))
    gathering = log((gather.least_s + floor_s) / (gathered_s + floor_s))
    return _heavy_tailed(reduction, _SYNC_DEVIATION) * _heavy_tailed(gathering, _SYNC_DEVIATION)


def _pass_likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Likelihood of the passes' share of the step: slow hosts and clocks lengthen passes, slow
    links the rest."""
    if observed.passes_ratio is None:
        return 1.0
    step_ratio = passes_ratio = 1.0
    if severity is not None:
        step_ratio = severity.step_s / observed.expected_s
        if severity.passes_s is not None and observed.expected_passes_s > 0:
            passes_ratio = severity.passes_s / observed.expected_passes_s
    measured = log(observed.passes_ratio) - log(observed.steady_s / observed.expected_s)
    deviation = _SPREAD_DEVIATION_IN_PIPELINES if observed.pipeline else _PASSES_DEVIATION
    likelihood = _heavy_tailed(measured - log(passes_ratio / step_ratio), deviation)

    # Timers of one rank may be those of the slow one, whose passes take all of the longer step.
    if observed.one_rank and fault is not None and fault.name == SLOW_RANK:
        slow = _heavy_tailed(measured, deviation)
        likelihood = _WAITS_ON_ONE_RANK * likelihood + (1 - _WAITS_ON_ONE_RANK) * slow
    return likelihood


def _clock_likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Likelihood of the clocks in a straggler report: low on one device, on all, or normal."""
    if observed.clocks is None or observed.clocks.least_hz <= 0:
        return 1.0
    clocks = observed.clocks

    # The highest clock shows whether all devices are slow, the lowest whether one of them is.
    share = 1.0 if severity is None else severity.clock_share
    highest = log(clocks.most_hz / observed.usual_clock_hz / share)
    likelihood = _heavy_tailed(highest, _CLOCK_DEVIATION)
    spread = log(clocks.least_hz / clocks.most_hz)
    alike = _heavy_tailed(spread, _CLOCK_SPREAD_DEVIATION)
    if fault is None or severity is None or fault.name != SLOW_RANK:
        return likelihood * alike

    # A slow rank is slow by its clock, which is then as much lower as the step is longer, or for
    # another reason, which clocks do not show.
    slower = _heavy_tailed(spread + log(severity.step_s / observed.expected_s), _SPREAD_DEVIATION)
    return likelihood * ((1 - _SLOW_BY_CLOCK) * alike + _SLOW_BY_CLOCK * slower)


def _normal(distance: float, deviation: float) -> float:
    """A normal density, but for the factor 1 / sqrt(2 pi) that all faults have in common."""
    return exp(-0.5 * (distance / deviation) ** 2) / deviation


def _heavy_tailed(distance: float, deviation: float) -> float:
    """A normal density with a wide tail, so that an observation which no fault explains makes none
    of them certain."""
    wide = _normal(distance, _TAIL_WIDTH * deviation)
    return (1 - _TAIL_SHARE) * _normal(distance, deviation) + _TAIL_SHARE * wide


def _spread_likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Likelihood of the spread of compute times: one slow device spreads them, other faults slow
    all ranks alike."""
    timer = observed.timers.get("compute", observed.timers.get("forward"))
    if timer is None or timer.least_s <= 0 or timer.least_s == timer.most_s:
        return 1.0
    slower = 1.0
    if fault and severity and fault.name == SLOW_RANK:
        slower = severity.step_s / observed.expected_s
    deviation = _SPREAD_DEVIATION_IN_PIPELINES if observed.pipeline else _SPREAD_DEVIATION
    return _normal(log(timer.most_s / timer.least_s) - log(slower), deviation)


def _timer_share_likelihood(
    observed: Observed, fault: Fault | None, severity: Severity | None
) -> float:
    """Likelihood of the timers' shares of the excess: waits for other ranks, and for data."""
    excess_s = observed.excess_s

    # Shares of a tiny excess are noise.
    if excess_s < 0.05 * observed.expected_s:
        return 1.0
    name = fault.name if fault else ""
    likelihood = 1.0
    sync = observed.timers.get("gradient_sync")
    if sync is not None and sync.least_s != sync.most_s:
        # The slow rank itself waits least: the spread of the waiting times is the excess. With a
        # barrier before each timer (Megatron-LM's default at level 1) all ranks have waited there.
        spread = (sync.most_s - sync.least_s) / excess_s
        spread_likelihood = _share_likelihood(spread, 0.0)
        if name == SLOW_RANK:
            spread_likelihood = 0.5 * (spread_likelihood + _share_likelihood(spread, 1.0))
        likelihood *= spread_likelihood
    data = observed.timers.get("data")
    if data is not None:
        likelihood *= _share_likelihood(
            data.most_s / excess_s, 1.0 if name == DATA_LOADING else 0.0
        )
    return likelihood


def _share_likelihood(share: float, expected: float) -> float:
    return _normal(min(max(share, 0.0), 1.5) - expected, _SHARE_DEVIATION)


def _memory_likelihood(observed: Observed, severity: Severity | None) -> float:
    """Likelihood of the log's peak memory, which a fault that changes memory has changed."""
    if observed.peak_bytes is None or not observed.expected_peak_bytes:
        return 1.0
    expected = observed.expected_peak_bytes
    if severity is not None and severity.peak_bytes is not None:
        expected = severity.peak_bytes.get(observed.peak_counter, expected)
    return _normal(log(observed.peak_bytes / expected), _MEMORY_DEVIATION)
