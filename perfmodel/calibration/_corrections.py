"""Corrections of parameters by a profile, with standard errors."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import hypot, log, sqrt
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.calibration._profile_events import SideBySide, event_key, idle_s, issued
from perfmodel.ingest import Profile
from perfmodel.ingest.profiles import ActivityKind, Call, merged_intervals
from perfmodel.ops import Collective
from perfmodel.prediction import StepProblem, block_times, priced_events
from perfmodel.prediction.composition import overlap_loss
from perfmodel.prediction.sites import KERNEL_FACTORS, SKEW, Adjustment, factors_of
from perfmodel.spec import Layout

LEAST_SHARE: Final = 0.002
"""Least share of the step at which an event constrains a parameter."""
_SHAPED, NAMED_SD, _PARTLY = 0.02, 0.05, 0.10
"""Standard errors that remain for any number of calls: of families matched by shape, of families
matched only by name, and of families recorded on only a few of many devices."""
_LINK_PRIOR, _LINK_NOISE = 1.5, 0.05
"""Prior standard deviation of log factors of links, and the standard deviation of log times of
collectives around them."""
_HELD_UP: Final = 20.0
"""Multiple of the median time between two launches above which the host counts as held up rather
than issuing."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Value of one parameter (`perfmodel.prediction.sites.PARAMETERS`) from a profile, relative to
    the cost models."""

    name: str
    value: float
    """Log factor; for a loss or spread, the amount to add."""
    sd: float
    """Standard error of the value, in the same unit."""
    seconds: float
    """Measured seconds per device and step from which the value was computed."""
    calls: float
    """Measured calls per device and step."""


def corrections(
    problem: StepProblem,
    layout: Layout,
    profile: Profile,
    sides: SideBySide,
    slowed_s: float = 0.0,
) -> tuple[Correction, ...]:
    """Compute the corrections of uncorrected cost models from a profile of a layout's step.

    Args:
        slowed_s: seconds by which recording lengthened the step, all of them on the host between
            operators.
    """
    # Each source of time shows in another part of the profile, so they can be worked out one by
    # one.
    settled = [
        *_kernel_factors(problem, sides),
        *_link_factors(problem, sides),
        *_host_times(problem, layout, profile, sides, slowed_s),
        *_arrival_spread(problem, sides),
        *_contention_loss(problem, profile, sides),
        *_between_steps(profile, sides),
    ]

    # The hidden share comes last, because its prediction needs the measured times of everything
    # else.
    values = tuple((correction.name, correction.value) for correction in settled)
    so_far = Adjustment(device=problem.cluster.device.name, values=values)
    return (*settled, *_overlap_loss(problem.adjusted(so_far), layout, sides))


def _kernel_factors(problem: StepProblem, sides: SideBySide) -> Iterator[Correction]:
    """Factors of kernel families: measured over predicted seconds per device.

    If only a few devices of a pipeline were recorded, kernels of known shape are compared instead,
    each with its own prediction.
    """
    for family, (predicted_s, measured_s) in sides.families().items():
        is_negligible = measured_s < LEAST_SHARE * sides.predicted_step_s
        if family not in KERNEL_FACTORS or is_negligible or predicted_s <= 0:
            continue

        # Calls that were held up count as the median of their kernel.
        calls = [call for call in sides.calls if call.family == family]
        spread = _spread_over_steps(calls)
        shaped = [call for call in calls if call.op is not None]
        measured_s *= _usual_s(calls) / sum(call.time_s for call in calls)
        # The standard error has a floor, which is higher if few devices were recorded or few
        # kernels were matched.
        if sides.stands_for_all:
            floor = _SHAPED + (1 - sides.matched(family)) * (NAMED_SD - _SHAPED)
        elif sum(call.time_s for call in shaped) > 0.5 * sum(call.time_s for call in calls):
            shapes = [call.op for call in shaped if call.op]
            predicted_s = float(priced_events(problem, shapes).time_s.sum())
            measured_s = _usual_s(shaped)
            floor = _SHAPED
        else:
            floor = _PARTLY
        device_steps = sides.steps * len({call.device for call in calls})
        yield Correction(
            name=family,
            value=log(measured_s / predicted_s),
            sd=sqrt(floor**2 + spread**2),
            seconds=sum(call.time_s for call in calls) / device_steps,
            calls=len(calls) / device_steps,
        )


def _usual_s(calls: Sequence[Call]) -> float:
    """Return the time of calls if each call of known shape takes the median time of its kernel.

    Delays of milliseconds in some calls, such as other work of the machine, are not the kernel's.
    """
    times_by_kernel_s: dict[tuple, list[float]] = defaultdict(list)
    for number, call in enumerate(calls):
        times_by_kernel_s[call.name, number if call.op is None else call.op].append(call.time_s)
    return sum(len(times_s) * float(np.median(times_s)) for times_s in times_by_kernel_s.values())


def _spread_over_steps(calls: Sequence[Call]) -> float:
    """Standard error of the log of a call's usual time; 0.05 if there is only one step."""
    calls_by_step: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        calls_by_step[call.step].append(call)
    if len(calls_by_step) < 2:
        return 0.05
    log_s = np.log([_usual_s(step_calls) for step_calls in calls_by_step.values()])
    return float(np.std(log_s, ddof=1) / sqrt(len(calls_by_step)))


