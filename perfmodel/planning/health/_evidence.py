"""Probabilities of faults, given the measured step, timers and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, pi, sqrt
from typing import Final

from perfmodel.ingest.logs import PhaseTimer
from perfmodel.planning.health._causes import DATA_LOADING, SLOW_RANK, Fault, Severity

_NO_FAULT_WEIGHT: Final = 3.0
"""Prior weight of a run without any fault, beside the faults' own."""
_LEAST_DEVIATION: Final = 0.03
"""Least standard deviation of a log step time: no two runs of one site are nearer."""
_SHARE_DEVIATION: Final = 0.3
"""Standard deviation of the share of the excess that a timer shows."""
_SPREAD_DEVIATION: Final = 0.06
_SPREAD_DEVIATION_IN_PIPELINES: Final = 0.15
"""Standard deviation of log(slowest / fastest rank's compute time); stages of a pipeline differ by themselves."""
_MEMORY_DEVIATION: Final = 0.15


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Measured figures from the log, with the expected ones."""

    steady_s: float
    """Usual step before any drift."""
    expected_s: float
    """Predicted step."""
    deviation: float
    """Standard deviation of the log step time over known sites."""
    expected_sync_s: float
    """Predicted seconds of reductions and gathers of weights that the step waits for."""
    timers: Mapping[str, PhaseTimer]
    """Phases of a step on the fastest and slowest rank, by name."""
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


@dataclass(frozen=True, kw_only=True)
class Likely:
    """A fault with how likely it is."""

    fault: Fault
    probability: float
    severity: Severity
    """The likeliest severity of the fault."""
    explains_s: float
    """Seconds of the excess that the fault explains, on average over its severities."""


def weigh(observed: Observed, candidates: Sequence[Fault]) -> tuple[list[Likely], float]:
    """Compute the probability of each fault, likeliest first, and of no fault.

    One fault at most is assumed. Given a fault of some severity, the log of measured over predicted is normal around
    the ratio that the fault explains, with the deviation of known sites. Timers and memory count too, where the log has
    them.
    """
    # Bayes' rule over faults and severities: prior times likelihood, normalised together with the
    # hypothesis of no fault.
    weights: list[tuple[Fault, list[float]]] = []
    for fault in candidates:
        by_severity = []
        for severity in fault.severities:
            by_severity.append(fault.prior * severity.weight * _likelihood(observed, fault, severity))
        weights.append((fault, by_severity))
    none = _NO_FAULT_WEIGHT * _likelihood(observed, None, None)
    total = none + sum(sum(by_severity) for _, by_severity in weights)
    likely = []
    for fault, by_severity in weights:
        fault_weight = sum(by_severity)
        if fault_weight <= 0:
            continue

        # The likeliest severity is named. What the fault explains is a mean over all severities
        # by posterior weight, and at most the whole excess.
        best = max(range(len(by_severity)), key=lambda i, by_severity=by_severity: by_severity[i])
        gain_s = 0.0
        for severity, weight in zip(fault.severities, by_severity, strict=True):
            gain_s += weight * max(0.0, severity.step_s - observed.expected_s)
        likely.append(
            Likely(
                fault=fault,
                probability=fault_weight / total,
                severity=fault.severities[best],
                explains_s=min(gain_s / fault_weight, observed.excess_s),
            )
        )
    return sorted(likely, key=lambda cause: -cause.probability), none / total


def _likelihood(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    step_s = observed.expected_s if severity is None else severity.step_s
    deviation = max(observed.deviation, _LEAST_DEVIATION)
    likelihood = _normal(log(observed.steady_s / step_s), deviation)
    likelihood *= _of_compute_spread(observed, fault, severity)
    likelihood *= _of_timer_shares(observed, fault, severity)
    return likelihood * _of_memory(observed, severity)


def _normal(distance: float, deviation: float) -> float:
    return exp(-0.5 * (distance / deviation) ** 2) / (deviation * sqrt(2 * pi))


def _of_compute_spread(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """One slow device computes longer than the fastest; all other faults leave the ranks alike."""
    timer = observed.timers.get("compute")
    if timer is None or timer.least_s <= 0 or timer.least_s == timer.most_s:
        return 1.0
    slower = 1.0
    if fault and severity and fault.name == SLOW_RANK:
        slower = severity.step_s / observed.expected_s
    deviation = _SPREAD_DEVIATION_IN_PIPELINES if observed.pipeline else _SPREAD_DEVIATION
    return _normal(log(timer.most_s / timer.least_s) - log(slower), deviation)


def _of_timer_shares(observed: Observed, fault: Fault | None, severity: Severity | None) -> float:
    """Timers show which share of the excess is in gradients and weights, in waits for other ranks, and in data."""
    excess_s = observed.excess_s

    # Shares of a tiny excess are noise.
    if excess_s < 0.05 * observed.expected_s:
        return 1.0
    name = fault.name if fault else ""
    likelihood = 1.0
    sync = observed.timers.get("gradient_sync")
    if sync is not None:
        gather = observed.timers.get("weight_gather")
        own_s = sync.least_s + (gather.least_s if gather else 0.0)
        gain_s = severity.step_s - observed.expected_s if severity else 0.0

        # Share of the excess that this fault would add to the synchronisation of gradients and
        # weights.
        in_sync = 0.0
        if severity is not None and severity.gradient_sync_s is not None and gain_s > 0:
            in_sync = (severity.gradient_sync_s - observed.expected_sync_s) / gain_s
        # A log of one rank shows its wait for a slow rank as communication.
        one_rank = sync.least_s == sync.most_s
        if one_rank and name == SLOW_RANK:
            in_sync = 1.0
        likelihood *= _of_share((own_s - observed.expected_sync_s) / excess_s, in_sync)

        # With several ranks in the log, the slow rank itself waits least: the spread of the
        # waiting times is the excess.
        if not one_rank:
            spread_s = sync.most_s - sync.least_s
            likelihood *= _of_share(spread_s / excess_s, 1.0 if name == SLOW_RANK else 0.0)
    data = observed.timers.get("data")
    if data is not None:
        likelihood *= _of_share(data.most_s / excess_s, 1.0 if name == DATA_LOADING else 0.0)
    return likelihood


def _of_share(share: float, expected: float) -> float:
    return _normal(min(max(share, 0.0), 1.5) - expected, _SHARE_DEVIATION)


def _of_memory(observed: Observed, severity: Severity | None) -> float:
    """A setting that changes the memory is only likely where the log's peak has changed with it."""
    if observed.peak_bytes is None or not observed.expected_peak_bytes:
        return 1.0
    expected = observed.expected_peak_bytes
    if severity is not None and severity.peak_bytes is not None:
        expected = severity.peak_bytes.get(observed.peak_counter, expected)
    return _normal(log(observed.peak_bytes / expected), _MEMORY_DEVIATION)
