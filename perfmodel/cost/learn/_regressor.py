"""A fitted regressor of one op family: parameters, what it was fitted on, and predictions."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn._base import term_constants
from perfmodel.cost.learn._dies import (
    as_equal_heads,
    forward_rows,
    log_least,
    log_over_forward,
    log_over_served,
    log_product_share,
    norm_times,
    without_copies,
)
from perfmodel.cost.learn._gradients import Way, added, gradient_products, scaled, share_of, way, whole_backward
from perfmodel.cost.learn._intervals import Intervals
from perfmodel.cost.learn._parameters import Elsewhere, Inputs, Parameters, log_time_and_positions
from perfmodel.cost.learn._plan import Plan, Term, home_of, make_plan, on_behalf_of, timed_for
from perfmodel.cost.learn._queries import Prediction, PriceQuery, Query
from perfmodel.cost.learn._rows import KindCode, Rows, distinct, machine_of, shape_with_flags, stand_in
from perfmodel.cost.learn._stack import Figures, Stack, similarity
from perfmodel.errors import CalibrationError
from perfmodel.ops import FAMILIES, KernelKind, KindColumns
from perfmodel.session import Cache

_MOST_PLANS: Final = 4096
_CELL: Final = 2.0
"""Side of a cell of measured shapes, in doublings."""


@dataclass(frozen=True)
class Regressor:
    """Predicts one family (or some of its dtypes). Immutable but for a cache of plans."""

    name: str
    family: str
    dtypes: tuple[str, ...]
    """Dtype classes served; empty for all."""
    params: Parameters
    stacks: tuple[Stack, ...]
    groups: tuple[tuple[int, KernelKind], ...]
    """Stack index and kind of every group of base constants."""
    code: KindCode
    intervals: Intervals
    cells: np.ndarray
    """Sorted uint32 hashes of the coarse cells in which shapes were measured."""
    record: dict[str, Any]
    """Where it came from: tables and hashes, rows by source, seed, split, errors."""
    _plans: Cache = field(default_factory=lambda: Cache(_MOST_PLANS), compare=False, repr=False)

    @property
    def kinds(self) -> tuple[KernelKind, ...]:
        """Every kind that some stack has."""
        return tuple(sorted({kind for _, kind in self.groups}))

    def closeness(self, figures: Figures, dtype: str) -> float:
        """How near the measured devices are to one: 2 if it is among them, -1 if the dtype is not served."""
        if self.dtypes and dtype not in self.dtypes:
            return -1.0
        return max(
            2.0 if s.figures.same_kernels(figures) else similarity(figures.nominal, s.figures, dtype)
            for s in self.stacks
        )

    def predict(self, asked: PriceQuery) -> Prediction:
        """Times of the rows, each of its own query.

        Both gradients of a product take as long as the two apart (`learn._gradients`).
        """
        pairs, pair_of = asked.combinations()
        ways: list[Way] = [way(self.family, kind, query, self.stacks, self.plan) for query, kind in pairs]
        way_of = np.array(ways, object)[pair_of]
        out = Prediction.empty(len(asked))
        for how in dict.fromkeys(ways):
            at = np.flatnonzero(way_of == how)
            out.put(at, self._by_way(how, asked.take(at)))
        return out

    def _by_way(self, how: Way, asked: PriceQuery) -> Prediction:
        """Times of rows that are all answered in one way."""
        match how:
            case "itself":
                return self._by_plans(asked)
            case "near measured":
                answer = self._by_plans(asked)
                far = np.flatnonzero(answer.provenance > 0)
                if far.size:
                    answer.put(far, self._by_plans(asked.take(far), direct=False))
                return answer
            case "by forward":
                forward = self._by_plans(asked.instead(forward_rows(asked.rows)))
                return scaled(forward, log_over_forward(self._at_home(asked)))
            case "by bandwidth":
                return norm_times(asked)
            case "sum":
                once, other = gradient_products(asked.rows)
                return added(self._by_plans(asked.instead(once)), self._by_plans(asked.instead(other)))
            case "share":
                whole = whole_backward(asked.rows)
                # shares as on the most measured part of the die: one may grow where all times fall
                home = self._at_home(asked)
                parts = (self._by_plans(home.instead(of)) for of in (asked.rows, *gradient_products(whole)))
                return share_of(self._by_plans(asked.instead(whole)), *parts)

    def _at_home(self, asked: PriceQuery) -> PriceQuery:
        """The same asked of the most measured part of every device's die, with as many exponentials in a clock as the
        device's own."""

        def at_home(figures: Figures) -> Figures:
            home = home_of(self.stacks, figures)
            return replace(home, exponentials_per_clock=figures.exponentials_per_clock)

        return replace(asked, queries=tuple(q._replace(figures=at_home(q.figures)) for q in asked.queries))

    def _by_plans(self, asked: PriceQuery, *, direct: bool = True) -> Prediction:
        """Times of rows, each by the plan of its own kind.

        Products of 8 bits are those of the products alone, also where rows of the source hold more (`quantises`);
        for rows of that source as it timed them.
        """
        rows, (pairs, pair_of) = asked.rows, asked.combinations()

        def where(holds: Callable[[Query, KernelKind, Plan], bool]) -> np.ndarray:
            """Whether it holds of every row's query, kind and plan, bool[n]."""
            return np.array([holds(q, kind, self.plan(q, kind, direct=direct)) for q, kind in pairs], bool)[pair_of]

        if self.family == "attention":
            kept = where(lambda q, kind, plan: timed_for(plan, self.stacks, q.figures, q.source))
            served = ~kept & where(lambda q, kind, plan: self.stacks[plan.terms[0].stack].fills_caches)
            copies = served & where(lambda q, kind, plan: plan.terms[0].kind.op == "causal")
            rows, log_over = as_equal_heads(without_copies(rows, copies), asked.of_query(_die), kept)
            log_over += log_over_served(self._at_home(asked), served)
            out = self._as_timed(asked.instead(rows), direct)
            return Prediction(*scaled(out, log_over)[:3], np.where(log_over == 0, out.provenance, 1))
        out = self._as_timed(asked, direct)
        if self.family == "memory":
            at = np.flatnonzero(where(lambda q, kind, plan: not self._of_die(plan)) | (out.provenance > 0))
            if len(at):
                out.at_least(at, log_least(asked.take(at)))
        if self.family == "gemm":
            at = np.flatnonzero(where(lambda q, kind, plan: kind.dtype == "fp8" and self._quantises(q, plan)))
            if len(at):
                # a share as on the most measured part of the die, so that no part is slower for more bandwidth
                home = self._at_home(asked.take(at))
                there = self._as_timed(home, direct)
                out.move(at, log_product_share(home, there.log_time))
        return out

    def _of_die(self, plan: Plan) -> bool:
        """Whether a plan rests on what its die was timed to take."""
        return plan.mode in ("direct", "sibling") and all(
            self.stacks[t.stack].figures.same_kernels(t.figures) or self.stacks[t.stack].figures == t.home
            for t in plan.terms
        )

    def _quantises(self, query: Query, plan: Plan) -> bool:
        """Whether a product is answered by one that was timed with the quantising of its operand, and is not asked as
        its source timed it."""
        stack = self.stacks[plan.terms[0].stack]
        return stack.quantises and query.source != stack.source

    def _as_timed(self, asked: PriceQuery, direct: bool) -> Prediction:
        """`_by_plans` with what the sources' rows hold beside their kernel."""
        n = len(asked)
        if not n:
            return Prediction.empty(0)
        pairs, pair_of = asked.combinations()
        plans = [self.plan(query, kind, direct=direct) for query, kind in pairs]
        order = np.argsort(pair_of, kind="stable")
        bounds = np.searchsorted(pair_of[order], np.arange(len(pairs) + 1))
        row, terms, term_of = [], [], []
        for c, plan in enumerate(plans):
            mine = order[bounds[c] : bounds[c + 1]]
            for term in plan.terms:
                row.append(mine)
                term_of.append(np.full(len(mine), len(terms)))
                terms.append(term)
        rows_at, term_at = np.concatenate(row), np.concatenate(term_of)
        log_term, positions = self._evaluate(asked.rows.take(rows_at), terms, term_at, asked.host_launch)
        coefficient = np.array([t.coefficient for t in terms])[term_at]
        log_time = np.bincount(rows_at, coefficient * log_term, minlength=n)
        first = np.zeros(n, np.int64)
        first[rows_at[::-1]] = np.arange(len(rows_at))[::-1]
        modes = np.array([plan.mode for plan in plans])[pair_of]
        return self._with_bounds(log_time, modes, terms, term_at[first], positions[first])

    def plan(self, query: Query, kind: KernelKind, *, direct: bool = True) -> Plan:
        """How a kind is answered on a device (remembered); without `direct`, as if it was not measured there."""
        return self._plans.get_or_compute((query, kind, direct), lambda: self._plan(query, kind, direct))

    def _plan(self, query: Query, kind: KernelKind, direct: bool) -> Plan:
        known = stand_in(kind, self.kinds)
        plan = make_plan(self.stacks, query.figures, known, query.source, query.software, direct=direct)
        if plan is None:
            raise CalibrationError(f"the weights of {self.family} know {known} and have no stack that measured it")
        return on_behalf_of(plan, known, kind)

    def _evaluate(
        self, rows: Rows, terms: list[Term], term_at: np.ndarray, host_launch: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log seconds of every row by its term, and where its shape lies on the family's axes."""
        kinds = [t.kind for t in terms]
        here = [t._replace(figures=t.at) for t in terms]
        params, there = (term_constants(self.params, self.stacks, self.groups, of) for of in (here, terms))
        stack = np.array([t.stack for t in terms])
        measured = KindColumns.of(kinds, term_at)
        taken = _as_measured(rows, measured, [t.work or t.kind for t in terms], term_at)
        machine, asked = (machine_of([t.figures for t in of], term_at, measured.dtype) for of in (here, terms))
        codes = np.stack([self.code.one_hot(k) for k in kinds])
        inputs = Inputs(shape_with_flags(taken), machine, codes[term_at], stack[term_at], term_at)
        log_time, positions = log_time_and_positions(
            params, inputs, family=self.family, host_launch=host_launch,
            elsewhere=Elsewhere(asked, there.log_memory, there.log_floor_s),
        )  # fmt: skip
        return np.asarray(log_time, np.float64), positions

    def _with_bounds(
        self, log_time: np.ndarray, modes: np.ndarray, terms: list[Term], term: np.ndarray, positions: np.ndarray
    ) -> Prediction:
        """Intervals and provenance by the mode of every row's plan and its first term."""
        n = len(log_time)
        stack = np.array([t.stack for t in terms])[term]
        measured = list(dict.fromkeys((t.stack, t.kind) for t in terms))
        group = np.array([measured.index((t.stack, t.kind)) for t in terms])[term]
        inside = np.all(positions >= self.params.table_low[stack] - 1e-6, axis=1)
        inside &= np.all(positions <= self.params.table_high[stack] + 1e-6, axis=1)
        near_measured = _among(self.cells, cell_hash(self.stacks, measured, group, positions))
        direct = modes == "direct"
        moved = np.isin(modes, ("ratio", "sibling"))
        provenance = np.where(direct & inside & near_measured, 0, np.where(inside & (direct | moved), 1, 2))
        low, high = np.zeros(n), np.zeros(n)
        in_range = direct & inside
        for code in np.unique(group[in_range]):
            mine = in_range & (group == code)
            quantiles = self.intervals.groups.get(measured[code], self.intervals.family)
            low[mine], high[mine] = quantiles.at(log_time[mine])
        for mask, quantiles in (
            (direct & ~inside, self.intervals.beyond),
            (moved | (modes == "near"), self.intervals.near),
            (modes == "far", self.intervals.far),
        ):
            if mask.any():
                low[mask], high[mask] = quantiles.at(log_time[mask])
        return Prediction(log_time, log_time + low, log_time + high, provenance)


def _die(query: Query) -> str:
    return query.figures.die


def _as_measured(rows: Rows, measured: KindColumns, work: Sequence[KernelKind], index: np.ndarray) -> Rows:
    """Rows as those of the kinds by which they are answered, doing the work of others: row `i` of `work[index[i]]`."""
    work_columns = KindColumns.of(work, index)
    shape = FAMILIES[rows.family].as_measured(rows.shape, rows.columns, measured, work_columns)
    return Rows(rows.family, shape, *distinct(work, index))


def _among(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each value is in an ascending array."""
    if not len(ascending):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return ascending[at] == values


def cell_hash(
    stacks: Sequence[Stack],
    groups: Sequence[tuple[int, KernelKind]],
    group: np.ndarray,
    positions: Float64[np.ndarray, "n A"],
) -> np.ndarray:
    """uint32 hash of every row's stack and kind (`groups[group[i]]`) and the coarse cell that its shape lies in."""
    value = np.array([zlib.crc32(f"{stacks[s].key}|{kind}".encode()) for s, kind in groups], np.uint64)[group]
    for axis in np.floor(positions / _CELL).astype(np.int64).T:
        value = (value * np.uint64(1_000_003) + (axis + 64).astype(np.uint64)) & np.uint64(0xFFFFFFFF)
    return value.astype(np.uint32)
