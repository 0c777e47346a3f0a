"""Predictions for the rows of collective tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.learn import _moe_alltoall as moe
from perfmodel.learn._collective_constants import Series, curve_of
from perfmodel.learn._collective_correction import as_points, family_names
from perfmodel.learn._collective_curve import LinkConstants
from perfmodel.learn._collective_relatives import relative_vector
from perfmodel.learn._collective_residual import ResidualNet, residual_features
from perfmodel.learn._collective_table import CollectiveRows, collective_rows
from perfmodel.learn._collective_weights import CollectiveWeights
from perfmodel.learn._local_intervals import LocalErrors

PER_OCTAVE: Final = 0.05
"""How much an interval widens (log time) per factor of two in size beyond the measured sizes."""


@dataclass(frozen=True)
class TablePrediction:
    """Times with 90 % intervals, float64[n], NaN where skipped."""

    time_s: np.ndarray
    lo_s: np.ndarray
    hi_s: np.ndarray
    provenance: tuple[str, ...]


def predict_collective_table(weights: CollectiveWeights, table: pd.DataFrame) -> TablePrediction:
    """Predict every row of a table; a row without a model gets NaN and `skipped: reason`.

    Provenance: `measured` (this series, rank count and size range), `learned` (this series, another rank
    count), `extrapolated` (a device or software never measured, or sizes beyond those measured).
    """
    n = len(table)
    time_s, half = np.full(n, np.nan), np.full(n, np.nan)
    is_moe = table["collective"].isin(moe.KINDS).to_numpy() if "collective" in table else np.zeros(n, dtype=bool)
    provenance = np.full(n, "", dtype=object)
    for index, predict in ((np.flatnonzero(~is_moe), _collectives), (np.flatnonzero(is_moe), _exchanges)):
        if len(index):
            time_s[index], half[index], provenance[index] = predict(weights, table.iloc[index])
    return TablePrediction(time_s, time_s * np.exp(-half), time_s * np.exp(half), tuple(provenance.tolist()))


def _collectives(weights: CollectiveWeights, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = collective_rows(table)
    time_s, half = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    provenance = np.array([f"skipped: {reason}" for reason in rows.skipped], dtype=object)
    usable = np.flatnonzero(rows.skipped == "")
    if len(usable):
        time_s[usable], half[usable], provenance[usable] = predict_rows(weights, rows.take(usable))
    return time_s, half, provenance


def predict_rows(weights: CollectiveWeights, rows: CollectiveRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Time [s], half-width of the interval in log time, provenance of rows that can all be priced."""
    curve_s, vectors = physical_curves(rows, weights.series)
    correction = pooled_residual(rows, vectors, curve_s, weights.nets)
    half = np.full(len(rows), np.nan)
    points, size = as_points(rows, curve_s), np.log2(rows.buffer_bytes)
    names = family_names(rows)
    for name, corrected in weights.corrections.items():
        index = np.flatnonzero(np.logical_or.reduce([column == name for column in names]))
        if len(index):
            centre, half[index] = local_at(
                corrected.errors, rows.series[index], points.categories["placement"][index], size[index]
            )
            correction[index] += corrected.kriging.predict(points.take(index)) + centre
            entry = entry_names(rows.take(index), points.categories["placement"][index])
            for label, part in groups_of(entry):
                correction[index[part]] += corrected.fine.at(label, size[index[part]])
    known = {s.name: s for s in weights.series}
    provenance = np.full(len(rows), "measured", dtype=object)
    for name, index in groups_of(rows.series):
        spread, source = _beyond(weights, known.get(name), rows.take(index))
        half[index] = np.fmax(half[index], spread)
        provenance[index] = source
    return curve_s * np.exp(correction) * (rows.ranks > 1), half, provenance


