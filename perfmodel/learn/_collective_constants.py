"""Interpretable constants of every measured series, fitted with priors from its links' nominal figures."""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from perfmodel.learn._collective_curve import LinkConstants, collective_curve
from perfmodel.learn._collective_links import link_class
from perfmodel.learn._collective_table import CollectiveRows

NAMES: Final = tuple(f.name for f in fields(LinkConstants))

PRIOR_SPREAD: Final = np.array([1.5, 0.7, 0.7, 0.6, 0.8, 0.4, 0.5, 0.3])
"""Standard deviation of each constant (its logarithm, but for the last) around its prior, as in `NAMES`."""
NOISE: Final = 0.05
"""Relative error of one point that the prior is weighed against; whole series deviate by more than that."""
POINTS_PER_GROUP: Final = 48


@dataclass(frozen=True)
class Series:
    """One measured series with its constants."""

    name: str
    vector: np.ndarray
    """Constants as `LinkConstants.from_vector` takes them, SI units; float64[8]."""
    ranks: tuple[int, ...]
    """Rank counts measured inside one node."""
    ranks_between: tuple[int, ...]
    """Rank counts measured over several nodes."""
    low_bytes: float
    high_bytes: float

    @property
    def constants(self) -> LinkConstants:
        return LinkConstants.from_vector(self.vector)


def prior_vector(series: str) -> np.ndarray:
    """The constants to expect of a series never measured, from the links its name tells of."""
    _, device, interconnect, *_ = series.split("|")
    intra, inter = link_class(interconnect, device, False), link_class(interconnect, device, True)
    logs = np.log(
        [
            5e-6,
            intra.hop_s,
            inter.hop_s,
            0.75 * intra.bandwidth_bytes_per_s,
            0.85 * inter.bandwidth_bytes_per_s,
            0.35,
            3.0,
        ]
    )
    return np.append(logs, 0.0)


def curve_of(vector: np.ndarray, rows: CollectiveRows) -> np.ndarray:
    """The physical curve [s] at `rows`, which share a kind; `vector` float64[8] or [8, n]."""
    constants = LinkConstants.from_vector(vector)
    return np.asarray(collective_curve(rows.kind[0], rows.buffer_bytes, rows.ranks, rows.ranks_per_node, constants))


def fit_series(rows: CollectiveRows) -> tuple[Series, ...]:
    """One maximum-a-posteriori fit per series, robust to jumps and outliers (soft-L1 on log time)."""
    names, inverse = np.unique(rows.series.astype(str), return_inverse=True)
    return tuple(_fit_one(name, rows.take(inverse == i)) for i, name in enumerate(names))


def _fit_one(name: str, rows: CollectiveRows) -> Series:
    from scipy.optimize import least_squares

    thin, weight = thinned(rows, POINTS_PER_GROUP)
    prior = prior_vector(name)
    observed = np.log(thin.time_s)

    def residual(vector: np.ndarray) -> np.ndarray:
        error = np.log(curve_of(vector, thin)) - observed
        robust = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + (error / 0.3) ** 2) - 1)) * 0.3
        return np.concatenate([weight * robust / NOISE, (vector - prior) / PRIOR_SPREAD])

    start = prior.copy()
    start[0] = np.log(max(0.6 * float(thin.time_s.min()), 1e-7))
    between = rows.ranks > rows.ranks_per_node
    fitted = least_squares(residual, start, method="trf", max_nfev=200).x
    return Series(
        name=name,
        vector=fitted,
        ranks=tuple(int(r) for r in np.unique(rows.ranks[~between])),
        ranks_between=tuple(int(r) for r in np.unique(rows.ranks[between])),
        low_bytes=float(rows.buffer_bytes.min()),
        high_bytes=float(rows.buffer_bytes.max()),
    )


def thinned(rows: CollectiveRows, points: int) -> tuple[CollectiveRows, np.ndarray]:
    """At most `points` rows per (stack, dtype, ranks, ranks per node), even in log size, and their weights.

    Weights let every placement (ranks, ranks per node) count alike, whatever its number of rows.
    """
    group = _labels(rows.stack, rows.dtype, rows.ranks, rows.ranks_per_node)
    keep: list[np.ndarray] = []
    for g in range(group.max() + 1):
        index = np.flatnonzero(group == g)
        index = index[np.argsort(rows.buffer_bytes[index], kind="stable")]
        if len(index) > points:
            x = np.log(rows.buffer_bytes[index])
            wanted = np.linspace(x[0], x[-1], points)
            index = index[np.unique(np.searchsorted(x, wanted).clip(0, len(x) - 1))]
        keep.append(index)
    chosen = np.concatenate(keep)
    thin = rows.take(chosen)
    placement = _labels(thin.ranks, thin.ranks_per_node)
    count = np.bincount(placement)
    return thin, np.sqrt(min(len(thin) / len(count), 24) / count[placement])


def _labels(*columns: np.ndarray) -> np.ndarray:
    label = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, code = np.unique(column.astype(str) if column.dtype == object else column, return_inverse=True)
        label = label * (code.max() + 1) + code
    return np.unique(label, return_inverse=True)[1]
