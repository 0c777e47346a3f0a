"""Error figures shared by all validations."""

from typing import Any

import numpy as np
import pandas as pd


def errors(
    measured: pd.Series,
    predicted: pd.Series,
    lo: pd.Series | None = None,
    hi: pd.Series | None = None,
) -> dict[str, Any]:
    """Absolute percentage errors as fractions of the measured value, rank correlation and coverage.

    Returns:
        `n`, `median_ape`, `mean_ape`, `p90_ape`, `bias` (mean signed error), `spearman` (None below 3
        values) and `coverage_90` (share inside [lo, hi]; None without an interval); None where n is 0.
    """
    n = len(measured)
    if n == 0:
        names = ("median_ape", "mean_ape", "p90_ape", "bias", "spearman", "coverage_90")
        return {"n": 0} | dict.fromkeys(names)
    y, p = measured.to_numpy(float), predicted.to_numpy(float)
    relative = p / y - 1
    ape = np.abs(relative)
    inside = None if lo is None or hi is None else float(((lo.to_numpy() <= y) & (y <= hi.to_numpy())).mean())
    ranks = [pd.Series(v).rank().to_numpy() for v in (y, p)]
    varied = n > 2 and all(r.std() > 0 for r in ranks)
    return {
        "n": n,
        "median_ape": float(np.median(ape)),
        "mean_ape": float(ape.mean()),
        "p90_ape": float(np.quantile(ape, 0.9)),
        "bias": float(relative.mean()),
        "spearman": float(np.corrcoef(*ranks)[0, 1]) if varied else None,
        "coverage_90": inside,
    }
