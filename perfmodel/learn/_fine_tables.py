"""What dense sweeps add: the residual between neighbouring sizes, as far as it repeats itself.

Tables with hundreds of sizes resolve chunking and protocol steps that binned kriging averages away. The share
of the interpolated residual that helps is found by leaving each size out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

FEWEST_SIZES: Final = 256
SHARES: Final = (0.0, 0.35, 0.7, 1.0)


@dataclass(frozen=True)
class FineTables:
    """Per dense entry: log2 sizes, ascending, and the log residual to add at each."""

    size: Mapping[str, np.ndarray]
    residual: Mapping[str, np.ndarray]

    def at(self, entry: str, size: np.ndarray) -> np.ndarray:
        """Log residual at log2 sizes, float64[n]: linear between the measured ones, 0 outside them."""
        if entry not in self.size:
            return np.zeros(len(size))
        return np.interp(size, self.size[entry], self.residual[entry], left=0.0, right=0.0)

    def arrays(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Stacked arrays for a file (single precision) and the names of the entries."""
        names = sorted(self.size)
        empty = np.zeros(0, np.float32)
        return {
            "count": np.array([len(self.size[n]) for n in names], np.int32),
            "size": np.concatenate([self.size[n].astype(np.float32) for n in names] or [empty]),
            "residual": np.concatenate([self.residual[n].astype(np.float32) for n in names] or [empty]),
        }, names

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], names: list[str]) -> "FineTables":
        """Inverse of `arrays`."""
        ends = np.cumsum(arrays["count"])[:-1]
        parts = [np.split(arrays[key].astype(np.float64), ends) for key in ("size", "residual")]
        return cls(*(dict(zip(names, part, strict=False)) for part in parts))


def fit_fine_tables(entry: np.ndarray, size: np.ndarray, residual: np.ndarray) -> tuple[FineTables, np.ndarray]:
    """Tables of the dense entries of log `residual` (float64[n]) at log2 `size`; also each row's residual
    once predicted from the other sizes, NaN for rows of entries that are not dense."""
    sizes, residuals = {}, {}
    left_out = np.full(len(size), np.nan)
    for name in np.unique(entry.astype(str)):
        own = np.flatnonzero(entry == name)
        x, place = np.unique(size[own], return_inverse=True)
        if len(x) < FEWEST_SIZES:
            continue
        order = np.argsort(place, kind="stable")
        middle = np.array([np.median(part) for part in np.split(residual[own][order], _starts(place))])
        neighbours = _from_neighbours(x, middle)
        error = [np.abs(np.expm1(share * neighbours[place] - residual[own])).mean() for share in SHARES]
        share = SHARES[int(np.argmin(error))]
        left_out[own] = residual[own] - share * neighbours[place]
        if share > 0:
            sizes[name], residuals[name] = x, share * middle
    return FineTables(sizes, residuals), left_out


def _starts(place: np.ndarray) -> np.ndarray:
    return np.cumsum(np.bincount(place))[:-1]


def _from_neighbours(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each value interpolated from the two beside it; at the ends the nearest."""
    slope = (y[2:] - y[:-2]) / (x[2:] - x[:-2])
    return np.concatenate([y[1:2], y[:-2] + slope * (x[1:-1] - x[:-2]), y[-2:-1]])
