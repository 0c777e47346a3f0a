"""Error figures shared by all validations."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


def errors(
    measured: ArrayLike,
    predicted: ArrayLike,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
) -> dict[str, Any]:
    """Absolute percentage errors as fractions of the measured value, rank correlation and coverage.

    Returns:
        `n`, `median_ape`, `mean_ape`, `p90_ape`, `bias` (mean signed error), `spearman` (None below 3
        values), `coverage_90` (share inside [lo, hi]) and `width_90` (median of hi / lo where lo is above 0; both None
        without an interval); None where n is 0.
    """
    y, p = np.asarray(measured, float), np.asarray(predicted, float)
    n = len(y)
    if n == 0:
        names = ("median_ape", "mean_ape", "p90_ape", "bias", "spearman", "coverage_90", "width_90")
        return {"n": 0} | dict.fromkeys(names)
    relative = p / y - 1
    ape = np.abs(relative)
    inside = width = None
    if lo is not None and hi is not None:
        lower, upper = np.asarray(lo, float), np.asarray(hi, float)
        some = lower > 0  # a collective of one rank takes nothing
        inside = float(((lower <= y) & (y <= upper)).mean())
        width = float(np.median(upper[some] / lower[some])) if some.any() else None
    ranks_y, ranks_p = rankdata(y), rankdata(p)
    varied = n > 2 and ranks_y.std() > 0 and ranks_p.std() > 0
    return {
        "n": n,
        "median_ape": float(np.median(ape)),
        "mean_ape": float(ape.mean()),
        "p90_ape": float(np.quantile(ape, 0.9)),
        "bias": float(relative.mean()),
        "spearman": float(np.corrcoef(ranks_y, ranks_p)[0, 1]) if varied else None,
        "coverage_90": inside,
        "width_90": width,
    }
