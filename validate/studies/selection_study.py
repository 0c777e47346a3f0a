"""Active selection held against grids on published tables: how many measured points a step time
costs.

Everything is looked up: "measuring" a kernel reads its row of a table, and the true step time is
the timeline with every event of the studied families at its table time. Only layouts all of whose
studied events stand in the table are used, so nothing of the truth is interpolated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.calibration import HALF_WIDTH as SIGMAS
from perfmodel.calibration import StepShares, choose, most_uncertain, step_variance
from perfmodel.calibration.beliefs import Beliefs, condition
from perfmodel.cost import EventTimes, roofline_seconds
from perfmodel.ops import Op
from perfmodel.prediction import StepProblem, event_shares
from perfmodel.spec import Device, Layout

Prices = Callable[[Sequence[Op]], Float[np.ndarray, " ops"]]
"""Seconds of ops that stand in the table."""
SIZES: Final[dict[str, Callable[[Any], tuple[float, ...]]]] = {
    "gemm": lambda op: (op.m, op.n, op.k),
    "attention": lambda op: (op.batch, op.heads, op.heads / op.kv_heads, op.seq_q, op.head_dim),
}
"""Sizes that a uniform grid varies."""
LEVELS: Final = (2, 3, 4, 5)
"""Grid points per size, from the coarsest grid to the finest."""
CANDIDATES: Final = 3000
"""Rows that sequential strategies choose among: the needed ones, if allowed, and random others.
Grids use all."""
BATCH: Final = 4
MOST: Final = 60
"""Points at which the sequential strategies end."""


class Entry(NamedTuple):
    """The table row that times an event, and the event's share of that row."""

    op: Op
    share: float


@dataclass(frozen=True)
class Case:
    """Layouts of interest on one device, and the table that takes the place of measuring."""

    device: Device
    layouts: tuple[tuple[StepProblem, Layout], ...]
    table: Mapping[Op, float]
    """Seconds of every row."""
    entry: Callable[[Op], Entry | None]
    """Table row of an event; none for events that are not studied, which stay at their analytic
    time."""

    def needed(self) -> tuple[Op, ...]:
        """Table rows that the layouts rest on."""
        return self._needed

    @cached_property
    def _needed(self) -> tuple[Op, ...]:
        """Table rows that the layouts rest on, found once."""
        # Which rows those are does not depend on prices: analytic ones do.
        return self._steps(lambda ops: roofline_seconds(self.device, ops), frozenset()).ops  # pyright: ignore

    def true_step_s(self) -> Float[np.ndarray, " layouts"]:
        """Step times with every studied event at its time in the table."""
        return self.steps(lambda ops: np.array([self.table[op] for op in ops])).step_time_s

    def at(self, beliefs: Beliefs) -> StepShares:
        """Step times with every studied event at its expected time."""
        return self.steps(lambda ops: np.exp(beliefs.log_time(ops)))

    def steps(self, prices: Prices) -> StepShares:
        """Step times for some prices of the table's rows."""
        return self._steps(prices, frozenset(self._needed))

    def _steps(self, prices: Prices, needed: frozenset[Op]) -> StepShares:
        """Step times, and each one's share that rests on every row of the table."""
        by_layout = []
        for problem, layout in self.layouts:
            kernels = _Looked(self, prices, needed)
            by_layout.append(event_shares(problem.repriced(kernels, problem.collectives), layout))

        # A column per row of the table, in the order in which layouts need them.
        column_of: dict[Op, int] = {}
        entries = []
        for layout_number, events in enumerate(by_layout):
            for op, critical_s in zip(events.ops, events.critical_s.tolist(), strict=True):
                entry = self.entry(op)
                if entry:
                    column = column_of.setdefault(entry.op, len(column_of))
                    entries.append((layout_number, column, critical_s / events.step_time_s))
        shares = np.zeros((len(by_layout), len(column_of)))
        for layout_number, column, share in entries:
            shares[layout_number, column] += share
        step_times_s = np.array([events.step_time_s for events in by_layout])
        return StepShares(step_times_s, tuple(column_of), shares, np.zeros(len(by_layout)))


@dataclass(frozen=True)
class _Looked:
    """Kernel prices that take studied events from their table row, and others from the analytical
    bound."""

    case: Case
    prices: Prices
    needed: frozenset[Op]
    """Rows that stand as they are; in a step the other sizes of a kernel give way to them."""

    def times(self, device: Device, ops: Sequence[Any]) -> EventTimes:
        """Seconds of kernels; the needed ones count as measured."""
        entries = [self.case.entry(op) for op in ops]
        time_s = roofline_seconds(device, ops)
        known = [i for i, entry in enumerate(entries) if entry]
        if known:
            rows: list[Entry] = [entries[i] for i in known]  # pyright: ignore[reportAssignmentType]
            time_s[known] = self.prices([row.op for row in rows]) * [row.share for row in rows]
        provenance = (
            "measured" if entry and entry.op in self.needed else "learned" for entry in entries
        )
        return EventTimes(time_s, time_s, time_s, tuple(provenance))


class Point(NamedTuple):
    """The knowledge of a strategy after a number of measurements."""

    measurements: int
    error: float
    """Mean over the layouts of |predicted / true - 1| of the step time."""
    half_width: float
    """Mean half-width of the stated 90 % interval, as a share of the step time."""
    covered: float
    """Share of the layouts whose true step time lies within it."""


