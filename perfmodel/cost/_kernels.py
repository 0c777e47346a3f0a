"""Times of compute kernels: measured, learned, extrapolated or analytical, in that order of trust."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Int64

from perfmodel.cost._events import EventTimes
from perfmodel.cost._roofline import HALF_WIDTH, as_measured, least_seconds, roofline_seconds, roofline_time, wider
from perfmodel.cost.learn import (
    PROVENANCE,
    Figures,
    Prediction,
    Query,
    Regressor,
    Rows,
    TableQueries,
    WeightFiles,
    added,
    gradient_products,
    in_16_bits,
    load_family,
    rows_from_ops,
    table_rows,
    weight_files,
    with_half_the_batch,
)
from perfmodel.ingest.tables import factorise
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, Gemm, KernelOp
from perfmodel.session import Store, current_session
from perfmodel.spec import Device

_LABELS = np.array(PROVENANCE, object)


class KnownTimes:
    """Times of ops on one device under one software."""

    def __init__(self) -> None:
        self._code: dict[KernelOp, int] = {}
        self._seconds = np.zeros((0, 3))
        self._provenance = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._code)

    def codes(self, ops: Sequence[KernelOp]) -> tuple[np.ndarray, list[KernelOp]]:
        """Position of every op, and the distinct ones that were not known (`add` their times next)."""
        code, before = self._code, len(self._code)
        positions = np.array([code.setdefault(op, len(code)) for op in ops], np.int64)
        if len(code) == before:
            return positions, []
        fresh, first = np.unique(positions, return_index=True)
        return positions, [ops[i] for i in first[fresh >= before]]

    def add(self, prediction: Prediction) -> None:
        """Times of the new ops, in the order that `codes` gave them."""
        seconds = np.exp(np.stack([prediction.log_time, prediction.log_low, prediction.log_high], axis=1))
        start, end = len(self._code) - len(seconds), len(self._code)
        if end > len(self._seconds):
            room = max(2 * len(self._seconds), end)
            self._seconds = np.concatenate([self._seconds[:start], np.zeros((room - start, 3))])
            self._provenance = np.concatenate([self._provenance[:start], np.zeros(room - start, np.int64)])
        self._seconds[start:end] = seconds
        self._provenance[start:end] = prediction.provenance

    def drop(self, new: Sequence[KernelOp]) -> None:
        """Take new ops back that could not be predicted."""
        for op in new:
            del self._code[op]

    def forget(self) -> None:
        """Start anew."""
        self.__init__()

    def times(self, codes: np.ndarray) -> EventTimes:
        """Times at positions."""
        time_s, lo_s, hi_s = self._seconds[codes].T
        return EventTimes(time_s, lo_s, hi_s, tuple(_LABELS[self._provenance[codes]].tolist()))


_MOST_REMEMBERED: Final = 500_000
"""Ops per device whose times are kept."""
_MOST_DEVICES: Final = 32
"""For which they are."""
_MEASURED: Final = PROVENANCE.index("measured")
_ANALYTICAL: Final = PROVENANCE.index("analytical")
_EXTRAPOLATED: Final = PROVENANCE.index("extrapolated")
_WIDE: Final = ("fp32", "tf32")
"""Element types that nobody measured attention in."""
_CHUNK: Final = 40_000
_LARGE: Final = (4096, 8192, 16384)
"""Sides of products among which a device's best is."""


