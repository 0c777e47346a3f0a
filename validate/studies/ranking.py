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
