"""Prediction errors, and 90 % intervals from conformal quantiles of held-out errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn.training import Samples
from perfmodel.display import shorten_reprs
from perfmodel.ops import KernelKind


def conformal_quantile(residual: np.ndarray, level: float = 0.9) -> float:
    """The `ceil((n + 1) level)`-th smallest of n absolute residuals, or the largest where these are
    too few (split conformal; Lei et al., JASA 113, 2018)."""
    n = len(residual)
    if n == 0:
        return float("nan")
    rank = min(n, int(np.ceil((n + 1) * level)))
    return float(np.sort(np.abs(residual))[rank - 1])


def absolute_percent(error: Float64[np.ndarray, "n"]) -> np.ndarray:
    """Absolute percentage errors from log(true / predicted)."""
    return 100.0 * np.abs(np.expm1(-error))


def summary(samples: Samples, index: np.ndarray, error: np.ndarray) -> dict[str, Any]:
    """Mean, median and 90th percentile of absolute percentage errors, overall and by dtype, device
    and source."""
    devices = np.array([s.figures.name for s in samples.stacks], object)[samples.stack[index]]
    sources = np.array([s.source for s in samples.stacks], object)[samples.stack[index]]
    dtypes = samples.dtypes[index]

    def figures_by(labels: np.ndarray) -> dict[str, dict[str, float]]:
        distinct_labels = sorted(set(labels.tolist()))
        return {str(label): figures_of_errors(error[labels == label]) for label in distinct_labels}

    return {
        **figures_of_errors(error),
        "by_dtype": figures_by(dtypes),
        "by_device": figures_by(devices),
        "by_source": figures_by(sources),
    }


def figures_of_errors(error: Float64[np.ndarray, "n"]) -> dict[str, float]:
    """Count, mean, median and 90th percentile of the absolute percentage error, and the bias in per
    cent."""
    if not len(error):
        return {"n": 0}
    ape = absolute_percent(error)
    return {
        "n": len(ape),
        "mean_ape": round(float(ape.mean()), 2),
        "median_ape": round(float(np.median(ape)), 2),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 2),
        "bias": round(float(100 * np.expm1(-np.mean(error))), 2),
    }


COVERAGE: Final = 0.90
"""Share of new errors that an interval is to hold."""
_FEWEST: Final = 40
"""Residuals below which a group borrows its family's quantiles."""
_PER_BUCKET: Final = 150
"""Residuals that a bucket of predicted times needs."""
_BUCKETS: Final = 3
"""Buckets of predicted times at most."""


@dataclass(frozen=True)
class Quantiles:
    """Bounds of log(true / predicted), by predicted time if there are enough residuals."""

    edges: tuple[float, ...]
    """Ascending log-second edges between the buckets."""
    low: tuple[float, ...]
    """Lower bound in each bucket."""
    high: tuple[float, ...]
    """Upper bound in each bucket."""

    def at(self, log_time: Float64[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper log offset of every prediction."""
        bucket = np.searchsorted(np.asarray(self.edges), log_time)
        return np.asarray(self.low)[bucket], np.asarray(self.high)[bucket]

    def to_list(self) -> list[list[float]]:
        """Edges, lows and highs as plain lists."""
        return [list(self.edges), list(self.low), list(self.high)]

    @classmethod
    def from_list(cls, value: list[list[float]]) -> "Quantiles":
        """Read what `to_list` returns."""
        return cls(*(tuple(v) for v in value))


def conformal(error: Float64[np.ndarray, "n"]) -> tuple[float, float]:
    """Bounds that a new error stays within in 90 % of cases, each tail 5 % (split conformal).

    Vovk et al. 2005; Angelopoulos and Bates, arXiv 2107.07511, section 1: the ceil((n+1)(1-a))-th
    smallest of n exchangeable scores.
    """
    # each tail by itself, as errors lean to one side; an interval always holds its prediction
    ordered = np.sort(error)
    n = len(ordered)
    tail = (1.0 - COVERAGE) / 2.0
    top = min(n - 1, int(np.ceil((n + 1) * (1.0 - tail))) - 1)
    return float(min(0.0, ordered[n - 1 - top])), float(max(0.0, ordered[top]))


def bucketed(error: np.ndarray, log_time: np.ndarray) -> Quantiles:
    """Quantiles in up to three buckets of predicted time (Mondrian conformal)."""
    buckets = min(_BUCKETS, max(1, len(error) // _PER_BUCKET))
    edges = np.quantile(log_time, np.arange(1, buckets) / buckets)
    place = np.searchsorted(edges, log_time)
    bounds = []
    for bucket in range(buckets):
        in_bucket = place == bucket
        # equal times may leave a bucket empty: there all errors stand in
        bounds.append(conformal(error[in_bucket] if in_bucket.any() else error))
    low, high = zip(*bounds, strict=True)
    return Quantiles(tuple(map(float, edges)), low, high)


@dataclass(frozen=True)
class Intervals:
    """Interval offsets of one regressor."""

    groups: Mapping[tuple[int, KernelKind], Quantiles]
    """Intervals in the measured range, by index of the stack and kind."""
    family: Quantiles
    """Intervals in the measured range for groups with few held-out samples."""
    near: Quantiles
    """A device that was not measured but a near relative was; also kinds taken by ratio."""
    far: Quantiles
    """A device of a generation that was not measured."""
    beyond: Quantiles
    """Shapes larger than the largest measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a weights file's metadata."""
        return {
            "groups": [
                [stack, str(kind), quantiles.to_list()]
                for (stack, kind), quantiles in self.groups.items()
            ],
            "family": self.family.to_list(),
            "near": self.near.to_list(),
            "far": self.far.to_list(),
            "beyond": self.beyond.to_list(),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Intervals":
        """Read what `to_dict` returns."""
        by_relation = {
            name: Quantiles.from_list(value[name]) for name in ("family", "near", "far", "beyond")
        }
        groups = {}
        for stack, kind, quantiles in value["groups"]:
            groups[int(stack), KernelKind.parse(kind)] = Quantiles.from_list(quantiles)
        return cls(groups=groups, **by_relation)


def in_range_intervals(
    error: np.ndarray, log_time: np.ndarray, group: np.ndarray
) -> tuple[dict[int, Quantiles], Quantiles]:
    """Per-group and pooled quantiles of held-out errors log(true / predicted); `group`: int[n]."""
    groups = {}
    for code in np.unique(group).tolist():
        in_group = group == code
        if in_group.sum() >= _FEWEST:
            groups[code] = bucketed(error[in_group], log_time[in_group])

    # the small groups together; all of them where even these are few
    has_few_rows = ~np.isin(group, list(groups))
    pooled = has_few_rows if has_few_rows.sum() >= _FEWEST else np.ones(len(error), bool)
    return groups, bucketed(error[pooled], log_time[pooled])


shorten_reprs(__name__)