class KernelModel:
    """Predicts every op family from the weights of one calibration, each taken from its file when first asked for."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self._families: dict[str, tuple[Regressor, ...]] = {}
        self._known = Store(_MOST_DEVICES)

    @classmethod
    def load(cls, calibration: Path | str | None = None) -> "KernelModel":
        """The shipped calibration, or that of a directory made by `perfmodel fit`, as it is now.

        A directory's regressors come before the shipped ones; families that it lacks are served by
        the shipped ones.

        Raises:
            CalibrationError: if the directory is missing or holds no weights.
        """
        return cls.of(weight_files(calibration))

    @classmethod
    def of(cls, weights: WeightFiles) -> "KernelModel":
        """The model of some weights, kept by the session."""
        return current_session().cost_models.once((cls, weights), lambda: cls(weights))

    def times(self, device: Device, ops: Sequence[KernelOp], *, software: str | None = None) -> EventTimes:
        """Kernel times of `ops` on one device, without the host's launch cost.

        Args:
            software: whose kernels (a `software` or `source` of the measurement tables). By default
                the measured software that stands closest to a training job on torch with cuBLAS.

        Raises:
            CalibrationError: for weights that are truncated or of another schema version.
        """
        known = self._known.once((device, software), KnownTimes)
        if len(known) > _MOST_REMEMBERED:
            known.forget()
        codes, new = known.codes(ops)
        if new:
            try:
                known.add(self._predict_new(device, software, new))
            except BaseException:
                known.drop(new)
                raise
        return known.times(codes)

    def table_times(self, table: pd.DataFrame) -> EventTimes:
        """Times of the rows of a compute table as they were measured.

        A row of a source that the weights rest on is asked of that source's software, with the host's launch floor
        where the source timed eager calls; any other row gets what `times` answers for the same op.

        Rows that cannot be priced get NaN and provenance `skipped: reason`; nothing is raised for them.
        """
        n = len(table)
        result = np.full((3, n), np.nan)
        provenance = np.full(n, "skipped: op family is not modelled", object)
        for family in FAMILIES:
            index = np.flatnonzero((table["op_family"] == family).to_numpy())
            for start in range(0, len(index), _CHUNK):
                part = index[start : start + _CHUNK]
                asked = table_rows(table.iloc[part], family)
                provenance[part] = asked.reasons
                for host_launch in (False, True):
                    good = np.flatnonzero((asked.reasons == "") & (asked.host_launch == host_launch))
                    if len(good):
                        prediction = self._predict(asked, good, host_launch=host_launch)
                        result[:, part[good]] = np.exp([prediction.log_time, prediction.log_low, prediction.log_high])
                        provenance[part[good]] = np.array(PROVENANCE, object)[prediction.provenance]
        return EventTimes(result[0], result[1], result[2], tuple(provenance.tolist()))

    def _predict_new(self, device: Device, software: str | None, ops: Sequence[KernelOp]) -> Prediction:
        """Times of ops; in element types that nobody measured, at the share of the roofline that the nearest measured
        one reaches, or their nominal rate, and half to all of the time of the next wider one."""
        priced = [as_measured(device, op) for op in ops]
        found = self._predict_ops(Query(Figures.of(device), None, software), priced)
        at = [i for i, (op, measured) in enumerate(zip(ops, priced, strict=True)) if op is not measured]
        if at:
            own_s, measured_s = (roofline_seconds(device, [of[i] for i in at]) for of in (ops, priced))
            least_s = np.array([ops[i].flops / device.flops_per_s(ops[i].dtype) for i in at])
            found.log_time[at] = np.log(np.maximum(np.exp(found.log_time[at]) * own_s / measured_s, least_s))
            found.log_low[at], found.log_high[at] = found.log_time[at] - HALF_WIDTH, found.log_time[at] + HALF_WIDTH
            found.provenance[at] = _EXTRAPOLATED
        unmeasured = [i for i in at if wider(device, ops[i]) is not ops[i]]
        if unmeasured:
            wide = self._predict_new(device, software, [wider(device, ops[i]) for i in unmeasured])
            _between(found, np.array(unmeasured), wide)
        return found

    def _predict_ops(self, query: Query, ops: Sequence[KernelOp]) -> Prediction:
        by_family: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            by_family.setdefault(op.family, []).append(index)
        n = len(ops)
        total = Prediction(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))
        for members in by_family.values():
            rows = rows_from_ops([ops[i] for i in members])
            n_rows = len(rows)
            asked = TableQueries(
                rows, (query,), np.zeros(n_rows, np.int64), np.full(n_rows, "", object), np.zeros(n_rows, bool)
            )
            part = self._predict(asked, np.arange(len(rows)))
            for whole, values in zip(total, part, strict=True):
                whole[members] = values
        return total

    def _predict(self, asked: TableQueries, index: np.ndarray, *, host_launch: bool = False) -> Prediction:
        """Predictions of some rows, each by the regressor of its dtype that knows the closest device.

        Where no measured source is asked, products and convolutions of 8 bits take half to all of the time of those of
        16; attention of 32 bits as much longer than of 16 as by the roofline, and no longer than without its mask or
        than two of half the sequences, one after the other; and products and attention that were not measured no less
        than their FLOPs at the nominal rate (convolutions may do with fewer: Winograd).
        """
        rows, query = asked.rows.take(index), asked.query[index]
        out = self._by_regressors(rows, query, asked, host_launch)
        family = FAMILIES[rows.family]
        if not family.op.uses_matrix_units:
            return out
        known = {s.source for r in self._regressors(rows.family) for s in r.stacks}
        unnamed = np.array([q.source not in known for q in asked.queries], bool)[query]
        if rows.family == "attention":
            wide = unnamed & np.isin(rows.dtypes, _WIDE)
            if len(at := np.flatnonzero(wide)):
                self._from_16_bits(out, at, rows, query, asked, host_launch)
            self._mask(out, np.flatnonzero(unnamed & ~wide), rows, query, asked, host_launch)
            at = np.flatnonzero(unnamed & ~wide & (rows.shape["batch"] % 2 == 0))
            if len(at):
                half = replace(asked, rows=with_half_the_batch(rows.take(at)), query=query[at])
                twice = self._predict(half, np.arange(len(at)), host_launch=host_launch).log_time + np.log(2.0)
                _move(out, at, np.minimum(twice - out.log_time[at], 0.0))
        else:
            narrow = (rows.dtypes == "fp8") & unnamed
            # both gradients at once take as long as the two, of which each is bounded by itself
            whole = (narrow | (unnamed & family.op.is_matmul)) & (rows.columns.pass_ == "bwd")
            whole &= family.gradients is not None
            if len(at := np.flatnonzero(narrow & ~whole)):
                _between(out, at, self._by_regressors(in_16_bits(rows.take(at)), query[at], asked, host_launch))
            if len(at := np.flatnonzero(whole)):
                parts = gradient_products(rows.take(at))
                every, of = np.arange(len(at)), query[at]
                both = (self._predict(replace(asked, rows=p, query=of), every, host_launch=host_launch) for p in parts)
                for total, values in zip(out, added(*both), strict=True):
                    total[at] = values
            if family.op is Gemm:
                self._reach(out, np.flatnonzero(unnamed & ~whole), rows, query, asked)
        bounded = unnamed & (out.provenance != _MEASURED) & (family.op.is_matmul or rows.family == "attention")
        for q in np.unique(query[bounded]):
            at = np.flatnonzero((query == q) & bounded)
            least = np.log(least_seconds(asked.queries[q].figures, rows.take(at)))
            _move(out, at, np.maximum(least - out.log_time[at], 0.0))
        return out

    def _reach(
        self, found: Prediction, at: np.ndarray, rows: Rows, query: Int64[np.ndarray, "n"], asked: TableQueries
    ) -> None:
        """Products at positions, of a device that no table times, take so much less that the best of them reaches what
        its best is known to (`Device.reached_share`)."""
        for q in np.unique(query[at]):
            figures = asked.queries[q].figures
            if figures.reached_share is None:
                continue
            plain = asked.queries[q]._replace(figures=replace(figures, reached_share=None))
            of_query = at[query[at] == q]
            for dtype in map(str, np.unique(rows.dtypes[of_query])):
                large = [Gemm(dtype="bf16" if dtype == "half" else dtype, m=size, n=size, k=size) for size in _LARGE]
                seconds = np.exp(self._predict_ops(plain, large).log_time)
                best = max(op.flops / s for op, s in zip(large, seconds.tolist(), strict=True))
                mine = of_query[rows.dtypes[of_query] == dtype]
                factor = min(0.0, float(np.log(best / (figures.reached_share * figures.peak(dtype)))))
                _move(found, mine, np.full(len(mine), factor))

    def _from_16_bits(
        self,
        found: Prediction,
        at: np.ndarray,
        rows: Rows,
        query: Int64[np.ndarray, "n"],
        asked: TableQueries,
        host_launch: bool,
    ) -> None:
        """Set times at positions to those at the share of the roofline that the same kernels reach in 16 bits."""
        wide, of = rows.take(at), query[at]
        narrow = replace(asked, rows=in_16_bits(wide), query=of)
        log_time = self._predict(narrow, np.arange(len(at)), host_launch=host_launch).log_time
        for q in np.unique(of):
            mine, figures = np.flatnonzero(of == q), asked.queries[q].figures
            own_s, narrow_s = (roofline_time(figures, part.take(mine)) for part in (wide, narrow.rows))
            log_time[mine] += np.log(own_s / narrow_s)
        found.log_time[at] = log_time
        found.log_low[at], found.log_high[at] = log_time - HALF_WIDTH, log_time + HALF_WIDTH
        found.provenance[at] = _EXTRAPOLATED

    def _mask(
        self,
        found: Prediction,
        at: np.ndarray,
        rows: Rows,
        query: Int64[np.ndarray, "n"],
        asked: TableQueries,
        host_launch: bool,
    ) -> None:
        """Move times of attention at positions so that leaving scores out by the causal mask takes no longer than all
        of them: of the two the one that less is known of."""
        for mask, other, sign in zip(ATTENTION_MASKS, reversed(ATTENTION_MASKS), (1.0, -1.0), strict=True):
            own = at[rows.by_kind(lambda kind, mask=mask: kind.op == mask)[at]]
            if not len(own):
                continue
            causal = np.full(len(own), float(other == "causal"))
            others = rows.take(own).changed({"causal": causal}, op=other)
            by = self._by_regressors(others, query[own], asked, host_launch)
            less_known = found.provenance[own] + (mask == "causal") > by.provenance
            beyond = sign * np.minimum(sign * (by.log_time - found.log_time[own]), 0.0)
            _move(found, own, np.where(less_known, beyond, 0.0))

    def _by_regressors(
        self, rows: Rows, query: Int64[np.ndarray, "n"], asked: TableQueries, host_launch: bool
    ) -> Prediction:
        n = len(rows)
        out = Prediction(np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, _ANALYTICAL))
        codes, dtypes = factorise(rows.dtypes)
        regressors = self._regressors(rows.family)
        chosen = np.full((len(asked.queries), len(dtypes)), -1)
        for q in np.unique(query):
            for d in range(len(dtypes)):
                closeness = [r.closeness(asked.queries[q].figures, dtypes[d]) for r in regressors]
                if closeness and max(closeness) >= 0:
                    chosen[q, d] = int(np.argmax(closeness))
        by = chosen[query, codes]
        for r in np.unique(by[by >= 0]):
            at = np.flatnonzero(by == r)
            part = regressors[r].predict(rows.take(at), asked.queries, query[at], host_launch=host_launch)
            for total, value in zip(out, part, strict=True):
                total[at] = value
        for q in np.unique(query[by < 0]):
            at = np.flatnonzero((by < 0) & (query == q))
            log_time = np.log(roofline_time(asked.queries[q].figures, rows.take(at)))
            out.log_time[at], out.log_low[at], out.log_high[at] = log_time, log_time - HALF_WIDTH, log_time + HALF_WIDTH
        return out

    def _regressors(self, family: str) -> tuple[Regressor, ...]:
        if family not in self._families:
            self._families[family] = load_family(self._weights, family)
        return self._families[family]


def _between(found: Prediction, at: np.ndarray, wide: Prediction) -> None:
    """Move times at positions between half and all of those of elements twice as wide."""
    own = found.log_time[at]
    _move(found, at, np.clip(own, wide.log_time - np.log(2.0), wide.log_time) - own)


def _move(found: Prediction, at: np.ndarray, by: np.ndarray) -> None:
    """Add to the logarithms of times at positions and of the ends of their intervals."""
    for log in (found.log_time, found.log_low, found.log_high):
        log[at] += by