def _link_factors(problem: StepProblem, sides: SideBySide) -> Iterator[Correction]:
    """Latency and inverse bandwidth of each tier: least squares of the log times of collectives
    without their waits."""
    from scipy.optimize import least_squares

    observations = list(_observed_links(problem, sides))
    if not observations:
        return
    # An empty collective takes its latency alone, which is a share of the whole one's time.
    ops = [observation.op for observation in observations]
    seconds = priced_events(problem, ops).time_s
    empty = priced_events(problem, [replace(op, bytes=1.0) for op in ops]).time_s
    share = np.minimum(empty / seconds, 1.0)
    measured_s = np.array([observation.time_s for observation in observations])
    log_sd = np.array([observation.log_sd for observation in observations])

    # An event's latency and the rest of its time, which grows with the bytes, have a factor each.
    factors = [factors_of(op) for op in ops]
    names = sorted(set(chain.from_iterable(factors)))
    alpha = np.array([names.index(latency) for latency, _ in factors])
    beta = np.array([names.index(inverse_bandwidth) for _, inverse_bandwidth in factors])

    def residuals(x: Float[np.ndarray, " parameters"]) -> Float[np.ndarray, " residuals"]:
        predicted_s = seconds * (share * np.exp(x[alpha]) + (1 - share) * np.exp(x[beta]))
        return np.concatenate([np.log(predicted_s / measured_s) / log_sd, x / _LINK_PRIOR])

    # Start with one factor for all, their median.
    common_factor = float(np.median(np.log(measured_s / seconds)))
    fitted = least_squares(residuals, np.full(len(names), common_factor))

    # Laplace's approximation: covariance of the parameters from the curvature at the optimum.
    sd = np.sqrt(np.diag(np.linalg.inv(fitted.jac.T @ fitted.jac)))
    for i, name in enumerate(names):
        affected = [n for n in range(len(ops)) if i in (alpha[n], beta[n])]
        yield Correction(
            name=name,
            value=float(fitted.x[i]),
            sd=float(sd[i]),
            calls=sum(observations[n].calls for n in affected),
            seconds=sum(observations[n].time_s * observations[n].calls for n in affected),
        )


class _ObservedLink(NamedTuple):
    """Collectives of one size."""

    op: Collective
    time_s: float
    """Seconds of one collective, without its wait."""
    calls: float
    """Calls per device and step."""
    log_sd: float
    """Standard error of the log of the time. On systems that delay some calls by milliseconds, a
    few calls do not determine the mean well."""


def _observed_links(problem: StepProblem, sides: SideBySide) -> Iterator[_ObservedLink]:
    """Measured collectives by size. Those of unknown size are assumed to be the predicted ones of
    their kind (of any kind, if no name identifies it), all slower by one common factor."""
    known = []
    for total in sides.events.values():
        if isinstance(total.op, Collective):
            known.append((total, total.op))
    predicted = {event_key(op): op for _, op in known}
    per_node = problem.cluster.levels[0].size
    unsized_s: dict[str, float] = defaultdict(float)
    op_of: dict[tuple, Collective] = {}
    times_s_of: dict[tuple, list[float]] = defaultdict(list)
    for call, taken_s, _ in sides.collectives:
        if isinstance(call.op, Collective) and taken_s > 0:
            key = event_key(call.op)
            in_node = min(call.op.num_ranks, per_node)
            op_of.setdefault(key, predicted.get(key) or replace(call.op, ranks_per_node=in_node))
            times_s_of[key].append(taken_s)
        elif call.op is None:
            unsized_s[call.family] += taken_s
    n_devices = max(len({call.device for call in sides.calls}), 1)
    device_steps = sides.steps * n_devices

    # Calls of known size: their mean, less certain the more they scatter.
    for key, op in op_of.items():
        times_s = np.array(times_s_of[key])
        mean_s = float(times_s.mean())
        error_s = float(times_s.std()) / sqrt(len(times_s))
        yield _ObservedLink(
            op=op,
            time_s=mean_s,
            calls=len(times_s) / device_steps,
            log_sd=hypot(_LINK_NOISE, error_s / mean_s),
        )

    # Calls whose size the profile does not tell still say by which factor all of their kind are
    # off: predicted sizes, longer by the factor of their total time.
    for kind, total_s in unsized_s.items():
        same_kind = [(total, op) for total, op in known if kind in ("", total.family)]
        predicted_s = sum(total.predicted_s for total, _ in same_kind)
        factor = total_s / device_steps / max(predicted_s, 1e-300)
        for total, op in same_kind:
            if total.predicted_calls > 0 and factor > 0:
                time_s = total.predicted_s / total.predicted_calls * factor
                yield _ObservedLink(op, time_s, total.predicted_calls, _LINK_NOISE)


