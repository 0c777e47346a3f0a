"""A fitted regressor of one op family: parameters, what it was fitted on, and predictions."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.cost.learn._attention_dies import as_equal_heads, forward_rows, log_over_forward, without_copies
from perfmodel.cost.learn._gradients import added, gradient_products, scaled, share_of, way, whole_backward
from perfmodel.cost.learn._intervals import Intervals
from perfmodel.cost.learn._kinds import KindCode, machine_of, shape_with_flags, stand_in
from perfmodel.cost.learn._moved_constants import term_constants
from perfmodel.cost.learn._parameters import Elsewhere, Inputs, Parameters, log_time_and_positions
from perfmodel.cost.learn._plan import Plan, home_of, make_plan, on_behalf_of, timed_for
from perfmodel.cost.learn._quantised_rows import log_product_share
from perfmodel.cost.learn._queries import Prediction, Query
from perfmodel.cost.learn._rows import Rows, distinct
from perfmodel.cost.learn._stack import Figures, Stack, similarity
from perfmodel.cost.learn._streams import log_least, norm_times
from perfmodel.errors import CalibrationError
from perfmodel.ops import FAMILIES, KernelKind, KindColumns
from perfmodel.session import Store

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
    _plans: Store = field(default_factory=lambda: Store(_MOST_PLANS), compare=False, repr=False)

    @property
    def kinds(self) -> tuple[KernelKind, ...]:
        """Every kind that some stack has."""
        return tuple(sorted({kind for _, kind in self.groups}))

    def closeness(self, figures: Figures, dtype: str) -> float:
        """How near the measured devices are to one: 2 if it is among them, -1 if the dtype is not served."""
        if self.dtypes and dtype not in self.dtypes:
            return -1.0
        return max(
            2.0 if s.figures.same_kernels(figures) else similarity(figures, s.figures, dtype) for s in self.stacks
        )

    def predict(
        self, rows: Rows, queries: tuple[Query, ...], query: Int64[np.ndarray, "n"], *, host_launch: bool = False
    ) -> Prediction:
        """Times of `rows`, row `i` on `queries[query[i]]`.

        Both gradients of a product take as long as the two apart (`learn._gradients`).

        Args:
            host_launch: add the launch floor that eager measurements contain.
        """
        asked, combo_of = _combinations(rows, query)
        ways = [way(self.family, kind, queries[q], self.stacks, self.plan) for q, kind in asked]
        way_of = np.array(ways, object)[combo_of]

        def own(part: Rows, at: np.ndarray) -> Prediction:
            return self._by_plans(part, queries, query[at], host_launch)

        out = Prediction.empty(len(rows))
        for how in sorted(set(ways)):
            at = np.flatnonzero(way_of == how)
            part = rows.take(at)
            if how == "itself":
                answer = own(part, at)
            elif how == "near measured":
                answer = own(part, at)
                far = np.flatnonzero(answer.provenance > 0)
                if far.size:
                    moved = self._by_plans(part.take(far), queries, query[at[far]], host_launch, direct=False)
                    for total, value in zip(answer, moved, strict=True):
                        total[far] = value
            elif how == "by forward":
                die = np.array([q.figures.die for q in queries], object)[query[at]]
                answer = scaled(own(forward_rows(part), at), log_over_forward(part, die))
            elif how == "by bandwidth":
                answer = norm_times(part, queries, query[at])
            elif how == "sum":
                once, other = gradient_products(part)
                answer = added(own(once, at), own(other, at))
            else:
                whole = whole_backward(part)
                once, other = gradient_products(whole)
                # shares as on the most measured part of the die: a share may grow where all times fall
                home = tuple(q._replace(figures=home_of(self.stacks, q.figures)) for q in queries)
                parts = (self._by_plans(of, home, query[at], host_launch) for of in (part, once, other))
                answer = share_of(own(whole, at), *parts)
            for total, value in zip(out, answer, strict=True):
                total[at] = value
        return out

    def _by_plans(
        self, rows: Rows, queries: tuple[Query, ...], query: Int64[np.ndarray, "n"], host_launch: bool, *,
        direct: bool = True,
    ) -> Prediction:  # fmt: skip
        """Times of rows, each by the plan of its own kind.

        Products of 8 bits are those of the products alone, also where rows of the source hold more (`quantises`);
        for rows of that source as it timed them.
        """
        combos, combo_of = _combinations(rows, query)
        if self.family == "attention":
            own = [self._timed_for(queries[q], kind, direct) for q, kind in combos]
            copies = [self._fills_caches(queries[q], kind, direct) for q, kind in combos]
            die = np.array([q.figures.die for q in queries], object)[query]
            kept = np.array(own, bool)[combo_of]
            rows = without_copies(rows, np.array(copies, bool)[combo_of] & ~kept)
            rows, log_over = as_equal_heads(rows, die, kept)
            out = self._as_timed(rows, queries, query, host_launch, direct)
            return Prediction(*scaled(out, log_over)[:3], np.where(log_over == 0, out.provenance, 1))
        out = self._as_timed(rows, queries, query, host_launch, direct)
        if self.family == "memory":
            moved = [not self._of_die(self.plan(queries[q], kind, direct=direct)) for q, kind in combos]
            at = np.flatnonzero(np.array(moved, bool)[combo_of] | (out.provenance > 0))
            if len(at):
                least = log_least(rows.take(at), queries, query[at])
                for values in (out.log_time, out.log_low, out.log_high):
                    values[at] = np.maximum(values[at], least)
        if self.family != "gemm":
            return out
        more = [kind.dtype == "fp8" and self._quantises(queries[q], kind, direct) for q, kind in combos]
        at = np.flatnonzero(np.array(more, bool)[combo_of])
        if len(at):
            # a share as on the most measured part of the die, so that no part is slower for more bandwidth
            home = tuple(q._replace(figures=home_of(self.stacks, q.figures)) for q in queries)
            part, of = rows.take(at), query[at]
            there = self._as_timed(part, home, of, host_launch, direct)
            share = log_product_share(part, there.log_time, [home[q].figures for q in of])
            for values in (out.log_time, out.log_low, out.log_high):
                values[at] += share
        return out

    def _of_die(self, plan: Plan) -> bool:
        """Whether a plan rests on what its die was timed to take."""
        return plan.mode in ("direct", "sibling") and all(
            self.stacks[t.stack].figures.same_kernels(t.figures) or self.stacks[t.stack].figures == t.home
            for t in plan.terms
        )

    def _timed_for(self, query: Query, kind: KernelKind, direct: bool) -> bool:
        return timed_for(self.plan(query, kind, direct=direct), self.stacks, query.figures, query.source)

    def _fills_caches(self, query: Query, kind: KernelKind, direct: bool) -> bool:
        """Whether attention is answered by prompts of a server, timed while they fill its cache."""
        term = self.plan(query, kind, direct=direct).terms[0]
        return self.stacks[term.stack].fills_caches and term.kind.op == "causal"

    def _quantises(self, query: Query, kind: KernelKind, direct: bool) -> bool:
        """Whether a product is answered by one that was timed with the quantising of its operand, and is not asked as
        its source timed it."""
        stack = self.stacks[self.plan(query, kind, direct=direct).terms[0].stack]
        return stack.quantises and query.source != stack.source

    def _as_timed(
        self, rows: Rows, queries: tuple[Query, ...], query: Int64[np.ndarray, "n"], host_launch: bool, direct: bool
    ) -> Prediction:
        """`_by_plans` with what the sources' rows hold beside their kernel."""
        n = len(rows)
        if not n:
            return Prediction.empty(0)
        combos, combo_of = _combinations(rows, query)
        plans = [self.plan(queries[q], kind, direct=direct) for q, kind in combos]
        order = np.argsort(combo_of, kind="stable")
        bounds = np.searchsorted(combo_of[order], np.arange(len(combos) + 1))
        row, terms, term_of = [], [], []
        for c, plan in enumerate(plans):
            mine = order[bounds[c] : bounds[c + 1]]
            for term in plan.terms:
                row.append(mine)
                term_of.append(np.full(len(mine), len(terms)))
                terms.append(term)
        rows_at, term_at = np.concatenate(row), np.concatenate(term_of)
        log_term, positions = self._evaluate(rows, rows_at, terms, term_at, host_launch)
        coefficient = np.array([t.coefficient for t in terms])[term_at]
        log_time = np.bincount(rows_at, coefficient * log_term, minlength=n)
        first = np.zeros(n, np.int64)
        first[rows_at[::-1]] = np.arange(len(rows_at))[::-1]
        return self._with_bounds(log_time, plans, combo_of, terms, term_at[first], positions[first])

    def plan(self, query: Query, kind: KernelKind, *, direct: bool = True) -> Plan:
        """How a kind is answered on a device (remembered); without `direct`, as if it was not measured there."""
        return self._plans.once((query, kind, direct), lambda: self._plan(query, kind, direct))

    def _plan(self, query: Query, kind: KernelKind, direct: bool) -> Plan:
        known = stand_in(kind, self.kinds)
        plan = make_plan(self.stacks, query.figures, known, query.source, query.software, direct=direct)
        if plan is None:
            raise CalibrationError(f"the weights of {self.family} know {known} and have no stack that measured it")
        return on_behalf_of(plan, known, kind)

    def _evaluate(
        self, rows: Rows, rows_at: np.ndarray, terms: list, term_at: np.ndarray, host_launch: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        kinds = [t.kind for t in terms]
        here = [t._replace(figures=t.at) for t in terms]
        params, there = (term_constants(self.params, self.stacks, self.groups, of) for of in (here, terms))
        stack = np.array([t.stack for t in terms])
        measured = KindColumns.of(kinds, term_at)
        taken = _as_measured(rows.take(rows_at), measured, [t.work or t.kind for t in terms], term_at)
        machine, asked = (machine_of([t.figures for t in of], term_at, measured.dtype) for of in (here, terms))
        codes = np.stack([self.code.one_hot(k) for k in kinds])
        inputs = Inputs(shape_with_flags(taken), machine, codes[term_at], stack[term_at], term_at)
        log_time, positions = log_time_and_positions(
            params, inputs, family=self.family, host_launch=host_launch, xp=np,
            elsewhere=Elsewhere(asked, there.log_memory, there.log_floor_s),
        )  # fmt: skip
        return np.asarray(log_time, np.float64), positions

    def _with_bounds(
        self, log_time: np.ndarray, plans: list[Plan], combo_of: np.ndarray, terms: list, term: np.ndarray,
        positions: np.ndarray,
    ) -> Prediction:  # fmt: skip
        n = len(log_time)
        modes = np.array([p.mode for p in plans])[combo_of]
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


def _combinations(rows: Rows, query: np.ndarray) -> tuple[list[tuple[int, KernelKind]], np.ndarray]:
    """The distinct pairs of query and kind, and which of them each row has [n]."""
    many = len(rows.kinds)
    combos, combo_of = np.unique(query * many + rows.kind, return_inverse=True)
    return [(int(c // many), rows.kinds[c % many]) for c in combos], combo_of


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
