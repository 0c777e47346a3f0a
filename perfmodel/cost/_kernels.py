"""Times of compute kernels: measured, learned, extrapolated or analytical, in that order of trust."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64

from perfmodel.cost._events import EventTimes, KnownTimes
from perfmodel.cost._roofline import (
    HALF_WIDTH,
    as_measured,
    least_of_rows,
    least_seconds,
    roofline_seconds,
    roofline_time,
    rows_by_family,
    wider,
)
from perfmodel.cost.learn import (
    PROVENANCE,
    Figures,
    Prediction,
    PriceQuery,
    Query,
    Regressor,
    Rows,
    WeightFiles,
    added,
    gradient_products,
    in_16_bits,
    load_family,
    table_rows,
    weight_files,
    with_half_batches,
)
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, Attention, Convolution, Gemm, KernelOp
from perfmodel.session import Cache, current_session
from perfmodel.spec import Device

_LABELS = np.array(PROVENANCE, object)


_MOST_DEVICES: Final = 32
"""For which times are kept."""
_MEASURED: Final = PROVENANCE.index("measured")
_WIDE: Final = ("fp64", "fp32", "tf32")
"""Element types that nobody measured attention in."""
_BYTES_OVER_16_BITS: Final = 2.0
"""Bytes of a TF32 operand, which is an fp32 tensor in memory, over those of one of 16 bits."""
_CHUNK: Final = 40_000
_LARGE: Final = (4096, 8192, 16384)
"""Sides of products among which a device's best is."""