def study(case: Case, *, exclude_needed: bool, seed: int) -> dict[str, list[Point]]:
    """Error against number of measured points by strategy: `grid`, `random`, `uncertainty`, `ours`.

    Args:
        exclude_needed: never measure a shape that the layouts themselves need; otherwise any row
            may be.
        seed: of the random strategy.
    """
    needed = case.needed()
    truth = case.true_step_s()
    rows = [op for op in within(list(case.table), needed) if not (exclude_needed and op in needed)]
    order = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    # Needed rows come first in the pool, so that its size leaves none of them out.
    pool = list(dict.fromkeys([op for op in needed if op in set(rows)] + order))[:CANDIDATES]

    def by_weight(beliefs: Beliefs, state: StepShares, rest: list[Op]) -> list[int]:
        """Rows that take most off the variance of the step times."""
        return choose(beliefs, beliefs.locate(state.ops), state.shares, beliefs.locate(rest), BATCH)

    def by_doubt(beliefs: Beliefs, state: StepShares, rest: list[Op]) -> list[int]:
        """Rows whose own time is least certain."""
        return most_uncertain(beliefs, beliefs.locate(rest), BATCH)

    def next_in_order(beliefs: Beliefs, state: StepShares, rest: list[Op]) -> list[int]:
        """The next rows of an order that was drawn at random."""
        return list(range(min(BATCH, len(rest))))

    # A finer grid begins anew: it has few points of the coarser one.
    grid_rows = []
    for ops in grids(rows, needed):
        beliefs = _believed(case, ops)
        grid_rows.append(_point(truth, beliefs, case.at(beliefs)))
    return {
        "grid": grid_rows,
        "random": _sequence(case, truth, order, next_in_order),
        "uncertainty": _sequence(case, truth, pool, by_doubt),
        "ours": _sequence(case, truth, pool, by_weight),
    }


def _sequence(
    case: Case,
    truth: np.ndarray,
    pool: list[Op],
    pick: Callable[[Beliefs, StepShares, list[Op]], list[int]],
) -> list[Point]:
    """The knowledge of a strategy after every batch of points that it picks."""
    beliefs = _believed(case, [])
    state = case.at(beliefs)
    points = [_point(truth, beliefs, state)]
    # A few points at a time, as a user would measure them.
    while len(beliefs.measured) < MOST and pool:
        chosen = [pool[i] for i in pick(beliefs, state, pool)]
        pool = [op for op in pool if op not in set(chosen)]
        beliefs = _believed(case, [*beliefs.measured, *chosen], beliefs)
        state = case.at(beliefs)
        points.append(_point(truth, beliefs, state))
    return points


def _believed(case: Case, ops: Sequence[Op], earlier: Beliefs | None = None) -> Beliefs:
    """Beliefs on kernel times after some rows are measured."""

    def roofline(kernels: Sequence[Op]) -> Float[np.ndarray, " kernels"]:
        """Analytical seconds, which beliefs are relative to."""
        return roofline_seconds(case.device, kernels)  # pyright: ignore[reportArgumentType]

    return condition(roofline, case.device, {op: case.table[op] for op in ops}, earlier)


def _point(truth: np.ndarray, beliefs: Beliefs, state: StepShares) -> Point:
    """Error and interval of step times, rounded to six digits."""
    variance = step_variance(beliefs, beliefs.locate(state.ops), state.shares)
    half_width = SIGMAS * np.sqrt(variance)
    log_error = np.log(state.step_time_s / truth)
    return Point(
        measurements=len(beliefs.measured),
        error=round(float(np.abs(np.expm1(log_error)).mean()), 6),
        half_width=round(float(half_width.mean()), 6),
        covered=round(float((np.abs(log_error) <= half_width).mean()), 6),
    )


def within(ops: Sequence[Op], needed: Sequence[Op]) -> list[Op]:
    """Rows whose sizes all lie between the smallest and the largest that is needed of their
    kind."""
    in_range = []
    for kind, members in _kinds(needed).items():
        needed_sizes = _sizes(members)
        candidates = _kinds(ops).get(kind, [])
        sizes = _sizes(candidates)
        # Sizes are logarithms, which round.
        large_enough = sizes >= needed_sizes.min(axis=0) - 1e-9
        small_enough = sizes <= needed_sizes.max(axis=0) + 1e-9
        inside = (large_enough & small_enough).all(axis=1)
        in_range += [op for op, is_inside in zip(candidates, inside, strict=True) if is_inside]
    return in_range


def grids(pool: Sequence[Op], needed: Sequence[Op]) -> Iterator[list[Op]]:
    """Uniform grids over the needed range of every kind, equally spaced in log size, coarse to
    fine.

    A grid point is the row of the pool nearest to it in log sizes.
    """
    by_kind = _kinds(pool)
    for per_axis in LEVELS:
        chosen: dict[Op, None] = {}
        for kind, members in _kinds(needed).items():
            sizes = _sizes(members)
            rows = _sizes(by_kind[kind])
            axes = [
                np.linspace(low, high, per_axis)
                for low, high in zip(sizes.min(0), sizes.max(0), strict=True)
            ]
            # A size that all needed kernels share has one level.
            for point in product(*(np.unique(axis) for axis in axes)):
                # What a grid asks for may not stand in the table.
                nearest = int(np.argmin(((rows - point) ** 2).sum(axis=1)))
                chosen[by_kind[kind][nearest]] = None
        yield list(chosen)


def _kinds(ops: Sequence[Op]) -> dict[tuple[str, str], list[Op]]:
    """Kernels by family and pass."""
    kinds: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        kinds.setdefault((op.family, op.pass_), []).append(op)  # pyright: ignore[reportAttributeAccessIssue]
    return kinds


def _sizes(ops: Sequence[Op]) -> Float[np.ndarray, "ops sizes"]:
    """Log sizes of kernels of one family."""
    return np.log2([SIZES[op.family](op) for op in ops])
