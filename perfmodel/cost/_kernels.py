"""Times of compute kernels: measured, learned, extrapolated or analytical, in that order of trust."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.cost._events import EventTimes
from perfmodel.cost._known import KnownTimes
from perfmodel.cost._roofline import HALF_WIDTH, roofline_time
from perfmodel.learn import (
    KERNEL_FAMILIES,
    PROVENANCE,
    Figures,
    Prediction,
    Query,
    Regressor,
    TableQueries,
    factorise,
    load_family,
    rows_from_ops,
    table_rows,
    weights_folder,
)
from perfmodel.spec import Device, KernelOp

_MOST_REMEMBERED: Final = 500_000
"""Ops per device whose times are kept."""
_ANALYTICAL: Final = PROVENANCE.index("analytical")
_CHUNK: Final = 40_000


class KernelModel:
    """Predicts every op family from the weights of one calibration. Thread-compatible, lazy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._families: dict[str, tuple[Regressor, ...]] = {}
        self._known: dict[tuple[Device, str | None], KnownTimes] = {}

    @classmethod
    def load(cls, calibration: Path | str | None = None) -> "KernelModel":
        """The shipped calibration, or that of a directory made by `perfmodel fit`.

        A directory's regressors come before the shipped ones; families that it lacks are served by
        the shipped ones. Weights are read when a family is first asked for.

        Raises:
            CalibrationError: if the directory is missing or holds no weights.
        """
        return _load(weights_folder(calibration))

    def times(self, device: Device, ops: Sequence[KernelOp], *, software: str | None = None) -> EventTimes:
        """Kernel times of `ops` on one device, without the host's launch cost.

        Args:
            software: whose kernels (a `software` or `source` of the measurement tables). By default
                the measured software that stands closest to a training job on torch with cuBLAS.

        Raises:
            CalibrationError: for weights that are truncated or of another schema version.
        """
        known = self._known.setdefault((device, software), KnownTimes())
        if len(known) > _MOST_REMEMBERED:
            known.forget()
        codes, new = known.codes(ops)
        if new:
            try:
                known.add(self._predict_ops(Query(Figures.of(device), None, software), new))
            except BaseException:
                known.drop(new)
                raise
        return known.times(codes)

    def table_times(self, table: pd.DataFrame) -> EventTimes:
        """Times of the rows of a compute table as they were measured (launch floor included).

        Rows that cannot be priced get NaN and provenance `skipped: reason`; nothing is raised for them.
        """
        n = len(table)
        result = np.full((3, n), np.nan)
        provenance = np.full(n, "skipped: op family is not modelled", object)
        for family in KERNEL_FAMILIES:
            index = np.flatnonzero((table["op_family"] == family).to_numpy())
            for start in range(0, len(index), _CHUNK):
                part = index[start : start + _CHUNK]
                asked = table_rows(table.iloc[part], family)
                provenance[part] = asked.reasons
                good = np.flatnonzero(asked.reasons == "")
                if len(good):
                    prediction = self._predict(asked, good)
                    result[:, part[good]] = np.exp([prediction.log_time, prediction.log_low, prediction.log_high])
                    provenance[part[good]] = np.array(PROVENANCE, object)[prediction.provenance]
        return EventTimes(result[0], result[1], result[2], tuple(provenance.tolist()))

    def _predict_ops(self, query: Query, ops: Sequence[KernelOp]) -> Prediction:
        by_family: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            by_family.setdefault(op.family, []).append(index)
        n = len(ops)
        total = Prediction(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))
        for members in by_family.values():
            rows = rows_from_ops([ops[i] for i in members])
            asked = TableQueries(rows, (query,), np.zeros(len(rows), np.int64), np.full(len(rows), "", object))
            part = self._predict(asked, np.arange(len(rows)), host_launch=False)
            for whole, values in zip(total, part, strict=True):
                whole[members] = values
        return total

    def _predict(self, asked: TableQueries, index: np.ndarray, *, host_launch: bool = True) -> Prediction:
        """Predictions of some rows, each by the regressor of its dtype that knows the closest device."""
        rows, query = asked.rows.take(index), asked.query[index]
        n = len(rows)
        out = Prediction(np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, _ANALYTICAL))
        codes, dtypes = factorise(np.array([kind.partition("/")[0] for kind in rows.kind], object))
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
            self._families[family] = load_family(self._folder, family)
        return self._families[family]


@lru_cache(maxsize=8)
def _load(folder: Path) -> KernelModel:
    return KernelModel(folder)
