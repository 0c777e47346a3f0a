"""Times of compute kernels: measured, learned, extrapolated or analytical, in order of preference.

A kernel's time is made in this order, every step of it a function that says what it rests on:

1. Physics: FLOPs, bytes, tiles and waves of its shape (`physics` of its family in `perfmodel.ops`).
2. Regressor: a roofline with fitted efficiencies times the residual of a network
   (`learn.parameters`), for the device, kind and software that a plan chooses (`learn.plans`);
   gradients by their sum or their share (`learn._gradients`).
3. Dies: what kernels of training are known to take beside those that tables time
   (`learn._gradients`, applied by `Regressor`): attention without the copies that servers make
   (`without_copies`), without a mask (`as_causal`), of other head sizes and in 8 bits
   (`as_equal_heads`), of training (`log_over_served`), backward by its forward
   (`log_over_forward`); norms by their bandwidth
   (`norm_times`); the least time of what streams through memory (`log_least`); products of 8 bits
   without the quantising that sources timed with them (`log_product_share`). Published benchmarks
   of these kernels.
4. Laws between element types, masks and batches, for what was not measured so (here):
   - products and convolutions (`_predict_products`): 8 bits between half and all of 16; both
     gradients as the sum of two products; the rate that a device's best product is known to reach;
     no more than the nominal rate; TF32 and fp64 beside fp32; TF32 beside 16 bits;
   - attention (`_predict_attention`): wide types by the roofline; causal no longer than the tiles
     of all scores that it computes; a batch no longer than its halves; no more than the nominal
     rate;
   - parts whose tensor units are slower than their die's (`_bound_by_whole_units`): what a kernel
     takes beyond its arithmetic stays as on the die;
   - 4-bit floats and 8-bit integers (`_predict_new`): the share of the roofline that the nearest
     measured type reaches.
5. Step and site: the framework's kernels, growth with the work, the clock under load and what runs
   of a site showed hold in a step and not for a kernel alone: `perfmodel.prediction._price`
   continues this list.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool

from perfmodel.cost._events import MOST_EVENTS, EventTimes
from perfmodel.cost._regressors import (
    FamilyRegressors,
    between_half_and_all,
    bound_by_halves_and_nominal_rate,
    by_roofline,
)
from perfmodel.cost._roofline import (
    HALF_WIDTH,
    as_measured,
    least_of_rows,
    log_by_share_of_roofline,
    log_computed_share,
    rows_by_family,
    wider,
)
from perfmodel.cost.learn import (
    PROVENANCE,
    Prediction,
    PriceQuery,
    Query,
    WeightFiles,
    added,
    gradient_products,
    table_rows,
    weight_files,
    with_half_batches,
)
from perfmodel.cost.learn.rows import in_16_bits
from perfmodel.cost.learn.stack import Figures, with_whole_units
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, Attention, Convolution, Gemm, KernelOp
from perfmodel.session import Cache, current_session
from perfmodel.spec import Device

if TYPE_CHECKING:
    import pandas as pd

_LABELS = np.array(PROVENANCE, object)
_MOST_DEVICES: Final = 32
"""Most pairs of device and software whose kernel times are cached."""
_MEASURED: Final = PROVENANCE.index("measured")
_WIDE: Final = ("fp64", "fp32", "tf32")
"""Element types that nobody measured attention in."""
_BYTES_OVER_16_BITS: Final = 2.0
"""Bytes of a TF32 operand, which is stored as fp32, relative to a 16-bit one."""
_CHUNK: Final = 40_000
"""Rows of a table that are priced at once, so that their features fit into memory."""
_LARGE: Final = (4096, 8192, 16384)
"""Sides of products among which the fastest of a device is searched."""


class KernelModel:
    """Predicts all op families from a calibration's weights."""

    def __init__(self, weights: WeightFiles) -> None:
        self._regressors = FamilyRegressors(weights)
        self._known = Cache(_MOST_DEVICES)
        self._reached = Cache(_MOST_DEVICES)
        """Cached log factors for `Device.reached_share`, by query and dtype class."""

    @classmethod
    def load(cls, calibration: Path | str | None = None) -> "KernelModel":
        """Load the shipped calibration, or a directory made by `perfmodel fit`.

        A directory's regressors come before the shipped ones; families that it lacks are served by
        the shipped ones.

        Raises:
            CalibrationError: if the directory is missing or holds no weights.
        """
        return cls.of(weight_files(calibration))

    @classmethod
    def of(cls, weights: WeightFiles) -> "KernelModel":
        """The model of some weights (cached in the session)."""
        return current_session().cost_models.get_or_compute((cls, weights), lambda: cls(weights))

    def times(
        self, device: Device, ops: Sequence[KernelOp], *, software: str | None = None
    ) -> EventTimes:
        """Kernel times of `ops` on one device, without the host's launch cost.

        Args:
            software: whose kernels (a `software` or `source` of the measurement tables). By default
                the measured software that stands closest to a training job on torch with cuBLAS.

        Raises:
            CalibrationError: for weights that are truncated or of another schema version.
        """

        # All ops that are new in one call: regressors work on arrays.
        def predict(
            new: list[KernelOp],
        ) -> Iterator[tuple[KernelOp, tuple[float, float, float, str]]]:
            answers = self._predict_new(device, software, new)
            columns = np.exp([answers.log_time, answers.log_low, answers.log_high]).tolist()
            return zip(
                new, zip(*columns, _LABELS[answers.provenance].tolist(), strict=True), strict=True
            )

        known = self._known.get_or_compute((device, software), lambda: Cache(MOST_EVENTS))
        return EventTimes.of_rows(known.get_or_compute_each(ops, predict))

    def table_times(self, table: "pd.DataFrame") -> EventTimes:
        """Times of the rows of a compute table as they were measured.

        A row of a source on which the weights rest is predicted for that source's software, with
        the host's launch floor where the source timed eager calls. Any other row gets the result of
        `times` for the same op.

        Rows that cannot be priced get NaN and provenance `skipped: reason`; nothing is raised for
        them.
        """
        n = len(table)
        result = np.full((3, n), np.nan)
        provenance = np.full(n, "skipped: op family is not modelled", object)
        # Each family has columns of its own; all rows of a large table at once would not fit into
        # memory.
        for family in FAMILIES:
            index = np.flatnonzero((table["op_family"] == family).to_numpy())
            for start in range(0, len(index), _CHUNK):
                part = index[start : start + _CHUNK]
                queries = table_rows(table.iloc[part], family)
                provenance[part] = queries.reasons
                for priced, request in queries.parts():
                    answers = self._predict(request)
                    result[:, part[priced]] = np.exp(
                        [answers.log_time, answers.log_low, answers.log_high]
                    )
                    provenance[part[priced]] = _LABELS[answers.provenance]
        return EventTimes(result[0], result[1], result[2], tuple(provenance.tolist()))

    def _predict_new(
        self, device: Device, software: str | None, ops: Sequence[KernelOp]
    ) -> Prediction:
        """Times of ops of any families on a device that are not cached yet."""
        query = Query(Figures.of(device), None, software)

        # 1. Times from the tables: 4-bit floats and 8-bit integers use those of the nearest
        # measured type.
        measured_ops = [as_measured(device, op) for op in ops]
        answers = self._predict_ops(query, measured_ops)

        # 2. Types that no table has take the stand-in's time, times the ratio of both rooflines.
        pairs = zip(ops, measured_ops, strict=True)
        unmeasured = np.array(
            [i for i, (op, measured) in enumerate(pairs) if op is not measured], int
        )
        if len(unmeasured):
            unmeasured_ops = [ops[i] for i in unmeasured]
            stand_ins = [measured_ops[i] for i in unmeasured]
            log_time = log_by_share_of_roofline(
                device, unmeasured_ops, stand_ins, answers.log_time[unmeasured]
            )
            answers.put(unmeasured, Prediction.around(log_time, HALF_WIDTH, "extrapolated"))

        # 3. Half the bits take half to all of the time. The wider type may itself be one that
        # nobody measured.
        bounded = [i for i in unmeasured.tolist() if wider(device, ops[i]) is not ops[i]]
        if bounded:
            wide = self._predict_new(device, software, [wider(device, ops[i]) for i in bounded])
            between_half_and_all(answers, np.array(bounded), wide)
        return answers

    def _predict_ops(self, query: Query, ops: Sequence[KernelOp]) -> Prediction:
        """Times of ops of any families, all of one query."""
        answers = Prediction.empty(len(ops))
        for members, rows in rows_by_family(ops):
            answers.put(
                members, self._predict(PriceQuery(rows, (query,), np.zeros(len(rows), np.int64)))
            )
        return answers

    def _predict(self, request: PriceQuery) -> Prediction:
        """Times of rows of one family: the regressors' answers, corrected where they violate a law
        of such kernels."""
        op = FAMILIES[request.rows.family].op
        if not op.uses_matrix_units:
            # Kernels that the memory bounds: the regressor has what laws there are
            # (`Regressor._by_plans`).
            return self._regressors.predict(request)
        answers = (
            self._predict_attention(request) if op is Attention else self._predict_products(request)
        )
        # Few devices are parts whose tensor units are slower than those of their die.
        if any(with_whole_units(query.figures) is not query.figures for query in request.queries):
            self._bound_by_whole_units(answers, request)
        return answers

    def _bound_by_whole_units(self, answers: Prediction, request: PriceQuery) -> None:
        """Let slowed tensor units lengthen a kernel by no more than its arithmetic.

        A part whose tensor units alone are slower than those of its die moves data, issues
        instructions and takes exponentials as fast as the die does. So a kernel takes as long as
        with the die's units, plus the time by which its FLOPs take longer. The regressor knows such
        a part by its peak alone, and gives it the share of the peak that the die reaches. Where
        tables time the device itself they are right.
        """
        regressors = self._regressors.of(request.rows.family)

        def whole(query: Query) -> Query:
            return query._replace(figures=with_whole_units(query.figures))

        def is_slowed(query: Query) -> bool:
            if with_whole_units(query.figures) is query.figures:
                return False
            stacks = chain.from_iterable(regressor.stacks for regressor in regressors)
            return not any(stack.figures.same_kernels(query.figures) for stack in stacks)

        slowed = request.of_query(is_slowed).astype(bool)
        slowed &= self._regressors.unnamed(request)
        # Both gradients at once are the sum of two products, each of which is bounded by itself.
        backward = slowed & (request.rows.columns.pass_ == "bwd")
        backward &= FAMILIES[request.rows.family].gradients is not None
        if backward.any():
            self._answer_backward_by_its_products(answers, request, np.flatnonzero(backward))
        index = np.flatnonzero(slowed & ~backward)
        if not len(index):
            return
        on_part = request.take(index)
        on_whole_die = replace(
            on_part, queries=tuple(whole(q) if is_slowed(q) else q for q in on_part.queries)
        )
        whole_s = np.exp(self._predict(on_whole_die).log_time)
        longer_s = np.exp(on_part.log_of(least_of_rows)) - np.exp(
            on_whole_die.log_of(least_of_rows)
        )
        answers.move(index, np.minimum(np.log(whole_s + longer_s) - answers.log_time[index], 0.0))

    def _predict_products(self, request: PriceQuery) -> Prediction:
        """Times of matrix products and convolutions: the regressors' answers, then one correction
        after the other.

        A regressor sees an element type as a label (`KindCode`), so nothing ties its answers for
        one type to those for another; the corrections state what holds between them. Rows that name
        a measured source keep its times.
        """
        answers = Prediction.empty(len(request))
        rows = _ProductRows.of(request, self._regressors.unnamed(request))
        single = np.flatnonzero(~rows.backward)
        if len(single):
            answers.put(single, self._regressors.predict(request.take(single)))

        # Most corrections are for some types, or for some devices, alone.
        dtypes = {kind.dtype for kind in request.rows.kinds}
        if "fp8" in dtypes:
            self._bound_8_bits_by_16(answers, request, rows)
        if rows.backward.any():
            self._answer_backward_by_its_products(answers, request, np.flatnonzero(rows.backward))
        if any(query.figures.reached_share is not None for query in request.queries):
            self._speed_up_to_reached_share(answers, request, rows)

        # The bounds below say what an unmeasured time can be. Measured times are not changed.
        unmeasured = rows.unnamed & (answers.provenance != _MEASURED)
        self._bound_by_nominal_rate(answers, request, unmeasured)
        if dtypes & {"tf32", "fp64"} or FAMILIES[request.rows.family].op is Convolution:
            self._bound_by_fp32(answers, request, unmeasured & ~rows.backward)
        if "tf32" in dtypes:
            self._bound_tf32_by_16_bits(answers, request, unmeasured & ~rows.backward)
        return answers

    def _bound_8_bits_by_16(
        self, answers: Prediction, request: PriceQuery, rows: "_ProductRows"
    ) -> None:
        """Limit times in 8 bits to between half and all of those in 16 bits, because rates double
        and bytes halve."""
        index = np.flatnonzero(rows.narrow & ~rows.backward)
        if len(index):
            in_16 = request.take(index).with_rows(in_16_bits(request.rows.take(index)))
            between_half_and_all(answers, index, self._regressors.predict(in_16))

    def _answer_backward_by_its_products(
        self, answers: Prediction, request: PriceQuery, index: np.ndarray
    ) -> None:
        """Predict both gradients at once by the sum of the two products, each of which is corrected
        separately."""
        backward = request.take(index)
        input_gradient, weight_gradient = gradient_products(backward.rows)
        input_times = self._predict(backward.with_rows(input_gradient))
        answers.put(index, added(input_times, self._predict(backward.with_rows(weight_gradient))))

    def _speed_up_to_reached_share(
        self, answers: Prediction, request: PriceQuery, rows: "_ProductRows"
    ) -> None:
        """Shorten matrix products so that the fastest one reaches `Device.reached_share`.

        For devices whose kernels no table times, but the rate of whose best product is known
        (`Device.reached_share`).
        """
        if FAMILIES[request.rows.family].op is not Gemm:
            return
        index = np.flatnonzero(rows.unnamed & ~rows.backward)
        pairs, pair_of = request.take(index).combinations()
        log_gain = np.array([self._log_reach_of(query, kind.dtype) for query, kind in pairs])[
            pair_of
        ]
        answers.move(index, log_gain)

        # Each type reaches its own best, but few bits still take no less than half of the time of
        # many.
        sped_up = index[(log_gain != 0) & rows.narrow[index]]
        if len(sped_up):
            in_16 = request.take(sped_up).with_rows(in_16_bits(request.rows.take(sped_up)))
            between_half_and_all(answers, sped_up, self._predict(in_16))

    def _bound_by_nominal_rate(
        self, answers: Prediction, request: PriceQuery, bounded: Bool[np.ndarray, "n"]
    ) -> None:
        """Let no matrix product be faster than its FLOPs at the nominal rate.

        Convolutions may be: Winograd's algorithm does with fewer FLOPs than the definition counts.
        """
        index = np.flatnonzero(bounded)
        if len(index) and FAMILIES[request.rows.family].op.is_matmul:
            log_nominal = request.take(index).log_of(least_of_rows)
            answers.move(index, np.maximum(log_nominal - answers.log_time[index], 0.0))

    def _bound_by_fp32(
        self, answers: Prediction, request: PriceQuery, bounded: Bool[np.ndarray, "n"]
    ) -> None:
        """Bound the times of types that can use, or must be no faster than, fp32 kernels.

        - TF32 takes no longer: libraries may use it, and need not (cuBLAS,
          `CUBLAS_COMPUTE_32F_FAST_TF32`).
        - fp64 takes as long at least.
        - Convolutions in 16 bits whose channels are not a multiple of eight, such as the three of
          an image, take no longer: matrix units take channels by eights, but operands of others
          may run on the ordinary cores, as fast as those of fp32.
        """
        dtypes = request.rows.dtypes
        uneven_channels = np.zeros(len(request), bool)
        if FAMILIES[request.rows.family].op is Convolution:
            uneven_channels = request.rows.shape["c_in"] % 8 != 0
        bounds_by_dtype = (
            (dtypes == "tf32", np.minimum),
            (dtypes == "fp64", np.maximum),
            ((dtypes == "half") & uneven_channels, np.minimum),
        )
        for has_dtype, towards in bounds_by_dtype:
            index = np.flatnonzero(bounded & has_dtype)
            if len(index):
                as_fp32 = request.rows.take(index).changed({}, dtype="fp32")
                fp32 = self._predict(request.take(index).with_rows(as_fp32))
                answers.move(index, towards(fp32.log_time - answers.log_time[index], 0.0))

    def _bound_tf32_by_16_bits(
        self, answers: Prediction, request: PriceQuery, bounded: Bool[np.ndarray, "n"]
    ) -> None:
        """Limit the ratio of TF32 times to 16-bit times to that of their rates or bytes.

        The tensor cores that multiply 16 bits run TF32 by the same tiles (cuDNN developer guide,
        "Tensor Core Operations"), so that a kernel's arithmetic takes longer by the ratio of the
        peak rates, and its traffic by that of the bytes: the larger of both bounds the time.
        """
        index = np.flatnonzero(bounded & (request.rows.dtypes == "tf32"))
        if not len(index):
            return
        request = request.take(index)
        in_16 = self._predict(request.with_rows(in_16_bits(request.rows)))

        def slowdown(query: Query) -> float:
            ratio_of_peaks = query.figures.peak("half") / query.figures.peak("tf32")
            return max(_BYTES_OVER_16_BITS, ratio_of_peaks)

        log_longest = in_16.log_time + np.log(request.of_query(slowdown).astype(np.float64))
        answers.move(index, np.minimum(log_longest - answers.log_time[index], 0.0))

    def _predict_attention(self, request: PriceQuery) -> Prediction:
        """Times of attention: the regressors' answers, then one correction after the other.

        As for products, a query that names a measured source gets that source's times.
        """
        # A batch may take no longer than its halves one after the other, those no longer than
        # theirs, and so on. All are asked at once, each once; `half[i]` is the row of half of row
        # i, `place` where the caller's rows stand.
        request, place, half = with_half_batches(request, self._regressors.unnamed(request))
        answers = self._regressors.predict(request)
        unnamed = self._regressors.unnamed(request)
        wide = unnamed & np.isin(request.rows.dtypes, _WIDE)
        if wide.any():
            self._answer_wide_attention_by_roofline(answers, request, np.flatnonzero(wide))
        self._order_masks(answers, np.flatnonzero(unnamed & ~wide), request)
        bound_by_halves_and_nominal_rate(
            answers, request, half, unnamed & (answers.provenance != _MEASURED)
        )
        return answers.take(place)

    def _answer_wide_attention_by_roofline(
        self, answers: Prediction, request: PriceQuery, index: np.ndarray
    ) -> None:
        """Price attention of 32 bits and more, which nobody measured, by its roofline, but no
        shorter than in 16 bits."""
        answers.put(index, by_roofline(request.take(index)))
        in_16 = self._predict_attention(
            request.take(index).with_rows(in_16_bits(request.rows.take(index)))
        )
        answers.move(index, np.maximum(in_16.log_time - answers.log_time[index], 0.0))

    def _order_masks(self, answers: Prediction, index: np.ndarray, request: PriceQuery) -> None:
        """Limit the time of causal attention to that of full attention times the share of tiles
        that it computes.

        Where the two disagree the one gives way that less is known of by provenance; between equals
        the causal one.
        """
        for mask, other_mask, sign in zip(
            ATTENTION_MASKS, reversed(ATTENTION_MASKS), (1.0, -1.0), strict=True
        ):
            masked = index[request.rows.by_kind(lambda kind, mask=mask: kind.op == mask)[index]]
            if not len(masked):
                continue
            causal = np.full(len(masked), float(other_mask == "causal"))
            under_other = request.rows.take(masked).changed({"causal": causal}, op=other_mask)
            other_answers = self._regressors.predict(request.take(masked).with_rows(under_other))
            less_known = answers.provenance[masked] + (mask == "causal") > other_answers.provenance
            # the sign makes one bound of two: the causal mask from above, the full one from below
            log_bound = other_answers.log_time + sign * log_computed_share(request.take(masked))
            beyond = sign * np.minimum(sign * (log_bound - answers.log_time[masked]), 0.0)
            answers.move(masked, np.where(less_known, beyond, 0.0))

    def _log_reach_of(self, query: Query, dtype: str) -> float:
        """Log of the best predicted rate over the rate that the device's best product reaches; at
        most 0."""
        figures = query.figures
        if figures.reached_share is None:
            return 0.0
        known_flops_per_s = figures.reached_share * figures.peak(dtype)

        def log_gain() -> float:
            element_type = "bf16" if dtype == "half" else dtype
            large_products = [Gemm(dtype=element_type, m=size, n=size, k=size) for size in _LARGE]
            # without the share, or the question would ask itself
            nominal_query = query._replace(figures=replace(figures, reached_share=None))
            seconds = np.exp(self._predict_ops(nominal_query, large_products).log_time)
            best_flops_per_s = max(np.array([op.flops for op in large_products]) / seconds)
            return min(0.0, float(np.log(best_flops_per_s / known_flops_per_s)))

        return self._reached.get_or_compute((query, dtype), log_gain)


class _ProductRows(NamedTuple):
    """Rows of products and convolutions that each correction applies to, bool[n] each."""

    unnamed: Bool[np.ndarray, "n"]
    """Rows that name no measured source."""
    narrow: Bool[np.ndarray, "n"]
    """Unnamed rows in 8 bits."""
    backward: Bool[np.ndarray, "n"]
    """Rows that time both gradients together and that some correction applies to. They take as long
    as the two products, and each product is corrected separately."""

    @classmethod
    def of(cls, request: PriceQuery, unnamed: Bool[np.ndarray, "n"]) -> "_ProductRows":
        """Group the rows of one family."""
        rows = request.rows
        family = FAMILIES[request.rows.family]
        narrow = (rows.dtypes == "fp8") & unnamed
        corrected = narrow | (unnamed & (family.op.is_matmul | (rows.dtypes == "tf32")))
        has_two_gradients = family.gradients is not None
        return cls(unnamed, narrow, corrected & (rows.columns.pass_ == "bwd") & has_two_gradients)
