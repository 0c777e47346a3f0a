"""Compares predicted and measured seconds per device and step, by event and family."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.display import short_repr
from perfmodel.errors import PerfModelError
from perfmodel.ingest import Profile
from perfmodel.ingest.profiles import ActivityKind, Call
from perfmodel.ops import (
    Attention,
    Collective,
    Gemm,
    MemoryBound,
    Op,
    OptimizerStep,
    family_with_bmm,
)
from perfmodel.prediction import StepProblem, event_shares, priced_events
from perfmodel.spec import Layout

GAPS, WAITS = "gaps between kernels", "collectives wait for other ranks"
_KERNEL_GAP_S: Final = 20e-6
"""Longest idle time of a device that counts as a gap between kernels; longer ones are waits."""
Key = tuple[Any, ...]
"""Key of an event; two events with equal keys are the same event on both sides."""


@dataclass
class Total:
    """Totals of an event on a device in a step."""

    label: str
    family: str
    op: Op | None
    """The op of one of the calls, if its shape is known."""
    predicted_s: float = 0.0
    critical_s: float = 0.0
    """Seconds of the predicted step's critical path."""
    predicted_calls: float = 0.0
    measured_s: float = 0.0
    measured_calls: float = 0.0


class CollectiveCall(NamedTuple):
    """A rank's call of a collective, of which a part is a wait for the ranks that come later."""

    call: Call
    moving_s: float
    """Seconds that it takes after the last rank has arrived."""
    wait_s: float
    """Seconds that the rank waited before."""


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide:
    """One layout's step as predicted and as profiled."""

    events: dict[Key, Total]
    predicted_step_s: float
    predicted_idle_s: dict[str, float]
    """Idle seconds on the predicted step's critical path."""
    steps: int
    stands_for_all: bool
    """Whether the recorded devices represent all devices: either all were recorded, or all do the
    same work."""
    calls: tuple[Call, ...]
    """Measured calls of whole steps."""
    collectives: tuple[CollectiveCall, ...]
    """The collectives among these calls, apart from their waits."""

    def __repr__(self) -> str:
        return short_repr(self)

    def families(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured seconds by family."""
        seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for total in self.events.values():
            seconds[total.family][0] += total.predicted_s
            seconds[total.family][1] += total.measured_s
        return {name: (predicted, measured) for name, (predicted, measured) in seconds.items()}

    def matched(self, family: str) -> float:
        """Share of a family's measured seconds whose event was predicted."""
        family_totals = [total for total in self.events.values() if total.family == family]
        measured_of_both_s = sum(
            total.measured_s for total in family_totals if total.predicted_s > 0
        )
        return measured_of_both_s / max(sum(total.measured_s for total in family_totals), 1e-300)


def side_by_side(problem: StepProblem, layout: Layout, profile: Profile) -> SideBySide:
    """Events of a layout's step, predicted and measured.

    Raises:
        PerfModelError: more devices recorded than the layout has, or a layout that the model does
            not divide into.
    """
    if profile.devices > layout.devices:
        raise PerfModelError(
            f"the profile is of {profile.devices} devices, layout {layout.label} has {layout.devices}; give the "
            "layout that ran, or only the files of its ranks"
        )
    # Predicted seconds and calls of every event, per device and step.
    shares = event_shares(problem, layout)
    seconds = priced_events(problem, shares.ops).time_s
    events: dict[Key, Total] = {}
    for op, count, time_s, critical_s in zip(
        shares.ops, shares.executions / layout.devices, seconds, shares.critical_s, strict=True
    ):
        total = events.setdefault(event_key(op), Total(op.label, family_with_bmm(op), op))
        total.predicted_s += count * time_s
        total.predicted_calls += count
        total.critical_s += critical_s

    # Measured seconds and calls. Waits of collectives are counted separately.
    calls = profile.in_steps()
    device_steps = len(profile.step_numbers()) * profile.devices
    collectives = tuple(apart_from_waits(calls))
    moving_s = {id(collective.call): collective.moving_s for collective in collectives}
    for call in calls:
        if call.kind == ActivityKind.COPY:
            continue
        key = event_key(call.op) if call.op is not None else ("named", call.family, call.name)
        key = ("optimizer",) if call.family == "optimizer" else key
        label = call.name if call.op is None else call.op.label
        total = events.setdefault(key, Total(label, call.family, call.op))
        total.measured_s += moving_s.get(id(call), call.time_s) / device_steps
        total.measured_calls += 1 / device_steps

    # Ranks of one pipeline stage do the same, so that without a pipeline a single one stands for
    # all.
    stands_for_all = profile.devices == layout.devices or layout.pp == 1
    return SideBySide(
        events=events,
        predicted_step_s=shares.step_time_s,
        predicted_idle_s={GAPS: shares.gap_s - shares.waiting_s, WAITS: shares.waiting_s},
        steps=len(profile.step_numbers()),
        stands_for_all=stands_for_all,
        calls=calls,
        collectives=collectives,
    )


def event_key(op: Op) -> Key:
    """Key under which predicted and measured events match: products by their three sizes in any
    order; element-wise kernels by size and pass, as frameworks fuse them differently; collectives
    by kind, ranks and size to two digits."""
    match op:
        case Collective():
            return op.collective, op.num_ranks, f"{op.bytes:.1e}"
        case Gemm():
            return family_with_bmm(op), *sorted((op.m, op.n, op.k)), op.batch * op.groups
        case Attention():
            return "attention", op.batch * op.heads, op.seq_q, op.seq_kv, op.head_dim, op.pass_
        case MemoryBound():
            return "memory", op.rows * op.hidden, op.pass_
        case OptimizerStep():
            return ("optimizer",)
    return op.family, prod(v for v in op.shape().values() if isinstance(v, int) and v), op.pass_


def apart_from_waits(calls: Iterable[Call]) -> Iterable[CollectiveCall]:
    """Separate the waits of collectives from their transfer time.

    A collective's call waits for the ranks that come later; the last one's does not. Where all
    ranks of a group were recorded, the shortest of the calls of one collective is what it takes;
    else the tenth percentile of its calls.
    """
    groups: dict[Any, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if call.kind == ActivityKind.COMMUNICATION:
            # Calls of one collective: same event and same group of ranks, device by device.
            key = event_key(call.op) if call.op is not None else (call.family, call.name)
            groups[key, call.group][call.device].append(call)
    for (key, _), by_device in groups.items():
        counts = {len(device_calls) for device_calls in by_device.values()}
        # Ranks that recorded equally many calls recorded the same ones, in the same order.
        if len(by_device) > 1 and len(counts) == 1 and key[0] != "send_recv":
            for ranks in zip(*by_device.values(), strict=True):
                yield from _split_at(min(call.time_s for call in ranks), ranks)
        else:
            group_calls = list(chain.from_iterable(by_device.values()))
            times_s = [call.time_s for call in group_calls]
            yield from _split_at(float(np.quantile(times_s, 0.1)), group_calls)


def _split_at(transfer_s: float, calls: Iterable[Call]) -> Iterator[CollectiveCall]:
    """Calls of a collective that takes `transfer_s`; what a call lasts beyond that is a wait."""
    for call in calls:
        wait_s = max(call.time_s - transfer_s, 0.0)
        yield CollectiveCall(call, moving_s=min(transfer_s, call.time_s), wait_s=wait_s)


def issued(problem: StepProblem, layout: Layout) -> float:
    """Operators that the host issues per step and device, as the prediction counts them."""
    # Events, and operators that launch no kernel but take the host's time
    # (`forward_bookkeeping`).
    shares = event_shares(problem, layout)
    framework = problem.framework
    layers_of_stage = getattr(problem.model, "layers", 0) / layout.pp
    micro_batches = problem.job.global_batch / (layout.dp * layout.micro_batch)
    passes = layers_of_stage * micro_batches
    bookkeeping = passes * (
        framework.host.forward_bookkeeping + framework.host.backward_bookkeeping
    )
    return float(shares.executions.sum()) / layout.devices + bookkeeping


def idle_s(profile: Profile, sides: SideBySide) -> dict[str, float]:
    """Idle seconds per device and step: late host, gaps between kernels, and waits."""
    idle = {"host late": 0.0, "between kernels": 0.0, "waits": 0.0}
    asynchronous = profile.asynchronous
    parts: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in sides.calls:
        parts[call.device, call.step].append(call)
    for calls in parts.values():
        calls.sort(key=lambda call: call.start_s)
        end_s = calls[0].end_s
        for call in calls[1:]:
            gap_s = call.start_s - end_s
            launch_s = call.launched_s - end_s
            end_s = max(end_s, call.end_s)
            if gap_s <= 0:
                continue
            # A gap until the launch is the host's; of the rest a short part is the gap between
            # kernels, and a long one a wait.
            late_s = min(max(launch_s, 0.0), gap_s) if np.isfinite(launch_s) else 0.0
            short = not asynchronous or gap_s - late_s <= _KERNEL_GAP_S
            idle["host late"] += late_s
            idle["between kernels" if short else "waits"] += gap_s - late_s
    return {name: value / len(parts) for name, value in idle.items()}
