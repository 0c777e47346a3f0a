"""Predictions for the rows of collective tables."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from perfmodel.learn._collective_constants import curve_of
from perfmodel.learn._collective_relatives import relative_vector
from perfmodel.learn._collective_table import collective_rows
from perfmodel.learn._collective_weights import CollectiveWeights


@dataclass(frozen=True)
class TablePrediction:
    """Times with 90 % intervals, float64[n], NaN where skipped."""

    time_s: np.ndarray
    lo_s: np.ndarray
    hi_s: np.ndarray
    provenance: tuple[str, ...]


def predict_collective_table(weights: CollectiveWeights, table: pd.DataFrame) -> TablePrediction:
    """Predict every row of a table; a row without a model gets NaN and `skipped: reason`."""
    rows = collective_rows(table)
    time_s = np.full(len(rows), np.nan)
    provenance = np.array([f"skipped: {reason}" for reason in rows.skipped], dtype=object)
    known = {s.name: s for s in weights.series}
    usable = rows.skipped == ""
    for name in np.unique(rows.series[usable].astype(str)):
        index = np.flatnonzero(usable & (rows.series == name))
        own = known.get(name)
        vector = own.vector if own else relative_vector(name, weights.series)[0]
        time_s[index] = curve_of(vector, rows.take(index))
        provenance[index] = "learned" if own else "extrapolated"
    return TablePrediction(time_s, time_s * 0.8, time_s * 1.25, tuple(provenance.tolist()))