class KernelModel:
    """Predicts every op family from the weights of one calibration, each taken from its file when first asked for."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self._families: dict[str, tuple[Regressor, ...]] = {}
        self._known = Cache(_MOST_DEVICES)
        self._reached = Cache(_MOST_DEVICES)
        """Log of what products take less by, by query and dtype class."""

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
        return current_session().cost_models.get_or_compute((cls, weights), lambda: cls(weights))

    def times(self, device: Device, ops: Sequence[KernelOp], *, software: str | None = None) -> EventTimes:
        """Kernel times of `ops` on one device, without the host's launch cost.

        Args:
            software: whose kernels (a `software` or `source` of the measurement tables). By default
                the measured software that stands closest to a training job on torch with cuBLAS.

        Raises:
            CalibrationError: for weights that are truncated or of another schema version.
        """
        known = self._known.get_or_compute((device, software), KnownTimes)
        return known.times(ops, lambda new: [(new, _event_times(self._predict_new(device, software, new)))])

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
                asked_of = table_rows(table.iloc[part], family)
                provenance[part] = asked_of.reasons
                for good, asked in asked_of.parts():
                    found = self._predict(asked)
                    result[:, part[good]] = np.exp([found.log_time, found.log_low, found.log_high])
                    provenance[part[good]] = _LABELS[found.provenance]
        return EventTimes(result[0], result[1], result[2], tuple(provenance.tolist()))

    def _predict_new(self, device: Device, software: str | None, ops: Sequence[KernelOp]) -> Prediction:
        """Times of ops; in element types that nobody measured, at the share of the roofline that the nearest measured
        one reaches, or their nominal rate, and half to all of the time of the next wider one."""
        priced = [as_measured(device, op) for op in ops]
        found = self._predict_ops(Query(Figures.of(device), None, software), priced)
        at = np.array([i for i, (op, measured) in enumerate(zip(ops, priced, strict=True)) if op is not measured], int)
        if len(at):
            own, measured = ([of[i] for i in at] for of in (ops, priced))
            share = roofline_seconds(device, own) / roofline_seconds(device, measured)
            reached_s = np.exp(found.log_time[at]) * share
            log_time = np.log(np.maximum(reached_s, least_seconds(device, own)))
            found.put(at, Prediction.around(log_time, HALF_WIDTH, "extrapolated"))
        unmeasured = [i for i in at.tolist() if wider(device, ops[i]) is not ops[i]]
        if unmeasured:
            wide = self._predict_new(device, software, [wider(device, ops[i]) for i in unmeasured])
            _between(found, np.array(unmeasured), wide)
        return found

    def _predict_ops(self, query: Query, ops: Sequence[KernelOp]) -> Prediction:
        total = Prediction.empty(len(ops))
        for members, rows in rows_by_family(ops):
            total.put(members, self._predict(PriceQuery(rows, (query,), np.zeros(len(rows), np.int64))))
        return total

    def _predict(self, asked: PriceQuery) -> Prediction:
        """Predictions of rows, each by the regressor of its dtype that knows the closest device.

        Where no measured source is asked, products and convolutions of 8 bits take half to all of the time of those of
        16, and products that were not measured no less than their FLOPs at the nominal rate (convolutions may do with
        fewer: Winograd). Products and convolutions in TF32 take no longer than in fp32, as libraries may use it, and
        need not (cuBLAS, `CUBLAS_COMPUTE_32F_FAST_TF32`), nor longer than in 16 bits by more than rate and bytes differ
        (`_within_reach_of_16_bits`), and those in fp64 as long as in fp32 at least. Convolutions in 16 bits of
        channels that are no multiple of eight take no longer than in fp32.
        """
        rows, family = asked.rows, FAMILIES[asked.rows.family]
        if family.op is Attention:
            return self._attention(asked)
        if not family.op.uses_matrix_units:
            return self._by_regressors(asked)
        out, unnamed = Prediction.empty(len(rows)), self._unnamed(asked)
        narrow = (rows.dtypes == "fp8") & unnamed
        # both gradients at once take as long as the two, of which each is bounded by itself
        bounded = narrow | (unnamed & (family.op.is_matmul | (rows.dtypes == "tf32")))
        whole = bounded & (rows.columns.pass_ == "bwd")
        whole &= family.gradients is not None
        if len(at := np.flatnonzero(~whole)):
            out.put(at, self._by_regressors(asked.take(at)))
        if len(at := np.flatnonzero(narrow & ~whole)):
            _between(out, at, self._by_regressors(asked.take(at).instead(in_16_bits(rows.take(at)))))
        if len(at := np.flatnonzero(whole)):
            both = (self._predict(asked.take(at).instead(part)) for part in gradient_products(rows.take(at)))
            out.put(at, added(*both))
        if family.op is Gemm:
            at = np.flatnonzero(unnamed & ~whole)
            reach = self._log_reach(asked.take(at))
            out.move(at, reach)
            # each type reaches its own best, but few bits still take no less than half of the time of many
            moved = at[(reach != 0) & narrow[at]]
            if len(moved):
                _between(out, moved, self._predict(asked.take(moved).instead(in_16_bits(rows.take(moved)))))
        unmeasured = unnamed & (out.provenance != _MEASURED)
        if len(at := np.flatnonzero(unmeasured)) and family.op.is_matmul:
            out.move(at, np.maximum(_log_nominal(asked.take(at)) - out.log_time[at], 0.0))
        # Matrix units take channels by eights: a convolution of others, as of the three of an image, may run its 16-bit
        # operands on the ordinary cores, as fast as those of fp32.
        uneven = rows.shape["c_in"] % 8 != 0 if family.op is Convolution else np.zeros(len(rows), bool)
        nearer_to_fp32 = (
            (rows.dtypes == "tf32", np.minimum),
            (rows.dtypes == "fp64", np.maximum),
            ((rows.dtypes == "half") & uneven, np.minimum),
        )
        for of_dtype, nearer in nearer_to_fp32:
            if len(at := np.flatnonzero(unmeasured & ~whole & of_dtype)):
                fp32 = self._predict(asked.take(at).instead(rows.take(at).changed({}, dtype="fp32")))
                out.move(at, nearer(fp32.log_time - out.log_time[at], 0.0))
        if len(at := np.flatnonzero(unmeasured & ~whole & (rows.dtypes == "tf32"))):
            _within_reach_of_16_bits(out, at, asked.take(at), self._predict)
        return out

    def _attention(self, asked: PriceQuery) -> Prediction:
        """Predictions of attention. Where no measured source is asked, of 32 bits and more what the roofline says, or
        that of 16 if longer; of fewer no longer than without its mask, or than two of half the sequences, one after the
        other; and where it was not measured no less than its FLOPs at the nominal rate."""
        asked, place, half = with_half_batches(asked, self._unnamed(asked))
        out, rows, unnamed = self._by_regressors(asked), asked.rows, self._unnamed(asked)
        wide = unnamed & np.isin(rows.dtypes, _WIDE)
        if len(at := np.flatnonzero(wide)):
            out.put(at, _by_roofline(asked.take(at)))
            in_16 = self._attention(asked.take(at).instead(in_16_bits(rows.take(at))))
            out.move(at, np.maximum(in_16.log_time - out.log_time[at], 0.0))
        self._mask(out, np.flatnonzero(unnamed & ~wide), asked)
        log_nominal = np.full(len(rows), -np.inf)
        at = np.flatnonzero(unnamed & (out.provenance != _MEASURED))
        log_nominal[at] = _log_nominal(asked.take(at))
        batch = rows.shape["batch"]
        for at in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(batch)) + 1):  # halves before wholes
            out.move(at, np.minimum(out.log_time[half[at]] + np.log(2.0) - out.log_time[at], 0.0))
            out.move(at, np.maximum(log_nominal[at] - out.log_time[at], 0.0))
        return out.take(place)

    def _unnamed(self, asked: PriceQuery) -> Bool[np.ndarray, "n"]:
        """Which rows are asked of no source that the weights rest on."""
        known = {s.source for r in self._regressors(asked.rows.family) for s in r.stacks}
        return asked.of_query(lambda query: query.source not in known).astype(bool)

    def _log_reach(self, asked: PriceQuery) -> Float64[np.ndarray, "n"]:
        """Log of what products take less by than the regressors say, of a device that no table times: so much that the
        best of them reaches what its best is known to (`Device.reached_share`)."""
        pairs, pair_of = asked.combinations()
        return np.array([self._log_reach_of(query, kind.dtype) for query, kind in pairs])[pair_of]

    def _log_reach_of(self, query: Query, dtype: str) -> float:
        figures = query.figures
        if figures.reached_share is None:
            return 0.0
        nominal = figures.reached_share * figures.peak(dtype)

        def worked_out() -> float:
            large = [Gemm(dtype="bf16" if dtype == "half" else dtype, m=size, n=size, k=size) for size in _LARGE]
            plain = query._replace(figures=replace(figures, reached_share=None))
            seconds = np.exp(self._predict_ops(plain, large).log_time)
            return min(0.0, float(np.log(max(np.array([op.flops for op in large]) / seconds) / nominal)))

        return self._reached.get_or_compute((query, dtype), worked_out)

    def _mask(self, found: Prediction, at: np.ndarray, asked: PriceQuery) -> None:
        """Move times of attention at positions so that leaving scores out by the causal mask takes no longer than all
        of them: of the two the one that less is known of."""
        for mask, other, sign in zip(ATTENTION_MASKS, reversed(ATTENTION_MASKS), (1.0, -1.0), strict=True):
            own = at[asked.rows.by_kind(lambda kind, mask=mask: kind.op == mask)[at]]
            if not len(own):
                continue
            causal = np.full(len(own), float(other == "causal"))
            others = asked.take(own).instead(asked.rows.take(own).changed({"causal": causal}, op=other))
            by = self._by_regressors(others)
            less_known = found.provenance[own] + (mask == "causal") > by.provenance
            beyond = sign * np.minimum(sign * (by.log_time - found.log_time[own]), 0.0)
            found.move(own, np.where(less_known, beyond, 0.0))

    def _by_regressors(self, asked: PriceQuery) -> Prediction:
        out = Prediction.empty(len(asked))
        regressors = self._regressors(asked.rows.family)

        def closest(query: Query, dtype: str) -> int:
            """The regressor that knows the closest device; -1 where none serves the dtype."""
            closeness = [r.closeness(query.figures, dtype) for r in regressors]
            return int(np.argmax(closeness)) if closeness and max(closeness) >= 0 else -1

        pairs, pair_of = asked.combinations()
        of = [(query, kind.dtype) for query, kind in pairs]
        chosen = {key: closest(*key) for key in dict.fromkeys(of)}
        by = np.array([chosen[key] for key in of], int)[pair_of]
        for r in np.unique(by):
            at = np.flatnonzero(by == r)
            part = asked.take(at)
            out.put(at, regressors[r].predict(part) if r >= 0 else _by_roofline(part))
        return out

    def _regressors(self, family: str) -> tuple[Regressor, ...]:
        if family not in self._families:
            self._families[family] = load_family(self._weights, family)
        return self._families[family]


def _event_times(found: Prediction) -> EventTimes:
    time_s, lo_s, hi_s = np.exp([found.log_time, found.log_low, found.log_high])
    return EventTimes(time_s, lo_s, hi_s, tuple(_LABELS[found.provenance].tolist()))


def _by_roofline(asked: PriceQuery) -> Prediction:
    """Times by the roofline alone, of what nothing was learned about."""
    return Prediction.around(_log_by_query(roofline_time, asked), HALF_WIDTH, "analytical")


def _log_nominal(asked: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Log seconds of the FLOPs of rows at the nominal rate of their devices."""
    return _log_by_query(least_of_rows, asked)


