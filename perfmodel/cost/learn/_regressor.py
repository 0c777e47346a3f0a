"""A fitted regressor of one op family."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64

from perfmodel.cost.learn._gradients import (
    AnswerMethod,
    added,
    answer_method,
    as_causal,
    as_equal_heads,
    forward_rows,
    gradient_products,
    log_least,
    log_over_forward,
    log_over_served,
    log_product_share,
    norm_times,
    scaled,
    whole_backward,
    without_copies,
)
from perfmodel.cost.learn._queries import Prediction, PriceQuery, Query
from perfmodel.cost.learn.intervals import Intervals
from perfmodel.cost.learn.parameters import (
    Elsewhere,
    Inputs,
    Parameters,
    log_time_and_positions,
    term_constants,
)
from perfmodel.cost.learn.plans import Plan, Term, home_of, make_plan, on_behalf_of, timed_for
from perfmodel.cost.learn.rows import (
    KindCode,
    Rows,
    distinct,
    machine_of,
    shape_with_flags,
    stand_in,
)
from perfmodel.cost.learn.stack import Figures, Stack, similarity
from perfmodel.errors import CalibrationError
from perfmodel.ingest import FILL_CACHES, quantises_operands
from perfmodel.ops import FAMILIES, KernelKind, KindColumns
from perfmodel.session import Cache

_MOST_PLANS: Final = 4096
"""Most plans that are cached; few devices and kinds are usual."""
_CELL: Final = 2.0
"""Side of a cell of measured shapes, in doublings."""
_ROUNDING: Final = 1e-6
"""Doublings by which a measured shape may miss its own range, as ranges are kept in 32 bits."""


@dataclass(frozen=True)
class Regressor:
    """Predicts one family (or some of its dtypes). Immutable except for a cache of plans."""

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
    """Origin of the weights: tables and hashes, rows by source, seed, split, errors."""
    _plans: Cache = field(default_factory=lambda: Cache(_MOST_PLANS), compare=False, repr=False)

    @property
    def kinds(self) -> tuple[KernelKind, ...]:
        """All kinds that some stack was measured on."""
        return tuple(sorted({kind for _, kind in self.groups}))

    def closeness(self, figures: Figures, dtype: str) -> float:
        """Similarity of the measured devices to a device: 2 if it is among them, -1 if the dtype is
        not supported."""
        if self.dtypes and dtype not in self.dtypes:
            return -1.0
        similarities = []
        for stack in self.stacks:
            if stack.figures.same_kernels(figures):
                return 2.0
            similarities.append(similarity(figures.nominal, stack.figures, dtype))
        return max(similarities)

    def predict(self, request: PriceQuery) -> Prediction:
        """Predict the time of each row for its query.

        Both gradients of a product take as long as its two gradients one after the other
        (`learn._gradients`).
        """
        # The method of a row depends only on its device, software and kind, of which there are few.
        pairs, pair_of = request.combinations()
        methods: list[AnswerMethod] = [
            answer_method(self.family, kind, query, self.stacks, self.plan) for query, kind in pairs
        ]
        method_of_row = np.array(methods, object)[pair_of]
        answers = Prediction.empty(len(request))
        for method in dict.fromkeys(methods):
            index = np.flatnonzero(method_of_row == method)
            answers.put(index, self._answer_by(method, request.take(index)))
        return answers

    def _answer_by(self, method: AnswerMethod, request: PriceQuery) -> Prediction:
        """Times of rows that are all answered by one method."""
        match method:
            case "itself":
                return self._by_plans(request)
            case "near measured":
                # Few shapes were timed on the device. Far from them, the answer ignores these
                # measurements.
                answers = self._by_plans(request)
                far_index = np.flatnonzero(answers.provenance > 0)
                if far_index.size:
                    answers.put(far_index, self._by_plans(request.take(far_index), direct=False))
                return answers
            case "by forward":
                forward = self._by_plans(request.with_rows(forward_rows(request.rows)))
                return scaled(forward, log_over_forward(self._for_home_device(request)))
            case "by bandwidth":
                return norm_times(request)
            case "sum":
                input_gradient, weight_gradient = gradient_products(request.rows)
                return added(
                    self._by_plans(request.with_rows(input_gradient)),
                    self._by_plans(request.with_rows(weight_gradient)),
                )
            case "share":
                backward = whole_backward(request.rows)
                # The share is that on the most measured part of the die: on other parts it could
                # grow while all times fall.
                home = self._for_home_device(request)
                input_gradient, weight_gradient = (
                    self._by_plans(home.with_rows(rows)) for rows in gradient_products(backward)
                )
                both_products = added(input_gradient, weight_gradient)
                part = self._by_plans(home)
                return scaled(
                    self._by_plans(request.with_rows(backward)),
                    part.log_time - both_products.log_time,
                )

    def _for_home_device(self, request: PriceQuery) -> PriceQuery:
        """The rows with the most measured part of each device's die (`home_of`) in place of the
        device.

        Exponentials per clock stay those of the device, because the ratios are about these.
        """

        def at_home(figures: Figures) -> Figures:
            home = home_of(self.stacks, figures)
            return replace(home, exponentials_per_clock=figures.exponentials_per_clock)

        return replace(
            request, queries=tuple(q._replace(figures=at_home(q.figures)) for q in request.queries)
        )

    def _by_plans(self, request: PriceQuery, *, direct: bool = True) -> Prediction:
        """Times of rows by the plans of their kinds, without the other work that some sources time
        with a kernel.

        Args:
            direct: as in `plan`.
        """
        if self.family == "attention":
            return self._attention_of_training(request, direct)
        answers = self._as_timed(request, direct)
        if self.family == "memory":
            # On another die, or far from measured shapes, a kernel that moves tensors takes at
            # least as long as its bytes take to stream through memory.
            elsewhere = self._rows_where(
                request, direct, lambda query, kind, plan: not self._rests_on_die(plan)
            )
            index = np.flatnonzero(elsewhere | (answers.provenance > 0))
            if len(index):
                answers.at_least(index, log_least(request.take(index)))

        if any(kind.dtype == "fp8" for kind in request.rows.kinds) and self.family == "gemm":
            self._leave_out_quantising(answers, request, direct)
        return answers

    def _attention_of_training(self, request: PriceQuery, direct: bool) -> Prediction:
        """Times of attention in training, derived from kernels that were timed differently
        (`learn._gradients`)."""

        # Rows that the requested source timed, or a user on this device, are used as they are.
        as_asked = self._rows_where(
            request,
            direct,
            lambda query, kind, plan: timed_for(plan, self.stacks, query.figures, query.source),
        )

        # Wide heads were timed under a causal mask alone.
        die = request.of_query(lambda query: query.figures.die)
        rows, log_over = as_causal(request.rows, die, as_asked)
        request = request.with_rows(rows)

        # Inference servers copy the keys and values of causal prompts into a cache, and their times
        # include that copy.
        served = ~as_asked & self._rows_where(
            request,
            direct,
            lambda query, kind, plan: self.stacks[plan.terms[0].stack].source in FILL_CACHES,
        )
        copies = served & self._rows_where(
            request, direct, lambda query, kind, plan: plan.terms[0].kind.op == "causal"
        )
        rows = without_copies(request.rows, copies)

        # Rows are priced in 16 bits and with heads of equal length, then scaled.
        rows, log_over_equal_heads = as_equal_heads(rows, die, as_asked)
        log_over += log_over_equal_heads
        log_over += log_over_served(self._for_home_device(request), served)
        answers = self._as_timed(request.with_rows(rows), direct)
        log_time, log_low, log_high, _ = scaled(answers, log_over)
        learned = 1
        return Prediction(
            log_time, log_low, log_high, np.where(log_over == 0, answers.provenance, learned)
        )

    def _leave_out_quantising(self, answers: Prediction, request: PriceQuery, direct: bool) -> None:
        """Subtract the quantising of an operand from times of 8-bit products whose source timed
        both together.

        If the request names that source, its times stay as they are.
        """

        def quantises(query: Query, kind: KernelKind, plan: Plan) -> bool:
            return kind.dtype == "fp8" and self._quantises(query, plan)

        index = np.flatnonzero(self._rows_where(request, direct, quantises))
        if len(index):
            # The share is that on the most measured part of the die, so that no part is slower for
            # more bandwidth.
            home = self._for_home_device(request.take(index))
            at_home = self._as_timed(home, direct)
            answers.move(index, log_product_share(home, at_home.log_time))

    def _rows_where(
        self, request: PriceQuery, direct: bool, holds: Callable[[Query, KernelKind, Plan], bool]
    ) -> Bool[np.ndarray, "n"]:
        """Whether a condition on query, kind and plan holds for each row."""
        pairs, pair_of = request.combinations()
        return np.array(
            [holds(q, kind, self.plan(q, kind, direct=direct)) for q, kind in pairs], bool
        )[pair_of]

    def _rests_on_die(self, plan: Plan) -> bool:
        """Whether a plan rests on measurements of its die."""
        return plan.mode in ("direct", "sibling") and all(
            self.stacks[t.stack].figures.same_kernels(t.figures)
            or self.stacks[t.stack].figures == t.home
            for t in plan.terms
        )

    def _quantises(self, query: Query, plan: Plan) -> bool:
        """Whether a product's time includes the quantising of its operand, though the request does
        not name its source."""
        stack = self.stacks[plan.terms[0].stack]
        return quantises_operands(stack.source, stack.software) and query.source != stack.source

    def _as_timed(self, request: PriceQuery, direct: bool) -> Prediction:
        """Times of rows by their plans, including the other work that some sources time with a
        kernel."""
        n = len(request)
        if not n:
            return Prediction.empty(0)
        pairs, pair_of = request.combinations()
        plans = [self.plan(query, kind, direct=direct) for query, kind in pairs]

        # Repeat every row for each term of its plan, so that the network runs once over all of
        # them. Rows are sorted by their pair: those of pair p are order[bounds[p] : bounds[p + 1]].
        order = np.argsort(pair_of, kind="stable")
        bounds = np.searchsorted(pair_of[order], np.arange(len(pairs) + 1))
        terms: list[Term] = []
        row_parts, term_parts = [], []
        for p, plan in enumerate(plans):
            rows_of_plan = order[bounds[p] : bounds[p + 1]]
            for term in plan.terms:
                row_parts.append(rows_of_plan)
                term_parts.append(np.full(len(rows_of_plan), len(terms)))
                terms.append(term)
        rows_at = np.concatenate(row_parts)
        term_at = np.concatenate(term_parts)
        log_term, positions = self._evaluate(
            request.rows.take(rows_at), terms, term_at, request.host_launch
        )

        # A row's log time is the weighted sum over its terms.
        coefficient = np.array([t.coefficient for t in terms])[term_at]
        log_time = np.bincount(rows_at, coefficient * log_term, minlength=n)

        # The first term of its plan decides provenance and interval: assigned backwards, it
        # overwrites the others.
        first = np.zeros(n, np.int64)
        first[rows_at[::-1]] = np.arange(len(rows_at))[::-1]
        modes = np.array([plan.mode for plan in plans])[pair_of]
        return self._with_bounds(log_time, modes, terms, term_at[first], positions[first])

    def plan(self, query: Query, kind: KernelKind, *, direct: bool = True) -> Plan:
        """The plan for a kind on a device (cached); without `direct`, as if it had not been
        measured there."""

        def new_plan() -> Plan:
            known = stand_in(kind, self.kinds)
            plan = make_plan(
                self.stacks, query.figures, known, query.source, query.software, direct=direct
            )
            if plan is None:
                raise CalibrationError(
                    f"the weights of {self.family} list {known} but have no measurements of it; fit them again"
                )
            return on_behalf_of(plan, known, kind)

        return self._plans.get_or_compute((query, kind, direct), new_plan)

    def _evaluate(
        self, rows: Rows, terms: list[Term], term_at: np.ndarray, host_launch: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log seconds of every row by its term, and the positions of its shape on the family's
        axes."""
        # Each term is evaluated on the device whose kernels it runs (`Term.at`), where the residual
        # is known, and adjusted to the requested device, where only clocks and bandwidth differ.
        terms_at_home = [t._replace(figures=t.at) for t in terms]
        params = term_constants(self.params, self.stacks, self.groups, terms_at_home)
        params_asked = term_constants(self.params, self.stacks, self.groups, terms)

        # The work is that of the requested kind, the kernel that of the measured kind.
        kinds = [t.kind for t in terms]
        work = [t.work or t.kind for t in terms]
        measured = KindColumns.of(kinds, term_at)
        as_measured = FAMILIES[rows.family].as_measured
        shape_measured = as_measured(
            rows.shape, rows.columns, measured, KindColumns.of(work, term_at)
        )
        shape = shape_with_flags(Rows(rows.family, shape_measured, *distinct(work, term_at)))
        machine = machine_of([t.figures for t in terms_at_home], term_at, measured.dtype)
        machine_asked = machine_of([t.figures for t in terms], term_at, measured.dtype)

        stack = np.array([t.stack for t in terms])[term_at]
        codes = np.stack([self.code.one_hot(kind) for kind in kinds])[term_at]
        log_time, positions = log_time_and_positions(
            params,
            Inputs(shape, machine, codes, stack, term_at),
            family=self.family,
            host_launch=host_launch,
            elsewhere=Elsewhere(machine_asked, params_asked.log_memory, params_asked.log_floor_s),
        )
        return np.asarray(log_time, np.float64), positions

    def _with_bounds(
        self,
        log_time: np.ndarray,
        modes: np.ndarray,
        terms: list[Term],
        term: np.ndarray,
        positions: np.ndarray,
    ) -> Prediction:
        """Intervals and provenance by the mode of every row's plan and its first term."""
        stack = np.array([t.stack for t in terms])[term]
        groups = list(dict.fromkeys((t.stack, t.kind) for t in terms))
        group = np.array([groups.index((t.stack, t.kind)) for t in terms])[term]

        # Inside: between the smallest and the largest shape that the stack was timed on. Near: a
        # shape in the same cell of the family's axes was timed, on the stack and in the kind.
        in_table = np.all(positions >= self.params.table_low[stack] - _ROUNDING, axis=1)
        in_table &= np.all(positions <= self.params.table_high[stack] + _ROUNDING, axis=1)

        cells = cell_hash(self.stacks, groups, group, positions)
        near_measured = np.zeros(len(cells), bool)
        if len(self.cells):
            cell_index = np.minimum(np.searchsorted(self.cells, cells), len(self.cells) - 1)
            near_measured = self.cells[cell_index] == cells

        direct = modes == "direct"
        by_relatives = np.isin(modes, ("ratio", "sibling"))
        measured, learned, extrapolated = 0, 1, 2
        in_reach = np.where(in_table & (direct | by_relatives), learned, extrapolated)
        provenance = np.where(direct & in_table & near_measured, measured, in_reach)

        # Offsets of the interval's ends, by what was held out to learn them: shapes of the group,
        # the largest shapes, devices with near relatives, devices without.
        low = np.zeros(len(log_time))
        high = np.zeros(len(log_time))
        in_range = direct & in_table
        for code in np.unique(group[in_range]):
            in_group = in_range & (group == code)
            quantiles = self.intervals.groups.get(groups[code], self.intervals.family)
            low[in_group], high[in_group] = quantiles.at(log_time[in_group])
        for mask, quantiles in (
            (direct & ~in_table, self.intervals.beyond),
            (by_relatives | (modes == "near"), self.intervals.near),
            (modes == "far", self.intervals.far),
        ):
            if mask.any():
                low[mask], high[mask] = quantiles.at(log_time[mask])
        return Prediction(log_time, log_time + low, log_time + high, provenance)


def cell_hash(
    stacks: Sequence[Stack],
    groups: Sequence[tuple[int, KernelKind]],
    group: np.ndarray,
    positions: Float64[np.ndarray, "n A"],
) -> np.ndarray:
    """uint32 hash of every row's stack and kind (`groups[group[i]]`) and the coarse cell that its
    shape lies in."""
    # Weights files store these hashes, so neither the label nor the mixing may change.
    value = np.array(
        [zlib.crc32(f"{stacks[s].key}|{kind}".encode()) for s, kind in groups], np.uint64
    )[group]
    for axis in np.floor(positions / _CELL).astype(np.int64).T:
        value = (value * np.uint64(1_000_003) + (axis + 64).astype(np.uint64)) & np.uint64(
            0xFFFFFFFF
        )
    return value.astype(np.uint32)