def _host_times(
    problem: StepProblem,
    layout: Layout,
    profile: Profile,
    sides: SideBySide,
    slowed_s: float,
) -> Iterator[Correction]:
    """Return the host's time per operator, and the gap between kernels that were issued in time. If
    the host computes itself, both are the time between its operators."""
    # Recording slows the host, so its overhead is subtracted from the host's part.
    gap_s = host_s = idle_s(profile, sides)["between kernels"]
    if profile.asynchronous:
        host_s = max(_issuing_s(sides) - slowed_s, 0.0)
    else:
        gap_s = host_s = max(gap_s - slowed_s, 0.0)
    n = issued(problem, layout)
    framework = problem.framework
    for name, measured_s, now_s in (
        ("kernel_gap_s", gap_s, framework.host.kernel_gap_s),
        ("host_op_s", host_s, framework.host.issue_s),
    ):
        if measured_s > 0 and now_s > 0:
            value = log(measured_s / n / now_s)
            yield Correction(name=name, value=value, sd=NAMED_SD, seconds=measured_s, calls=n)


def _issuing_s(sides: SideBySide) -> float:
    """Return the host's time to issue a step's kernels: the sum of times between launches, except
    where it was blocked."""
    total = []
    for device in {call.device for call in sides.calls}:
        for step in {call.step for call in sides.calls}:
            calls = [call for call in sides.calls if call.device == device and call.step == step]
            launched_s = np.sort([call.launched_s for call in calls])
            between_s = np.diff(launched_s[np.isfinite(launched_s)])
            if len(between_s):
                held_up_s = _HELD_UP * max(np.median(between_s), 1e-6)
                total.append(float(between_s[between_s <= held_up_s].sum()))
    return float(np.mean(total)) if total else 0.0


def _arrival_spread(problem: StepProblem, sides: SideBySide) -> Iterator[Correction]:
    """Spread s of the times at which ranks reach a collective: ranks before the last wait s sqrt(2
    ln n) on average. The known spread of the site's devices already explains a part."""
    waited = [
        wait_s / sqrt(2 * log(call.op.num_ranks))
        for call, _, wait_s in sides.collectives
        if isinstance(call.op, Collective) and call.op.num_ranks > 1 and call.family != "send_recv"
    ]
    # Few waits do not determine a spread. One rank sees only its own waits, so its spread is less
    # certain.
    ranks = len({collective.call.device for collective in sides.collectives})
    if len(waited) < 8:
        return
    kernels_s = sum(call.time_s for call in sides.calls if call.kind == ActivityKind.COMPUTE)
    device_spread_s = problem.site.kernel_spread(problem.cluster.device) * kernels_s / len(waited)

    # Part of the waits comes from devices that differ in speed, which the site's own spread
    # predicts already.
    spread_s = float(np.mean(waited))
    now_s = problem.framework.communication.collective_skew_s + device_spread_s
    sd = spread_s * (0.1 if ranks > 1 else 0.5) + 1e-6
    rank_steps = sides.steps * ranks
    yield Correction(
        name=SKEW,
        value=spread_s - now_s,
        sd=sd,
        seconds=float(np.sum(waited)) / rank_steps,
        calls=len(waited) / rank_steps,
    )


def _contention_loss(
    problem: StepProblem, profile: Profile, sides: SideBySide
) -> Iterator[Correction]:
    """Slowdown of kernels beside collectives, relative to the same kernels alone."""
    if not profile.asynchronous:
        return
    extra_s = overlapped_s = 0.0
    for device in {call.device for call in sides.calls}:
        for kernel in _overlapped_kernels([call for call in sides.calls if call.device == device]):
            extra_s += kernel.extra_s
            overlapped_s += kernel.overlapped_s

    device_steps = sides.steps * profile.devices
    if overlapped_s / device_steps > LEAST_SHARE * sides.predicted_step_s:
        # Seconds lost per second beside a collective, beyond the loss that the model already has.
        loss = min(max(extra_s / overlapped_s - overlap_loss(problem), 0.0), 1.0)
        yield Correction(
            name="dp_overlap_loss",
            value=loss,
            sd=0.05,
            seconds=overlapped_s / device_steps,
            calls=0.0,
        )


