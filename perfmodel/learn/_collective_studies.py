"""How far off predictions are where nothing was measured: rank counts and devices left out."""

from collections.abc import Callable
from typing import Final

import numpy as np

from perfmodel.learn._collective_predict import predict_rows
from perfmodel.learn._collective_table import CollectiveRows
from perfmodel.learn._collective_weights import CollectiveWeights
from perfmodel.learn._local_intervals import conformal_quantile

FOLDS: Final = 3
MIN_ROWS: Final = 30
PER_SERIES: Final = 400
"""Rows of one series that count, so that dense sweeps do not decide for all."""
Refit = Callable[[CollectiveRows, CollectiveWeights], CollectiveWeights]


def left_out_spread(rows: CollectiveRows, weights: CollectiveWeights, refit: Refit) -> dict[str, dict[str, float]]:
    """90 % quantiles of the absolute log error by what was left out and kind, in `FOLDS` folds each."""
    errors = {"ranks": ranks_fold(rows), "device": device_fold(rows)}
    return {name: _quantiles(rows, left_out_error(rows, fold, weights, refit)) for name, fold in errors.items()}


def left_out_error(rows: CollectiveRows, fold: np.ndarray, weights: CollectiveWeights, refit: Refit) -> np.ndarray:
    """log(predicted / measured) of rows predicted without their fold; NaN for rows of fold -1."""
    error = np.full(len(rows), np.nan)
    for k in range(fold.max(initial=-1) + 1):
        test, train = np.flatnonzero(fold == k), np.flatnonzero(fold != k)
        if len(test) and len(train):
            without = refit(rows.take(train), weights)
            time_s, _, _ = predict_rows(without, rows.take(test))
            error[test] = np.log(time_s / rows.time_s[test])
    return error


def ranks_fold(rows: CollectiveRows) -> np.ndarray:
    """Fold of every row, by rank counts that lie between others measured in its series; -1 for the rest."""
    fold = np.full(len(rows), -1)
    for name in np.unique(rows.series.astype(str)):
        own = np.flatnonzero(rows.series == name)
        for inside in (True, False):
            part = own[(rows.ranks[own] <= rows.ranks_per_node[own]) == inside]
            counts = np.unique(rows.ranks[part])
            for position, count in enumerate(counts[1:-1]):
                fold[part[rows.ranks[part] == count]] = position % FOLDS
    return fold


def device_fold(rows: CollectiveRows) -> np.ndarray:
    """Fold of every row, by device; -1 for all if there is only one device."""
    names, inverse = np.unique(rows.part(1).astype(str), return_inverse=True)
    if len(names) < 2:
        return np.full(len(rows), -1)
    return inverse % min(FOLDS, len(names))


def _quantiles(rows: CollectiveRows, error: np.ndarray) -> dict[str, float]:
    keep = []
    for name in np.unique(rows.series.astype(str)):
        own = np.flatnonzero((rows.series == name) & np.isfinite(error))
        keep.append(own[:: max(1, len(own) // PER_SERIES)])
    kept = np.concatenate(keep) if keep else np.zeros(0, int)
    result = {}
    for kind in np.unique(rows.kind.astype(str)):
        own = kept[rows.kind[kept] == kind]
        if len(own) >= MIN_ROWS:
            result[kind] = conformal_quantile(error[own])
    return result
