"""Will it fit? What was told of runs that ran, and of those that ran out of memory."""

from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.errors import TableError

LIKELY: Final = 0.5
"""Probability from which a run is told to fit."""
EDGES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Of the probabilities that are held against what happened."""


def fit_figures(runs: pd.DataFrame, fits: Any, probability: Any) -> dict[str, Any]:
    """Predictions of fitting against what happened: status `ok` ran, `oom` and `oom_or_crash` did not; rows of any
    other status say nothing.

    Args:
        runs: with `source` and `status`.
        fits: of every run, whether it was told to fit; missing where it was not predicted.
        probability: that it does, likewise.

    Returns:
        `sources` (those with runs that did not fit) and `all`, each with `ran`, `did_not_run`, the shares of runs told
        rightly by a probability of at least 0.5 (`ran_likely`, `did_not_run_unlikely`) and by `fits` (`ran_told`,
        `did_not_run_told`), `precision` (of those told likely to fit, how many ran) and `brier` (mean squared distance
        of the probability from what happened); `reliability`: by range of the probability `from`, `to`, `n`, its mean
        `said` and the share that `ran`.
    """
    if "status" not in runs:
        return {"sources": {}, "all": {}, "reliability": []}
    status = np.asarray(runs["status"].fillna(""), str)
    likely = np.asarray(probability, float)
    told = np.asarray(pd.Series(fits).astype("boolean").fillna(False), bool)
    if np.nanmax(np.abs(likely - 0.5), initial=0.0) > 0.5:
        raise TableError("a probability to fit lies outside 0 to 1")
    ran, known = status == "ok", np.isfinite(likely) & np.isin(status, ("ok", "oom", "oom_or_crash"))
    sources = {}
    for name, members in runs.reset_index(drop=True).groupby("source", sort=False).indices.items():
        at = members[known[members]]
        if not ran[at].all():
            sources[str(name)] = _figures(ran[at], told[at], likely[at])
    return {
        "sources": sources,
        "all": _figures(ran[known], told[known], likely[known]) if known.any() else {},
        "reliability": _reliability(ran[known], likely[known]),
    }


def _figures(ran: np.ndarray, told: np.ndarray, likely: np.ndarray) -> dict[str, Any]:
    said = likely >= LIKELY

    def share(right: np.ndarray, among: np.ndarray) -> float | None:
        return float(right[among].mean()) if among.any() else None

    return {
        "ran": int(ran.sum()), "ran_likely": share(said, ran), "ran_told": share(told, ran),
        "did_not_run": int((~ran).sum()), "did_not_run_unlikely": share(~said, ~ran),
        "did_not_run_told": share(~told, ~ran), "precision": share(ran, said),
        "brier": float(((likely - ran) ** 2).mean()),
    }  # fmt: skip


def _reliability(ran: np.ndarray, likely: np.ndarray) -> list[dict[str, Any]]:
    found = []
    for low, high in pairwise(EDGES):
        inside = (likely >= low) & ((likely < high) | (high == EDGES[-1]))
        if inside.any():
            said, happened = float(likely[inside].mean()), float(ran[inside].mean())
            found.append({"from": low, "to": high, "n": int(inside.sum()), "said": said, "ran": happened})
    return found
