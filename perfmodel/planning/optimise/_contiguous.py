"""Dynamic programming over contiguous partitions: exact minima over all cuts of a chain.

Tables give the cost of a stage that holds layers i to j - 1; they are indexed [kind, stage, i, j],
with `inf` where a stage cannot hold those layers. Kinds are kinds of devices, of which a supply is
given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import PerfModelError

Table = Float[np.ndarray, "kinds stages cuts cuts"]
Used = tuple[int, ...]
"""Number of devices of each kind that the stages so far use."""
_BATCH: Final = 16
"""Thresholds tried at once."""
_EQUAL: Final = 1e-12
_NOTHING: Final = -1e300
"""A cost below all others, for the stages after the last."""


class NothingFitsError(PerfModelError):
    """No division into stages fits."""


def relative_gap(value_s: float, lower_bound_s: float) -> float:
    """Largest relative distance of a value from the optimum; 0 if it is proved optimal."""
    return max(0.0, value_s / lower_bound_s - 1) if lower_bound_s > 0 else float("inf")


@dataclass(frozen=True)
class Cuts:
    """A division into stages and its cost."""

    partition: tuple[int, ...]
    """Layers of every stage."""
    kinds: tuple[int, ...]
    """Kind of device of every stage."""
    sum: float
    """Sum of the first table over the stages (0 where there is none)."""
    max: float
    """Maximum of the second table over the stages (0 where there is none)."""

    @property
    def value(self) -> float:
        """Cost of the division, which is minimised: `sum` plus `max`."""
        return self.sum + self.max


class _Interval(NamedTuple):
    """Range of maxima of `largest` between two cuts of the front, in which a better cut may lie."""

    low: float
    high: float
    least_sum: float
    """Least sum of `added` with a maximum of at most `high`."""

    @property
    def bound(self) -> float:
        """Lower bound for all divisions whose maximum exceeds `low` and whose sum is no smaller."""
        return self.least_sum + self.low


class _Origin(NamedTuple):
    """Back-pointers of the best sums of some stages, for every threshold and number of layers."""

    first: Int[np.ndarray, "thresholds cuts"]
    """First layer of the last stage."""
    kind: Int[np.ndarray, "thresholds cuts"]
    """Kind of device of the last stage."""


def least_sum_plus_max(
    added: Table, largest: Table, supply: Sequence[int] | None = None
) -> list[Cuts]:
    """Minimise sum over stages of `added` plus max over stages of `largest`.

    The least sum under the constraint max <= T falls as T rises, so intervals of T are halved, the
    most promising first, until every interval's bound (least sum of its upper end plus its lower
    end) is no better than the best cut found.

    Args:
        added, largest: costs, see the module.
        supply: devices of each kind; together as many as stages. One kind may be left out.

    Returns:
        The cuts met on the way, the best first: the front of sums against maxima around the
        optimum.

    Raises:
        NothingFitsError: no partition is possible.
        PerfModelError: the supply does not add up.
    """
    supply = _checked(added, supply)
    possible = np.isfinite(added) & np.isfinite(largest)
    added = np.where(possible, added, np.inf)
    largest = np.where(possible, largest, np.inf)

    # With nothing passed on, the critical path is the slowest stage alone: the least maximum that
    # any cut has. The front lies between the cut of least sum and the one of least maximum.
    smallest = least_critical_path(largest, np.zeros_like(largest), supply)
    widest, tightest = _least_sums(added, largest, np.array([np.inf, smallest]), supply)
    if widest is None or tightest is None:
        raise NothingFitsError(
            "no division of the layers into these stages fits into memory; give more stages, or recompute"
        )
    front = {cuts.partition + cuts.kinds: cuts for cuts in (widest, tightest)}
    best = min(widest.value, tightest.value)
    open_intervals = [_Interval(tightest.max, widest.max, widest.sum)]
    while open_intervals:
        # Intervals are closed whose bound is no better than the best cut, or that are as narrow as
        # rounding.
        worth_halving = []
        for interval in open_intervals:
            is_wide = interval.high - interval.low > _EQUAL * interval.high
            if is_wide and interval.bound < best * (1 - _EQUAL):
                worth_halving.append(interval)
        worth_halving.sort(key=lambda interval: interval.bound)

        # Several thresholds are solved in one pass of array operations.
        chosen = worth_halving[:_BATCH]
        open_intervals = worth_halving[_BATCH:]
        middles = np.array([(interval.low + interval.high) / 2 for interval in chosen])
        solved = _least_sums(added, largest, middles, supply) if chosen else []

        # The middle splits the interval. Above it lie cuts with maxima in (middle, high], below
        # it those that the solved threshold leaves.
        for interval, middle, cuts in zip(chosen, middles.tolist(), solved, strict=True):
            open_intervals.append(_Interval(middle, interval.high, interval.least_sum))
            if cuts is not None:
                front[cuts.partition + cuts.kinds] = cuts
                best = min(best, cuts.value)
                open_intervals.append(_Interval(interval.low, cuts.max, cuts.sum))
    return sorted(front.values(), key=lambda cuts: cuts.value)


def least_critical_path(
    stage_costs: Table, passed: Table, supply: Sequence[int] | None = None
) -> float:
    """Minimise over cuts: max over stages r of stage_costs[r] + sum of passed[s], s < r.

    With stage_costs = m (F + B) and passed = F + B (and transfers), this is the least of the bounds
    that `prediction.lower_bounds_s` gives for single partitions: no partition's step is shorter
    under any order of passes.
    """
    supply = _checked(stage_costs, supply)
    empty = np.full(stage_costs.shape[-1], np.inf)
    end = empty.copy()
    end[-1] = _NOTHING

    # From the last stage back to the first: `values[used][i]` is the value of the layers from i
    # on, with the devices `used` for them. A stage adds its passed-on cost to every later stage,
    # and may itself be the largest.
    values: dict[Used, np.ndarray] = {(0,) * len(supply): end}
    for stage in reversed(range(stage_costs.shape[1])):
        longer: dict[Used, np.ndarray] = {}
        for used, by_remaining in values.items():
            for kind, state in _one_more(used, supply):
                value = np.maximum(
                    stage_costs[kind, stage], passed[kind, stage] + by_remaining
                ).min(axis=-1)
                longer[state] = np.minimum(longer.get(state, empty), value)
        values = longer
    return float(values[supply][0])


def _with_a_stage(
    values: dict[Used, Float[np.ndarray, "thresholds cuts"]],
    allowed: Sequence[Float[np.ndarray, "thresholds cuts cuts"]],
    supply: tuple[int, ...],
) -> tuple[dict[Used, Float[np.ndarray, "thresholds cuts"]], dict[Used, _Origin]]:
    """Extend every prefix by one stage.

    Args:
        values: least sums of the prefixes, by the devices that they use.
        allowed: costs of the stage, for each kind of device that it may be on.
        supply: devices of each kind.

    Returns:
        Least sums of the longer prefixes, and where their last stage begins.
    """
    longer: dict[Used, np.ndarray] = {}
    origin: dict[Used, _Origin] = {}
    for used, value in values.items():
        for kind, state in _one_more(used, supply):
            total = allowed[kind] + value[:, :, None]
            first = total.argmin(axis=1)
            least_total = np.take_along_axis(total, first[:, None], axis=1)[:, 0]
            if state not in longer:
                longer[state] = least_total
                origin[state] = _Origin(first, np.full_like(first, kind))
                continue

            # The same devices can be reached with either kind last; keep the cheaper.
            better = least_total < longer[state]
            longer[state] = np.where(better, least_total, longer[state])
            origin[state] = _Origin(
                first=np.where(better, first, origin[state].first),
                kind=np.where(better, kind, origin[state].kind),
            )
    return longer, origin


def _least_sums(
    added: Table,
    largest: Table,
    thresholds: Float[np.ndarray, " thresholds"],
    supply: tuple[int, ...],
) -> list[Cuts | None]:
    """Return for each threshold the cuts with the least sum among those whose maximum does not
    exceed it; None if there are none."""
    _, stages, cuts, _ = added.shape
    limits = thresholds[:, None, None]
    start = np.full((len(thresholds), cuts), np.inf)

    # `values[used][threshold, i]` is the least sum of the stages so far that hold the first i
    # layers with the kinds of devices in `used`. `came_from` remembers where the last stage began
    # and on which kind.
    start[:, 0] = 0.0
    values: dict[Used, np.ndarray] = {(0,) * len(supply): start}
    came_from: list[dict[Used, _Origin]] = []
    for stage in range(stages):
        # Stages above the threshold are forbidden.
        allowed = [
            np.where(largest[kind, stage] <= limits, added[kind, stage], np.inf)
            for kind in range(len(supply))
        ]
        values, origin = _with_a_stage(values, allowed, supply)
        came_from.append(origin)
    sums = values[supply][:, -1]
    cuts = []
    for lane in range(len(thresholds)):
        is_possible = np.isfinite(sums[lane])
        cuts.append(
            _traced(came_from, lane, supply, float(sums[lane]), largest) if is_possible else None
        )
    return cuts


def _traced(
    came_from: list[dict[Used, _Origin]],
    lane: int,
    supply: tuple[int, ...],
    total: float,
    largest: Table,
) -> Cuts:
    """Trace the cuts of a value back from the last layer."""
    used = supply
    end = largest.shape[-1] - 1
    sizes: list[int] = []
    kinds: list[int] = []
    maximum = -np.inf
    # Each table says, for the nodes used so far and the layer at which the stage ends, where the
    # stage began and on which kind of node it runs; the stage before ends there, with one node of
    # that kind less.
    for stage in reversed(range(len(came_from))):
        origin = came_from[stage][used]
        start = int(origin.first[lane, end])
        kind = int(origin.kind[lane, end])
        maximum = max(maximum, float(largest[kind, stage, start, end]))
        sizes.append(end - start)
        kinds.append(kind)
        used = tuple(n - (k == kind) for k, n in enumerate(used))
        end = start
    return Cuts(tuple(reversed(sizes)), tuple(reversed(kinds)), total, maximum)


def _one_more(used: Used, supply: tuple[int, ...]) -> Iterator[tuple[int, Used]]:
    """Yield the kinds with a free device, and the devices used once it is taken."""
    for kind, n in enumerate(supply):
        if used[kind] < n:
            yield kind, tuple(u + (k == kind) for k, u in enumerate(used))


def _checked(table: Table, supply: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of stages on each kind of device, which must sum to all stages."""
    kinds, stages = table.shape[:2]
    supply = (stages,) if supply is None else tuple(supply)
    if len(supply) != kinds or sum(supply) != stages or min(supply) < 0:
        raise PerfModelError(
            f"devices of {kinds} kinds for {stages} stages are needed, got {', '.join(map(str, supply))}"
        )
    return supply
