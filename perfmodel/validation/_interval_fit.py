"""What the residuals of published runs say of 90 % intervals (`perfmodel.prediction.Unknown`)."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.optimize import minimize

from perfmodel.prediction import TERMS, source_group
from perfmodel.validation._cases import measured_times_s

_SHARES = {"extrapolated": "extrapolated_share", "host": "host_share", "network": "network_share",
           "unstated": "unstated_share"}  # fmt: skip
BEYOND = 0.05
"""Share of runs beyond either end."""
STEEPEST = 1.0
"""Largest log half-width per share: no part of a step is known worse than within a factor e, lest one site's broken
network widen every prediction."""
PENALTY = 1e-3
"""Of slopes, so that what no source needs is 0."""
_STARTS = (
    (0.1,) * len(TERMS),
    (0.3,) * (len(TERMS) - 1) + (0.0,),
    (0.2, 0.0, 0.5, 0.5, 0.3),
    (0.1, 0.1, 0.9, 0.9, 0.5),
)


def fit_unknown(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """By left-out group of sources ("" for none), `faster` and `slower` of `Unknown`.

    Args:
        runs: tables of runs.
        predicted: what `predict_cases` returns for them.
    """
    log = np.log(measured_times_s(runs) / np.asarray(predicted["predicted_iter_time_s"], float))
    timed = np.isfinite(log)
    shares = [np.asarray(predicted[_SHARES[name]], float)[timed] for name in TERMS[1:]]
    at = np.stack([np.ones(int(timed.sum())), *shares], axis=1)
    events = np.asarray(predicted["events_half_width"], float)[timed]
    source = np.asarray(runs["source"], str)[timed]
    group = np.array([source_group(name) for name in source])
    names, of_row, rows = np.unique(source, return_inverse=True, return_counts=True)
    weight = 1 / rows[of_row] / len(names)
    found: dict[str, dict[str, Any]] = {}
    for left_out in ("", *np.unique(group).tolist()):
        kept = group != left_out
        part = events[kept], at[kept], weight[kept]
        found[left_out] = {"faster": _side(-log[timed][kept], *part), "slower": _side(log[timed][kept], *part)}
    return found


def _side(
    log: Float[np.ndarray, " runs"],
    events: Float[np.ndarray, " runs"],
    at: Float[np.ndarray, "runs terms"],
    weight: Float[np.ndarray, " runs"],
) -> list[float]:
    """The terms whose half-width, joined with that of the events, leaves `BEYOND` of the runs beyond it: least
    quantile loss (Koenker and Bassett 1978), each source with the same weight."""

    def loss(terms: Float[np.ndarray, " terms"]) -> float:
        beyond = log - np.hypot(events, at @ np.clip(np.abs(terms), 0, STEEPEST))
        quantile = weight @ np.where(beyond > 0, (1 - BEYOND) * beyond, -BEYOND * beyond)
        return float(quantile + PENALTY * np.abs(terms[1:]).sum())

    options = {"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-8}
    best = min((minimize(loss, start, method="Nelder-Mead", options=options) for start in _STARTS), key=lambda r: r.fun)
    return np.round(np.clip(np.abs(best.x), 0, STEEPEST), 3).tolist()
