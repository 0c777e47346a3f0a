"""Conformal intervals that know where a model errs: quantiles of honest residuals near each place.

Split conformal prediction (Lei et al., JASA 113, 2018) applied to neighbourhoods: the residuals are those of
shapes left out, the neighbours the nearest in size within one series, then within one family. The centre of
an interval is the value of least mean relative error, which heavy tails (a library that is sometimes three
times slower) pull below the mean of the logarithms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

LEVEL: Final = 0.9
NEIGHBOURS: Final = 80
FEWEST_FOR_CENTRE: Final = 20
KNOTS: Final = 24


@dataclass(frozen=True)
class LocalErrors:
    """Per group: knots in log2 size, centre and 90 % quantile (around it) of the log residual at each."""

    size: Mapping[str, np.ndarray]
    centre: Mapping[str, np.ndarray]
    quantile: Mapping[str, np.ndarray]

    def at(self, group: str, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What to add to log time, and the half-width of the interval in log time, at log2 sizes `size`; 0 and
        NaN for a group never seen."""
        if group not in self.size:
            return np.zeros(len(size)), np.full(len(size), np.nan)
        knots = self.size[group]
        return np.interp(size, knots, self.centre[group]), np.interp(size, knots, self.quantile[group])

    def arrays(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Stacked arrays for a file and the names of the groups."""
        names = sorted(self.size)

        def stacked(parts: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.concatenate([parts[n] for n in names]) if names else np.zeros(0)

        return {
            "count": np.array([len(self.size[n]) for n in names], np.int32),
            "size": stacked(self.size),
            "centre": stacked(self.centre),
            "quantile": stacked(self.quantile),
        }, names

    def joined(self, other: "LocalErrors") -> "LocalErrors":
        """The groups of both."""
        return LocalErrors(
            {**self.size, **other.size}, {**self.centre, **other.centre}, {**self.quantile, **other.quantile}
        )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], names: list[str]) -> "LocalErrors":
        """Inverse of `arrays`."""
        ends = np.cumsum(arrays["count"])[:-1]
        parts = [np.split(arrays[key], ends) for key in ("size", "centre", "quantile")]
        return cls(*(dict(zip(names, part, strict=True)) for part in parts))


def conformal_quantile(residual: np.ndarray, level: float = LEVEL) -> float:
    """The `ceil((n + 1) level) / n` quantile of absolute residuals."""
    n = len(residual)
    if n == 0:
        return float("nan")
    return float(np.quantile(np.abs(residual), min(1.0, np.ceil((n + 1) * level) / n), method="higher"))


def relative_centre(residual: np.ndarray) -> float:
    """The shift `s` that minimises `mean |exp(s - residual) - 1|`: the median weighted by `exp(-residual)`.

    >>> round(relative_centre(np.log([1.0, 1.0, 4.0, 4.0, 4.0])), 6)
    0.0
    """
    ordered = np.sort(residual)
    weight = np.cumsum(np.exp(-ordered))
    return float(ordered[np.searchsorted(weight, 0.5 * weight[-1])])


def local_errors(group: np.ndarray, size: np.ndarray, residual: np.ndarray) -> LocalErrors:
    """Centres and quantiles of `residual` = log(measured / predicted), float64[n], around knots in `size`
    (log2 bytes), for each value of `group`.

    Groups with fewer rows than a neighbourhood borrow the nearest rows of all groups for the quantile; the
    centre is their own alone.
    """
    sizes, centres, quantiles = {}, {}, {}
    for name in np.unique(group.astype(str)):
        own = np.flatnonzero(group == name)
        knots = np.unique(np.quantile(size[own], np.linspace(0, 1, KNOTS)))
        centre, quantile = np.zeros(len(knots)), np.zeros(len(knots))
        for i, knot in enumerate(knots):
            near = own[np.argsort(np.abs(size[own] - knot), kind="stable")[:NEIGHBOURS]]
            if len(near) >= FEWEST_FOR_CENTRE:
                centre[i] = relative_centre(residual[near])
            if len(near) < NEIGHBOURS:
                others = np.argsort(np.abs(size - knot), kind="stable")[: NEIGHBOURS - len(near)]
                near = np.concatenate([near, others])
            quantile[i] = conformal_quantile(residual[near] - centre[i])
        sizes[name], centres[name], quantiles[name] = knots, centre, quantile
    return LocalErrors(sizes, centres, quantiles)
