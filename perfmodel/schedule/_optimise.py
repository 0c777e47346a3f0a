"""Optimises a schedule for given times, with split backward passes and a memory limit.

The zero-bubble authors find such orders by a heuristic and integer programming (Qi et al. 2024,
section 3). Here a greedy machine in real time runs every device's best ready pass under a handful
of rules, the best order is kept, and small cases are improved by exchanging neighbours.
"""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.schedule._construct import from_orders
from perfmodel.schedule._registry import looped_stages
from perfmodel.schedule._schedule import NEVER, Phase, Schedule
from perfmodel.schedule._zero_bubble import zb_h1, zb_h2
from perfmodel.schedule.facts import PassTimes, starts_and_ends
from perfmodel.schedule.memory import peak_live

_FORWARD, _INPUT, _WEIGHT = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT
_NEIGHBOURS_UP_TO = 400
"""Most instructions for which exchanging neighbours is tried."""


@dataclass(frozen=True)
class _Rule:
    """How a device chooses when several passes could run."""

    lead: int
    """Forwards that a device may be ahead of its backwards beyond those of 1F1B."""
    patience: float
    """A weight gradient starts in a gap if the gap is at least this share of it."""


def optimised(
    times: PassTimes, micro_batches: int, limit: int | None = None, *, staggered: bool = False
) -> Schedule:
    """Make a schedule with split backward passes for these times, with one stage per device.

    Args:
        times: seconds of the passes.
        micro_batches: micro-batches of a step.
        limit: most micro-batches whose activations a device may hold, from forward to weight
            gradient; None: twice the stages, enough for no bubble at all (ZB-2p).
        staggered: devices go on to their next step on their own, so that what counts is the longest
            time from a device's first to its last pass; otherwise it is the end of the last pass of
            all.

    Raises:
        LayoutError: no micro-batches, or a limit below 1.
    """
    stages = len(times.forward_s)
    limit = 2 * stages if limit is None else limit
    if micro_batches < 1 or limit < 1:
        raise LayoutError(
            f"an optimised schedule needs at least 1 micro-batch, and at least 1 in flight; got {micro_batches} and {limit}"
        )

    # One order for each of a handful of rules.
    possible_leads = {lead for lead in (1, 2, stages // 2, stages - 1, stages) if 0 < lead < limit}
    leads = sorted({0} | possible_leads)
    rules = [_Rule(lead, patience) for lead, patience in product(leads, (0.0, 0.5, 1.0))]
    orders = [_greedy(times, micro_batches, limit, rule) for rule in rules]
    candidates = [
        from_orders("optimised", looped_stages(stages, 1), micro_batches, order) for order in orders
    ]

    # The result is never worse than the orders made by hand.
    by_hand = (zb_h1(stages, micro_batches), zb_h2(stages, micro_batches))
    candidates += [schedule for schedule in by_hand if _in_flight(schedule) <= limit]
    best = min(candidates, key=lambda schedule: _cost(schedule, times, staggered))
    best = replace(best, name="optimised")
    if best.n_instructions > _NEIGHBOURS_UP_TO:
        return best
    return _exchanged(best, times, limit, staggered)


def _cost(schedule: Schedule, times: PassTimes, staggered: bool) -> float:
    """Seconds to minimise: of the step or, if steps are staggered, of the slowest device."""
    start, end = starts_and_ends(schedule, times)
    if not staggered:
        return float(end.max())
    first = schedule.offsets[:-1]
    last = schedule.offsets[1:] - 1
    return float((end[last] - start[first]).max())


def _greedy(
    times: PassTimes, m: int, limit: int, rule: _Rule
) -> list[list[tuple[Phase, int, int]]]:
    """Each device's order by a rule: input gradients, then forwards, weight gradients in gaps."""
    p = len(times.forward_s)
    forward_s = np.asarray(times.forward_s, float).tolist()
    input_s = np.asarray(times.backward_input_s, float).tolist()
    weight_s = np.asarray(times.backward_weight_s, float).tolist()
    orders: list[list[tuple[Phase, int, int]]] = [[] for _ in range(p)]

    # Next micro-batch of each phase on each device, and when the inputs of forwards and backwards
    # arrive there.
    f, b, w = [0] * p, [0] * p, [0] * p
    arrived_f: list[list[float]] = [[0.0] * m] + [[] for _ in range(p - 1)]
    arrived_b: list[list[float]] = [[] for _ in range(p)]

    # Wake-ups: a device looks at its work when it gets free and when something arrives.
    heap = [(0.0, d) for d in range(p)]
    free = [0.0] * p
    while heap:
        # A wake-up while the device is busy is of no use: it is woken again when it gets free.
        now, d = heapq.heappop(heap)
        if now < free[d]:
            continue

        # Which passes have their inputs and room: p - d forwards ahead of backwards is what 1F1B
        # does.
        ready_b = b[d] < len(arrived_b[d]) and arrived_b[d][b[d]] <= now
        ready_f = f[d] < m and f[d] < len(arrived_f[d]) and arrived_f[d][f[d]] <= now
        most_ahead = min(limit, p - d + rule.lead)
        may_lead = f[d] - w[d] < limit and f[d] - b[d] < most_ahead
        gap_s = _gap(arrived_b[d], b[d], arrived_f[d], f[d], now)

        # Input gradients come first, as earlier stages wait for them.
        if ready_b:
            _append_next(orders[d], _INPUT, b, d)
            free[d] = now + input_s[d]
            if d:
                arrived_b[d - 1].append(free[d] + times.transfer_s)
                heapq.heappush(heap, (arrived_b[d - 1][-1], d - 1))
        # Then forwards. On the last device the backward may follow at once.
        elif ready_f and may_lead:
            _append_next(orders[d], _FORWARD, f, d)
            free[d] = now + forward_s[d]
            if d < p - 1:
                arrived_f[d + 1].append(free[d] + times.transfer_s)
                heapq.heappush(heap, (arrived_f[d + 1][-1], d + 1))
            else:
                arrived_b[d].append(free[d])
        # Weight gradients, which nobody waits for, fill gaps that are long enough.
        elif w[d] < b[d] and gap_s >= rule.patience * weight_s[d]:
            _append_next(orders[d], _WEIGHT, w, d)
            free[d] = now + weight_s[d]
        # An arrival will wake the device.
        else:
            continue
        heapq.heappush(heap, (free[d], d))
    return orders


def _append_next(
    order: list[tuple[Phase, int, int]], phase: Phase, following: list[int], device: int
) -> None:
    """Append the next micro-batch of a phase to a device's order."""
    order.append((phase, 0, following[device]))
    following[device] += 1


def _gap(arrived_b: list[float], b: int, arrived_f: list[float], f: int, now: float) -> float:
    """Seconds until the next pass arrives; infinite if none is on its way."""
    next_arrivals = [*arrived_b[b : b + 1], *arrived_f[f : f + 1]]
    coming = [arrival for arrival in next_arrivals if arrival > now]
    return min(coming, default=now + float("inf")) - now


def _exchanged(schedule: Schedule, times: PassTimes, limit: int, staggered: bool) -> Schedule:
    """Exchange neighbouring instructions of a device as long as that shortens the step."""
    cost = _cost(schedule, times, staggered)
    better = True
    while better:
        better = False
        for i in range(schedule.n_instructions - 1):
            if schedule.device[i] != schedule.device[i + 1]:
                continue

            # An exchange may deadlock, or hold more micro-batches than allowed.
            exchanged = _with_exchanged(schedule, i)
            if (exchanged.slot == NEVER).any() or _in_flight(exchanged) > limit:
                continue
            # The margin keeps rounding from exchanging back and forth for ever.
            exchanged_cost = _cost(exchanged, times, staggered)
            if exchanged_cost < cost * (1 - 1e-12):
                schedule, cost, better = exchanged, exchanged_cost, True
    return schedule


def _with_exchanged(schedule: Schedule, i: int) -> Schedule:
    """The schedule with instructions i and i + 1 of one device swapped."""
    index = np.arange(schedule.n_instructions)
    index[[i, i + 1]] = index[[i + 1, i]]
    passes = [(Phase(schedule.phase[j]), 0, int(schedule.micro_batch[j])) for j in index]
    orders = [passes[first:end] for first, end in pairwise(schedule.offsets.tolist())]
    return from_orders(schedule.name, schedule.stage, schedule.micro_batches, orders)


def _in_flight(schedule: Schedule) -> int:
    """Most micro-batches that a device holds at once."""
    return int(peak_live(schedule, np.ones(schedule.n_stages)).max())
