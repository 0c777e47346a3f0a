"""Error figures of all validations, scores of fit predictions, and errors by group."""

from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from perfmodel.display import folded, frame_html
from perfmodel.errors import TableError


def errors(
    measured: ArrayLike,
    predicted: ArrayLike,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
) -> dict[str, Any]:
    """Absolute percentage errors as fractions of the measured value, rank correlation and coverage.

    Returns:
        `n`, `median_ape`, `mean_ape`, `p90_ape`, `bias` (mean signed error), `spearman` (None below
        3 values), `coverage_90` (share inside [lo, hi]) and `width_90` (median of hi / lo where lo
        is above 0; both None without an interval); None where n is 0.
    """
    # Takes long to import, and predictions import this module.
    from scipy.stats import rankdata

    y = np.asarray(measured, float)
    p = np.asarray(predicted, float)
    n = len(y)
    if n == 0:
        names = (
            "median_ape",
            "mean_ape",
            "p90_ape",
            "bias",
            "spearman",
            "coverage_90",
            "width_90",
        )
        return {"n": 0} | dict.fromkeys(names)
    relative = p / y - 1
    ape = np.abs(relative)
    coverage = width = None
    if lo is not None and hi is not None:
        lower = np.asarray(lo, float)
        upper = np.asarray(hi, float)
        # A collective of one rank takes no time, and has no relative width.
        takes_time = lower > 0
        coverage = float(((lower <= y) & (y <= upper)).mean())
        width = (
            float(np.median(upper[takes_time] / lower[takes_time])) if takes_time.any() else None
        )
    # The rank correlation has no meaning for two values, nor where all values are the same.
    ranks_y = rankdata(y)
    ranks_p = rankdata(p)
    varied = n > 2 and ranks_y.std() > 0 and ranks_p.std() > 0
    return {
        "n": n,
        "median_ape": float(np.median(ape)),
        "mean_ape": float(ape.mean()),
        "p90_ape": float(np.quantile(ape, 0.9)),
        "bias": float(relative.mean()),
        "spearman": float(np.corrcoef(ranks_y, ranks_p)[0, 1]) if varied else None,
        "coverage_90": coverage,
        "width_90": width,
    }


class ValidationReport(dict[str, Any]):
    """Result of `validate_kernels` and `validate_cases`: JSON values, the keys part of the
    command-line contract."""

    def to_frame(self) -> pd.DataFrame:
        """Name, `n` and errors (as fractions) of each op family and device, or source of runs."""
        rows = []

        # Kernels are reported by family and device, runs by source.
        if "families" in self:
            for family, devices in self["families"].items():
                for device, figures in devices.items():
                    rows.append({"family": family, "device": device, **figures})
            return pd.DataFrame(rows)
        groups = {**self["sources"], "all": self["all"]}
        for source, figures in groups.items():
            row = {"source": source, **figures}
            for name, value in row.pop("memory").items():
                row[f"memory_{name}"] = value
            rows.append(row)
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        groups = self["families"] if "families" in self else self["sources"]
        return f"{type(self).__name__}(n={self['all']['n']:,}, groups={len(groups)}, skipped={self.skipped:,})"

    @property
    def skipped(self) -> int:
        """Rows that were not compared."""
        return sum(self["skipped"].values())

    def _repr_html_(self) -> str:
        skipped = pd.DataFrame(
            {"why": list(self["skipped"]), "rows": list(self["skipped"].values())}
        )
        page = frame_html(self.to_frame())
        if len(skipped):
            page += folded("skipped", frame_html(skipped))
        return page


LIKELY: Final = 0.5
"""Least probability at which a run is predicted to fit."""
EDGES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Bounds of the ranges of predicted probabilities that are compared with the observed shares."""


def fit_figures(runs: pd.DataFrame, fits: Any, probability: Any) -> dict[str, Any]:
    """Score the predicted probabilities of fitting: runs with status `ok` fitted, `oom` and
    `oom_or_crash` did not; others are ignored.

    Args:
        runs: runs with `source` and `status`.
        fits: whether each run was predicted to fit; missing for runs without a prediction.
        probability: probability that each run fits, with the same gaps.

    Returns:
        `sources` (those with runs that did not fit) and `all`, each with `ran`, `did_not_run`, the
        shares of runs that are predicted correctly by a probability of at least 0.5 (`ran_likely`,
        `did_not_run_unlikely`) and by `fits` (`ran_told`, `did_not_run_told`), `precision` (share
        of the runs with such a probability that ran) and `brier` (mean squared distance of the
        probability from the outcome); `reliability`: by range of the probability `from`, `to`, `n`,
        its mean `said` and the share that `ran`.
    """
    if "status" not in runs:
        return {"sources": {}, "all": {}, "reliability": []}
    status = np.asarray(runs["status"].fillna(""), str)
    likely = np.asarray(probability, float)
    told_to_fit = np.asarray(pd.Series(fits).astype("boolean").fillna(False), bool)
    if np.nanmax(np.abs(likely - 0.5), initial=0.0) > 0.5:
        raise TableError("a probability to fit lies outside 0 to 1")
    ran = status == "ok"
    known = np.isfinite(likely) & np.isin(status, ("ok", "oom", "oom_or_crash"))

    # Only sources with runs that did not fit tell whether a prediction of fitting is right.
    sources = {}
    for name, indices in runs.reset_index(drop=True).groupby("source", sort=False).indices.items():
        members = np.asarray(indices)
        chosen = members[known[members]]
        if not ran[chosen].all():
            sources[str(name)] = _figures(ran[chosen], told_to_fit[chosen], likely[chosen])
    return {
        "sources": sources,
        "all": _figures(ran[known], told_to_fit[known], likely[known]) if known.any() else {},
        "reliability": _reliability(ran[known], likely[known]),
    }


def _figures(ran: np.ndarray, told_to_fit: np.ndarray, likely: np.ndarray) -> dict[str, Any]:
    """Return how well predictions separate runs that fitted from those out of memory."""
    likely_to_fit = likely >= LIKELY

    def share(right: np.ndarray, among: np.ndarray) -> float | None:
        return float(right[among].mean()) if among.any() else None

    return {
        "ran": int(ran.sum()),
        "ran_likely": share(likely_to_fit, ran),
        "ran_told": share(told_to_fit, ran),
        "did_not_run": int((~ran).sum()),
        "did_not_run_unlikely": share(~likely_to_fit, ~ran),
        "did_not_run_told": share(~told_to_fit, ~ran),
        "precision": share(ran, likely_to_fit),
        "brier": float(((likely - ran) ** 2).mean()),
    }


def _reliability(ran: np.ndarray, likely: np.ndarray) -> list[dict[str, Any]]:
    """Return, by range of the predicted probability, its mean and the share of runs that ran."""
    ranges = []
    for low, high in pairwise(EDGES):
        # The last range includes its upper end, so that a probability of 1 counts.
        in_bin = (likely >= low) & ((likely < high) | (high == EDGES[-1]))
        if in_bin.any():
            mean_probability = float(likely[in_bin].mean())
            share_that_ran = float(ran[in_bin].mean())
            ranges.append(
                {
                    "from": low,
                    "to": high,
                    "n": int(in_bin.sum()),
                    "said": mean_probability,
                    "ran": share_that_ran,
                }
            )
    return ranges
