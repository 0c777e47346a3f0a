"""Means over sources of parts of the published record, each source counting the same, beside the error to reach."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

Chosen = Callable[[pd.DataFrame], pd.Series]


@dataclass(frozen=True)
class Group:
    """Runs whose errors are averaged within each source, and then over sources."""

    name: str
    rows: Chosen
    to_reach: float
    """A fraction."""
    statistic: Literal["mean error", "median bias"] = "mean error"
    """Mean over sources of their mean errors, or how far the median source's mean signed error is from 0."""


def _all(runs: pd.DataFrame) -> pd.Series:
    return pd.Series(True, index=runs.index)


def _no_mlperf(runs: pd.DataFrame) -> pd.Series:
    return ~runs["source"].astype(str).str.startswith("MLPerf")


def _device(*starts: str) -> Chosen:
    return lambda runs: pd.Series(runs["device"].astype(str).str.startswith(starts))


def _number(runs: pd.DataFrame, column: str) -> pd.Series:
    """Cells of a column of degrees or counts, 1 where nothing is said."""
    found: Any = runs[column] if column in runs else pd.Series(1.0, index=runs.index)
    numbers: Any = pd.to_numeric(found, errors="coerce")
    return numbers.fillna(1.0)


def _experts(runs: pd.DataFrame) -> pd.Series:
    named = runs["family"].astype(str).str.contains("moe", case=False)
    return named | (_number(runs, "n_experts") > 1) | (_number(runs, "ep") > 1)


def _context(runs: pd.DataFrame) -> pd.Series:
    return _number(runs, "cp") > 1


GROUPS = (
    Group("every source", _all, 0.09),
    Group("every source but the logs of MLPerf", _no_mlperf, 0.09),
    Group("H100", _device("H100"), 0.10),
    Group("H200", _device("H200"), 0.10),
    Group("B200", _device("B200"), 0.10),
    Group("GB200", _device("GB200"), 0.10),
    Group("H100, H200, B200, GB200", _device("H100", "H200", "B200", "GB200"), 0.10),
    Group("mixtures of experts", _experts, 0.15),
    Group("context parallelism", _context, 0.12),
    Group("median source", _all, 0.03, "median bias"),
)


def group_means(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """By name of each of `GROUPS` that has any timed run.

    Args:
        frame: of `published_record`.

    Returns:
        `sources`, `n` (runs), `statistic`, `error`, `bias` (mean over sources of their mean signed errors) and
        `to_reach`.
    """
    measured, predicted = (np.asarray(frame[name], float) for name in ("measured_s", "predicted_iter_time_s"))
    signed, source = predicted / measured - 1, frame["source"].to_numpy(str)
    found = {}
    for group in GROUPS:
        chosen = np.asarray(group.rows(frame), bool) & np.isfinite(signed)
        of_source = [signed[chosen & (source == name)] for name in np.unique(source[chosen])]
        if not of_source:
            continue
        bias = np.array([errors.mean() for errors in of_source])
        error = np.array([np.abs(errors).mean() for errors in of_source])
        by = {"mean error": float(error.mean()), "median bias": abs(float(np.median(bias)))}
        found[group.name] = {
            "sources": len(bias), "n": int(chosen.sum()), "statistic": group.statistic, "error": by[group.statistic],
            "bias": float((np.median if group.statistic == "median bias" else np.mean)(bias)),
            "to_reach": group.to_reach,
        }  # fmt: skip
    return found
