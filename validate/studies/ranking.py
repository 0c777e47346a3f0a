"""Does the model order layouts as measurements do, and what does its choice cost?"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

LEAST_LAYOUTS = 5
_ONE_JOB = ("source", "device", "model", "n_devices", "seq_len", "global_batch", "dtype")


def ranking(runs: pd.DataFrame, measured_s: np.ndarray, predicted_s: np.ndarray) -> dict[str, dict[str, Any]]:
    """Per source, over its groups of one job on one number of devices with at least 5 layouts.

    `spearman`: mean rank correlation of groups. `regret`: mean of (measured time of the layout predicted fastest /
    that of the fastest measured) - 1; `worst_regret` the largest.
    """
    good = np.isfinite(measured_s) & np.isfinite(predicted_s)
    frame = runs.assign(_measured=measured_s, _predicted=predicted_s)[good]
    found: dict[str, list[tuple[float, float]]] = {}
    for key, group in frame.groupby([name for name in _ONE_JOB if name in frame], dropna=False):
        measured, predicted = np.asarray(group["_measured"], float), np.asarray(group["_predicted"], float)
        if len(group) < LEAST_LAYOUTS or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
            continue
        regret = measured[predicted.argmin()] / measured.min() - 1
        found.setdefault(str(key[0]), []).append((float(spearmanr(measured, predicted)[0]), float(regret)))  # pyright: ignore
    return {
        source: {
            "groups": len(pairs),
            "spearman": float(np.mean([rank for rank, _ in pairs])),
            "regret": float(np.mean([regret for _, regret in pairs])),
            "worst_regret": float(np.max([regret for _, regret in pairs])),
        }
        for source, pairs in found.items()
    }


def interval_scores(source: Any, measured_s: np.ndarray, predicted: pd.DataFrame) -> dict[str, float]:
    """Interval scores of log step times (Gneiting and Raftery, JASA 102, 2007, equation 43, at 90 %), means over
    sources: `ours`; and `fixed`, of the one factor above and below our predictions that scores best on the same runs,
    which is told what ours is not."""
    names = ("predicted_iter_time_s", "lo_s", "hi_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        at, lo, hi = (np.log(np.asarray(predicted[name], float)) for name in names)
        y = np.log(measured_s)
    good = np.isfinite(y) & np.isfinite(lo) & np.isfinite(hi)
    named = np.asarray(source, str)[good]
    y, at, lo, hi = (part[good] for part in (y, at, lo, hi))

    def score(lower: np.ndarray, upper: np.ndarray) -> float:
        each = upper - lower + 20 * (np.maximum(lower - y, 0) + np.maximum(y - upper, 0))
        return float(pd.Series(each).groupby(named).mean().mean())

    fixed = {half: score(at - half, at + half) for half in np.linspace(0.05, 0.6, 111).tolist()}
    best = min(fixed, key=fixed.__getitem__)
    return {"ours": score(lo, hi), "fixed": fixed[best], "fixed_ratio": float(np.exp(2 * best))}