class _OverlappedKernel(NamedTuple):
    """The calls of a kernel beside collectives, compared with its calls without."""

    extra_s: float
    """Seconds beyond the median of the calls without collectives, summed over the calls."""
    overlapped_s: float
    """Seconds beside a collective, summed over the calls."""


def _overlapped_kernels(calls: Sequence[Call]) -> Iterator[_OverlappedKernel]:
    """Kernels of a device that run both beside collectives and without them."""
    collectives = [call for call in calls if call.kind == ActivityKind.COMMUNICATION]
    if not collectives:
        return
    starts, ends = np.array(sorted((call.start_s, call.end_s) for call in collectives)).T

    # A kernel counts as overlapped if nine tenths of it run beside a collective. Kernels with less
    # overlap are ignored.
    alone: dict[tuple, list[float]] = defaultdict(list)
    overlapped: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        if call.kind != ActivityKind.COMPUTE:
            continue
        key = (call.name, call.op)
        overlaps_s = np.minimum(ends, call.end_s) - np.maximum(starts, call.start_s)
        overlap_s = float(np.clip(overlaps_s, 0, None).sum())
        if overlap_s == 0:
            alone[key].append(call.time_s)
        elif overlap_s >= 0.9 * (call.end_s - call.start_s):
            overlapped[key].append((call.time_s, overlap_s))

    for key in overlapped.keys() & alone.keys():
        alone_s = float(np.median(alone[key]))
        yield _OverlappedKernel(
            extra_s=sum(time_s - alone_s for time_s, _ in overlapped[key]),
            overlapped_s=sum(overlap_s for _, overlap_s in overlapped[key]),
        )


def _overlap_loss(problem: StepProblem, layout: Layout, sides: SideBySide) -> Iterator[Correction]:
    """Exposed share of the collectives that are predicted to hide behind kernels; 1 if the
    framework waits for every collective. The prediction uses measured times, because longer
    collectives hide less."""
    # Predicted share that hides, with the measured times of everything else.
    blocks = block_times(problem, layout)
    is_collective = np.array([group != "" for group in blocks.groups])
    seconds = (blocks.counts * blocks.times.time_s)[:, :, is_collective]
    predicted_s = float(seconds.sum())
    hidden_s = float((seconds * (1 - blocks.exposed[:, :, is_collective])).sum())
    keys = {event_key(blocks.ops[place]) for place in np.flatnonzero(is_collective).tolist()}
    collectives = []
    for collective in sides.collectives:
        op = collective.call.op
        if op is not None and event_key(op) in keys:
            collectives.append(collective)
    total_s = sum(collective.moving_s for collective in collectives)
    if not collectives or hidden_s < 0.05 * predicted_s:
        return

    # Measured share that hides: seconds of collectives during which a kernel ran on the same
    # device.
    devices = {collective.call.device for collective in collectives}
    hidden_measured_s = 0.0
    for device in devices:
        kernels = [
            call
            for call in sides.calls
            if call.device == device and call.kind == ActivityKind.COMPUTE
        ]
        start_s = np.array([call.start_s for call in kernels])
        end_s = np.array([call.end_s for call in kernels])
        starts_s, ends_s = merged_intervals(start_s, end_s)
        for call, moving_s, _ in collectives:
            if call.device != device:
                continue
            # The wait for other ranks comes first. Kernels cannot hide it.
            moves_from_s = call.end_s - moving_s
            over_s = np.minimum(ends_s, call.end_s) - np.maximum(starts_s, moves_from_s)
            hidden_measured_s += float(np.clip(over_s, 0, None).sum())
    measured_share = hidden_measured_s / total_s
    share = measured_share / (hidden_s / predicted_s)
    device_steps = sides.steps * len(devices)
    yield Correction(
        name="tp_overlap_loss",
        value=min(max(1 - share, 0.0), 1.0),
        sd=0.05,
        seconds=total_s / device_steps,
        calls=len(collectives) / device_steps,
    )


def _between_steps(profile: Profile, sides: SideBySide) -> Iterator[Correction]:
    """Time from the end of a step on its last device to the start of the next on its first."""
    parts = profile.trace.steps()
    if len(parts) < 2:
        return
    # The median, since a step now and then saves a checkpoint or logs.
    gaps_s = [max(b.start_s.min() - a.end_s.max(), 0.0) for a, b in pairwise(parts)]
    idle = float(np.median(gaps_s))
    if idle > LEAST_SHARE * sides.predicted_step_s:
        yield Correction(
            name="step_overhead_s",
            value=idle,
            sd=0.2 * idle,
            seconds=idle,
            calls=1.0,
        )