def local_at(
    errors: LocalErrors, series: np.ndarray, placement: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Centre and half-width for rows: of their series and placement or, if that was not measured, series."""
    centre, half = np.zeros(len(size)), np.full(len(size), np.nan)
    for name, index in groups_of(series + "#" + placement):
        known = name if name in errors.size else name.partition("#")[0]
        centre[index], half[index] = errors.at(known, size[index])
    return centre, half


def _beyond(weights: CollectiveWeights, series: Series | None, rows: CollectiveRows) -> tuple[np.ndarray, np.ndarray]:
    """What unmeasured rank counts, sizes and machines add to an interval, and the provenance."""
    kind = rows.kind[0]
    if series is None:
        return np.full(len(rows), weights.spread_of("device", kind)), np.full(len(rows), "extrapolated", object)
    inside = rows.ranks <= rows.ranks_per_node
    measured = np.where(inside, np.isin(rows.ranks, series.ranks), np.isin(rows.ranks, series.ranks_between))
    octaves = np.maximum(np.log2(rows.buffer_bytes / series.high_bytes), np.log2(series.low_bytes / rows.buffer_bytes))
    spread = np.where(measured, 0.0, weights.spread_of("ranks", kind)) + PER_OCTAVE * np.maximum(octaves, 0)
    provenance = np.where(measured, "measured", "learned").astype(object)
    provenance[octaves > 1] = "extrapolated"
    return spread, provenance


def physical_curves(rows: CollectiveRows, series: Sequence[Series]) -> tuple[np.ndarray, np.ndarray]:
    """The curve [s] of every row, and its constants float64[8, n]: its own series', or of relatives."""
    known = {s.name: s for s in series}
    curve_s, vectors = np.zeros(len(rows)), np.zeros((8, len(rows)))
    for name, index in groups_of(rows.series):
        vector = known[name].vector if name in known else relative_vector(name, series)[0]
        curve_s[index] = curve_of(vector, rows.take(index))
        vectors[:, index] = vector[:, None]
    return np.maximum(curve_s, 1e-9), vectors


def pooled_residual(
    rows: CollectiveRows, vectors: np.ndarray, curve_s: np.ndarray, nets: Mapping[str, ResidualNet]
) -> np.ndarray:
    """What the networks add to the logarithm of the curve, float64[n]."""
    result = np.zeros(len(rows))
    features = residual_features(rows, LinkConstants.from_vector(vectors), curve_s)
    for kind, net in nets.items():
        index = rows.kind == kind
        result[index] = net.predict(features[index])
    return result


def entry_names(rows: CollectiveRows, placement: np.ndarray) -> np.ndarray:
    """Series, placement, software and dtype of every row: one curve over sizes."""
    return rows.series + "#" + placement + "#" + rows.stack + "#" + rows.dtype


def groups_of(labels: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Every distinct label with the indices where it stands."""
    names, inverse = np.unique(labels.astype(str), return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(names)))[:-1])
    return list(zip(names.tolist(), parts, strict=True))


def _exchanges(weights: CollectiveWeights, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = moe.moe_rows(table)
    time_s, half = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    provenance = np.array([f"skipped: {reason}" for reason in rows.skipped], dtype=object)
    if not weights.moe.series:
        return time_s, half, np.where(rows.skipped == "", "skipped: no moe_alltoall table was fitted", provenance)
    usable = np.flatnonzero(rows.skipped == "")
    if len(usable):
        time_s[usable], half[usable], provenance[usable] = predict_moe_rows(weights, rows.take(usable))
    return time_s, half, provenance


def predict_moe_rows(weights: CollectiveWeights, rows: moe.MoeRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Time [s], half-width of the interval in log time and provenance of exchanges."""
    known = weights.moe.series
    curve_s = moe.moe_curves(rows, known)
    correction, half = np.zeros(len(rows)), np.full(len(rows), np.nan)
    points, size = moe.moe_points(rows, curve_s), np.log2(rows.tokens)
    names = moe.moe_family_names(rows)
    for name, corrected in weights.moe.corrections.items():
        index = np.flatnonzero(np.logical_or.reduce([column == name for column in names]))
        if len(index):
            centre, half[index] = local_at(
                corrected.errors, rows.series[index], points.categories["placement"][index], size[index]
            )
            correction[index] = corrected.kriging.predict(points.take(index)) + centre
    is_known = np.isin(rows.series.astype(str), list(known))
    half = np.where(is_known & np.isfinite(half), half, weights.moe.spread)
    provenance = np.where(is_known, "measured", "extrapolated").astype(object)
    return curve_s * np.exp(correction), half, provenance
