"""Conformal intervals that know where a model errs: quantiles of honest residuals near each place.

Split conformal prediction (Lei et al., JASA 113, 2018) applied to neighbourhoods: the residuals are those of
shapes left out, the neighbours the nearest in size within one series, then within one family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

LEVEL: Final = 0.9
NEIGHBOURS: Final = 80
KNOTS: Final = 24


@dataclass(frozen=True)
class LocalQuantiles:
    """Per group: knots in log2 size and the 90 % quantile of the absolute log residual at each."""

    size: Mapping[str, np.ndarray]
    quantile: Mapping[str, np.ndarray]

    def at(self, group: str, size: np.ndarray) -> np.ndarray:
        """Half-width of the interval in log time at log2 sizes `size`; NaN for a group never seen."""
        if group not in self.size:
            return np.full(len(size), np.nan)
        return np.interp(size, self.size[group], self.quantile[group])

    def arrays(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Stacked arrays for a file and the names of the groups."""
        names = sorted(self.size)
        return {
            "count": np.array([len(self.size[n]) for n in names], np.int32),
            "size": np.concatenate([self.size[n] for n in names]) if names else np.zeros(0),
            "quantile": np.concatenate([self.quantile[n] for n in names]) if names else np.zeros(0),
        }, names

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], names: list[str]) -> "LocalQuantiles":
        """Inverse of `arrays`."""
        ends = np.cumsum(arrays["count"])[:-1]
        sizes, quantiles = np.split(arrays["size"], ends), np.split(arrays["quantile"], ends)
        return cls(dict(zip(names, sizes, strict=True)), dict(zip(names, quantiles, strict=True)))


def conformal_quantile(residual: np.ndarray, level: float = LEVEL) -> float:
    """The `ceil((n + 1) level) / n` quantile of absolute residuals."""
    n = len(residual)
    if n == 0:
        return float("nan")
    return float(np.quantile(np.abs(residual), min(1.0, np.ceil((n + 1) * level) / n), method="higher"))


def local_quantiles(group: np.ndarray, size: np.ndarray, residual: np.ndarray) -> LocalQuantiles:
    """Quantiles of `residual` (float64[n]) around knots in `size` (log2 bytes), for each value of `group`.

    Groups with fewer rows than a neighbourhood borrow the nearest rows of all groups.
    """
    sizes, quantiles = {}, {}
    for name in np.unique(group.astype(str)):
        own = np.flatnonzero(group == name)
        knots = np.unique(np.quantile(size[own], np.linspace(0, 1, KNOTS)))
        values = []
        for knot in knots:
            near = own[np.argsort(np.abs(size[own] - knot), kind="stable")[:NEIGHBOURS]]
            if len(near) < NEIGHBOURS:
                others = np.argsort(np.abs(size - knot), kind="stable")[: NEIGHBOURS - len(near)]
                near = np.concatenate([near, others])
            values.append(conformal_quantile(residual[near]))
        sizes[name], quantiles[name] = knots, np.array(values)
    return LocalQuantiles(sizes, quantiles)
