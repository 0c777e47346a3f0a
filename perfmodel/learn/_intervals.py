"""90 % intervals: conformal quantiles of log errors on shapes, sizes and devices kept out."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

COVERAGE: Final = 0.90
_FEWEST: Final = 40
"""Residuals below which a group borrows its family's quantiles."""
_PER_BUCKET: Final = 150
_BUCKETS: Final = 3


@dataclass(frozen=True)
class Quantiles:
    """Bounds of log(true / predicted), by predicted time where there are residuals enough."""

    edges: tuple[float, ...]
    """Ascending log-second edges between the buckets."""
    low: tuple[float, ...]
    high: tuple[float, ...]

    def at(self, log_time: Float64[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper log offset of every prediction."""
        bucket = np.searchsorted(np.asarray(self.edges), log_time)
        return np.asarray(self.low)[bucket], np.asarray(self.high)[bucket]

    def to_list(self) -> list[list[float]]:
        """Edges, lows and highs as plain lists."""
        return [list(self.edges), list(self.low), list(self.high)]

    @classmethod
    def from_list(cls, value: list[list[float]]) -> "Quantiles":
        """Inverse of `to_list`."""
        return cls(*(tuple(v) for v in value))


def conformal(error: Float64[np.ndarray, "n"]) -> tuple[float, float]:
    """Bounds that a new error stays within in 90 % of cases, each tail 5 % (split conformal).

    Vovk et al. 2005; Angelopoulos and Bates, arXiv 2107.07511, section 1: the ceil((n+1)(1-a))-th
    smallest of n exchangeable scores.
    """
    ordered = np.sort(error)
    n = len(ordered)
    tail = (1.0 - COVERAGE) / 2.0
    top = min(n - 1, int(np.ceil((n + 1) * (1.0 - tail))) - 1)
    return float(min(0.0, ordered[n - 1 - top])), float(max(0.0, ordered[top]))


def bucketed(error: np.ndarray, log_time: np.ndarray) -> Quantiles:
    """Quantiles in up to three buckets of predicted time (Mondrian conformal)."""
    buckets = min(_BUCKETS, max(1, len(error) // _PER_BUCKET))
    edges = np.quantile(log_time, np.arange(1, buckets) / buckets) if buckets > 1 else np.zeros(0)
    place = np.searchsorted(edges, log_time)
    bounds = [conformal(error[place == b] if (place == b).any() else error) for b in range(buckets)]
    return Quantiles(tuple(map(float, edges)), tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


@dataclass(frozen=True)
class Intervals:
    """Interval offsets of one regressor."""

    groups: dict[str, Quantiles]
    """In range, by `stack|kind`."""
    family: Quantiles
    """In range, groups with few kept-out samples."""
    near: Quantiles
    """A device that was not measured but a near relative was; also kinds taken by ratio."""
    far: Quantiles
    """A device of a generation that was not measured."""
    beyond: Quantiles
    """Shapes larger than the largest measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a weights file's metadata."""
        return {
            "groups": {k: v.to_list() for k, v in self.groups.items()},
            "family": self.family.to_list(), "near": self.near.to_list(),
            "far": self.far.to_list(), "beyond": self.beyond.to_list(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Intervals":
        """Inverse of `to_dict`."""
        rest = {k: Quantiles.from_list(value[k]) for k in ("family", "near", "far", "beyond")}
        return cls(groups={k: Quantiles.from_list(v) for k, v in value["groups"].items()}, **rest)


def in_range_intervals(
    error: np.ndarray, log_time: np.ndarray, labels: np.ndarray
) -> tuple[dict[str, Quantiles], Quantiles]:
    """Per-group and pooled quantiles of held-out errors log(true / predicted)."""
    groups = {}
    for label in np.unique(labels.astype(str)):
        mine = labels == label
        if mine.sum() >= _FEWEST:
            groups[str(label)] = bucketed(error[mine], log_time[mine])
    few = np.array([str(label) not in groups for label in labels])
    pooled = few if few.sum() >= _FEWEST else np.ones(len(error), bool)
    return groups, bucketed(error[pooled], log_time[pooled])
