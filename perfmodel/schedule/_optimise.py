"""An order made for given times: split backward passes, a memory limit, and the search over rules.

The zero-bubble authors find such orders by a heuristic and integer programming (Qi et al. 2024, section 3).
Here a greedy machine in real time runs every device's best ready pass under a handful of rules, the best
order is kept, and small cases are improved by exchanging neighbours.
"""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.schedule._construct import from_orders, looped_stages
from perfmodel.schedule._facts import PassTimes, starts_and_ends
from perfmodel.schedule._memory import peak_live
from perfmodel.schedule._schedule import NEVER, Phase, Schedule
from perfmodel.schedule._zero_bubble import zb_h1, zb_h2

_FORWARD, _INPUT, _WEIGHT = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT
_NEIGHBOURS_UP_TO = 400
"""Instructions up to which exchanging neighbours is worth its time."""


@dataclass(frozen=True)
class _Rule:
    """How a device chooses when several passes could run."""

    lead: int
    """Forwards that a device may be ahead of its backwards beyond those of 1F1B."""
    patience: float
    """A weight gradient starts in a gap if the gap is at least this share of it."""


def optimised(times: PassTimes, micro_batches: int, limit: int | None = None, *, staggered: bool = False) -> Schedule:
    """A schedule with split backwards made for these times, one stage per device.

    Args:
        times: seconds of the passes.
        micro_batches: micro-batches of a step.
        limit: most micro-batches whose activations a device may hold, from forward to weight gradient;
            None: twice the stages, enough for no bubble at all (ZB-2p).
        staggered: devices go on to their next step on their own, so that what counts is the longest time
            from a device's first to its last pass; otherwise it is the end of the last pass of all.

    Raises:
        LayoutError: no micro-batches, or a limit below 1.
    """
    stages = len(times.forward_s)
    limit = 2 * stages if limit is None else limit
    if micro_batches < 1 or limit < 1:
        raise LayoutError(
            f"schedule optimised: micro-batches and limit must be at least 1, got {micro_batches}, {limit}"
        )
    leads = sorted({0, *(lead for lead in (1, 2, stages // 2, stages - 1, stages) if 0 < lead < limit)})
    rules = [_Rule(lead, patience) for lead, patience in product(leads, (0.0, 0.5, 1.0))]
    orders = [_greedy(times, micro_batches, limit, rule) for rule in rules]
    candidates = [from_orders("optimised", looped_stages(stages, 1), micro_batches, order) for order in orders]

    # The result is never worse than the orders made by hand.
    by_hand = (zb_h1(stages, micro_batches), zb_h2(stages, micro_batches))
    candidates += [schedule for schedule in by_hand if _in_flight(schedule) <= limit]
    best = min(candidates, key=lambda schedule: _cost(schedule, times, staggered))
    best = replace(best, name="optimised")
    return _exchanged(best, times, limit, staggered) if best.n_instructions <= _NEIGHBOURS_UP_TO else best


def _cost(schedule: Schedule, times: PassTimes, staggered: bool) -> float:
    start, end = starts_and_ends(schedule, times)
    if not staggered:
        return float(end.max())
    first, last = schedule.offsets[:-1], schedule.offsets[1:] - 1
    return float((end[last] - start[first]).max())


def _greedy(times: PassTimes, m: int, limit: int, rule: _Rule) -> list[list[tuple[Phase, int, int]]]:
    """Each device's order under one rule: input gradients first, then forwards, weight gradients in gaps."""
    p = len(times.forward_s)
    forward_s = np.asarray(times.forward_s, float).tolist()
    input_s = np.asarray(times.backward_input_s, float).tolist()
    weight_s = np.asarray(times.backward_weight_s, float).tolist()
    orders: list[list[tuple[Phase, int, int]]] = [[] for _ in range(p)]

    # Next micro-batch of each phase on each device, and when the inputs of forwards and backwards arrive there.
    f, b, w = [0] * p, [0] * p, [0] * p
    arrived_f: list[list[float]] = [[0.0] * m] + [[] for _ in range(p - 1)]
    arrived_b: list[list[float]] = [[] for _ in range(p)]

    # Wake-ups: a device looks at its work when it gets free and when something arrives.
    heap = [(0.0, d) for d in range(p)]
    free = [0.0] * p
    while heap:
        now, d = heapq.heappop(heap)
        if now < free[d]:
            continue
        ahead = min(limit, p - d + rule.lead)
        ready_b = b[d] < len(arrived_b[d]) and arrived_b[d][b[d]] <= now
        ready_f = f[d] < m and f[d] < len(arrived_f[d]) and arrived_f[d][f[d]] <= now
        if ready_b:
            _run(orders[d], _INPUT, b, d)
            free[d] = now + input_s[d]
            if d:
                arrived_b[d - 1].append(free[d] + times.transfer_s)
                heapq.heappush(heap, (arrived_b[d - 1][-1], d - 1))
        elif ready_f and f[d] - w[d] < limit and f[d] - b[d] < ahead:
            _run(orders[d], _FORWARD, f, d)
            free[d] = now + forward_s[d]
            if d < p - 1:
                arrived_f[d + 1].append(free[d] + times.transfer_s)
                heapq.heappush(heap, (arrived_f[d + 1][-1], d + 1))
            else:
                arrived_b[d].append(free[d])
        elif w[d] < b[d] and _gap(arrived_b[d], b[d], arrived_f[d], f[d], now) >= rule.patience * weight_s[d]:
            _run(orders[d], _WEIGHT, w, d)
            free[d] = now + weight_s[d]
        else:
            continue  # woken again by an arrival
        heapq.heappush(heap, (free[d], d))
    return orders


def _run(order: list[tuple[Phase, int, int]], phase: Phase, following: list[int], device: int) -> None:
    order.append((phase, 0, following[device]))
    following[device] += 1


def _gap(arrived_b: list[float], b: int, arrived_f: list[float], f: int, now: float) -> float:
    """Seconds until the next pass is known to arrive; without end if none is on its way."""
    coming = [times[i] for times, i in ((arrived_b, b), (arrived_f, f)) if i < len(times) and times[i] > now]
    return min(coming, default=now + float("inf")) - now


def _exchanged(schedule: Schedule, times: PassTimes, limit: int, staggered: bool) -> Schedule:
    """Exchange neighbouring instructions of a device as long as that shortens the step."""
    cost, better = _cost(schedule, times, staggered), True
    while better:
        better = False
        for i in range(schedule.n_instructions - 1):
            if schedule.device[i] != schedule.device[i + 1]:
                continue
            exchanged = _with_exchanged(schedule, i)
            if (exchanged.slot == NEVER).any() or _in_flight(exchanged) > limit:
                continue
            exchanged_cost = _cost(exchanged, times, staggered)
            if exchanged_cost < cost * (1 - 1e-12):
                schedule, cost, better = exchanged, exchanged_cost, True
    return schedule


def _with_exchanged(schedule: Schedule, i: int) -> Schedule:
    index = np.arange(schedule.n_instructions)
    index[[i, i + 1]] = index[[i + 1, i]]
    passes = [(Phase(schedule.phase[j]), 0, int(schedule.micro_batch[j])) for j in index]
    orders = [passes[first:end] for first, end in pairwise(schedule.offsets.tolist())]
    return from_orders(schedule.name, schedule.stage, schedule.micro_batches, orders)


def _in_flight(schedule: Schedule) -> int:
    """Most micro-batches that a device holds at once."""
    return int(peak_live(schedule, np.ones(schedule.n_stages)).max())