def _log_by_query(
    seconds: Callable[[Figures, Rows], Float64[np.ndarray, "m"]], asked: PriceQuery
) -> Float64[np.ndarray, "n"]:
    """Log of a time that follows from a device's figures and rows."""
    out = np.zeros(len(asked))
    for query, mine in asked.by_query():
        out[mine] = np.log(seconds(query.figures, asked.rows.take(mine)))
    return out


def _within_reach_of_16_bits(
    found: Prediction, at: np.ndarray, asked: PriceQuery, predict: Callable[[PriceQuery], Prediction]
) -> None:
    """Move times in TF32 at positions to no more than the same kernels in 16 bits take at the rate and the bytes of
    TF32.

    The tensor cores that multiply 16 bits run TF32 by the same tiles (cuDNN developer guide, "Tensor Core Operations"),
    so that a kernel's arithmetic takes longer by the ratio of the peak rates, and its traffic by that of the bytes:
    the larger of both bounds the time.
    """
    in_16 = predict(asked.instead(in_16_bits(asked.rows)))
    slower = asked.of_query(
        lambda query: max(_BYTES_OVER_16_BITS, query.figures.peak("half") / query.figures.peak("tf32"))
    )
    longest = in_16.log_time + np.log(slower.astype(np.float64))
    found.move(at, np.minimum(longest - found.log_time[at], 0.0))


def _between(found: Prediction, at: np.ndarray, wide: Prediction) -> None:
    """Move times at positions between half and all of those of elements twice as wide."""
    own = found.log_time[at]
    found.move(at, np.clip(own, wide.log_time - np.log(2.0), wide.log_time) - own)
