"""Curves: what measurements add to physics over sizes, at each measured placement (ranks, ranks per node); fitted,
averaged, read at other counts, and as arrays of a file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

Key = TypeVar("Key")
PER_OCTAVE: Final = 4
LOWEST: Final = 4
HIGHEST: Final = 38
GRID: Final = np.arange(LOWEST * PER_OCTAVE, HIGHEST * PER_OCTAVE + 1) / PER_OCTAVE
"""log2 bytes (or tokens) at which every curve is known, float64[g]."""


@dataclass(frozen=True)
class Curve:
    """What measurements add to physics at one placement: log(measured / physical time), piecewise linear over sizes."""

    ranks: float
    ranks_per_node: float
    start: int
    """Index into `GRID` of the first value."""
    value: np.ndarray
    """Log correction at successive points of `GRID`, float32[m]."""

    def everywhere(self) -> np.ndarray:
        """On the whole grid, constant beyond what was measured, float64[g]."""
        index = np.clip(np.arange(len(GRID)) - self.start, 0, len(self.value) - 1)
        return self.value[index].astype(np.float64)

    @property
    def low(self) -> float:
        """log2 of the smallest size measured (to a quarter of an octave)."""
        return float(GRID[self.start])

    @property
    def high(self) -> float:
        return float(GRID[self.start + len(self.value) - 1])


Placements = Mapping[tuple[float, float], Curve]
"""Curves by ranks and ranks per node."""

CovarianceTerms = list[tuple[float, dict[float, Curve]]]
"""Weights and measured curves by count."""


def _fit_curve(ranks: float, ranks_per_node: float, size: np.ndarray, residual: np.ndarray) -> Curve:
    """Medians of quarter octaves, joined; `size` is log2 bytes, `residual` log(measured / physical), float64[n]."""
    order = np.argsort(size, kind="stable")
    x, y = np.clip(size[order], LOWEST, HIGHEST), residual[order]
    cell = np.round(x * PER_OCTAVE).astype(int)
    first = np.flatnonzero(np.diff(cell, prepend=cell[0] - 1))
    middle = np.array([part.mean() for part in np.split(x, first[1:])])
    value = np.array([np.median(part) for part in np.split(y, first[1:])])
    start, end = cell[0] - LOWEST * PER_OCTAVE, cell[-1] - LOWEST * PER_OCTAVE
    return Curve(ranks, ranks_per_node, int(start), np.interp(GRID[start : end + 1], middle, value).astype(np.float32))


def fit_curves(
    groups: Iterable[tuple[Key, np.ndarray]], ranks: np.ndarray, ranks_per_node: np.ndarray, size: np.ndarray,
    residual: np.ndarray,
) -> dict[Key, dict[tuple[float, float], Curve]]:  # fmt: skip
    """One curve per key and placement; `groups`: keys with the indices of their rows."""
    result: dict[Key, dict[tuple[float, float], Curve]] = {}
    for label, index in groups:
        for place in sorted(set(zip(ranks[index].tolist(), ranks_per_node[index].tolist(), strict=True))):
            own = index[(ranks[index] == place[0]) & (ranks_per_node[index] == place[1])]
            result.setdefault(label, {})[place] = _fit_curve(*place, size[own], residual[own])
    return result


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves of one placement, wherever one of them was measured."""
    if len(curves) == 1:
        return curves[0]
    start, end = min(c.start for c in curves), max(c.start + len(c.value) for c in curves)
    value = np.mean([c.everywhere()[start:end] for c in curves], axis=0)
    return replace(curves[0], start=start, value=value.astype(np.float32))


def correction(parts: CovarianceTerms, count: np.ndarray) -> np.ndarray:
    """Log correction at rank or node counts on `GRID`, float64[c, g]."""
    total = np.zeros((len(count), len(GRID)))
    for share, curves in parts:
        total += share * _interpolated(curves, count)
    return total


def inside_of(placements: Placements) -> dict[float, Curve]:
    """Curves inside one node by ranks."""
    return {n: c for (n, r), c in placements.items() if n <= r}


def between_of(placements: Placements, ranks_per_node: float) -> list[tuple[float, dict[float, Curve]]]:
    """Curves over several nodes by number of nodes, with their weights: of the ranks per node asked for or, if they
    were not measured, of those measured next to them, weighed by nearness in the logarithm."""
    between = {place: c for place, c in placements.items() if place[0] > place[1]}
    known = sorted({r for _, r in between})
    low = max((r for r in known if r <= ranks_per_node), default=None)
    high = min((r for r in known if r >= ranks_per_node), default=None)
    if low is None or high is None or low == high:
        shares = [(1.0, r) for r in {low, high} - {None}]
    else:
        up = float(np.log2(ranks_per_node / low) / np.log2(high / low))
        shares = [(1 - up, low), (up, high)]
    return [(share, {n / r: c for (n, r), c in between.items() if r == of}) for share, of in shares]


def _interpolated(curves: Mapping[float, Curve], at: np.ndarray) -> np.ndarray:
    """Correction at rank (or node) counts `at` on the whole grid, float64[a, g]; linear in the counts' logarithm."""
    if not curves:
        return np.zeros((len(at), len(GRID)))
    known = sorted(curves)
    values = np.array([curves[k].everywhere() for k in known])
    place = np.interp(np.log2(at), np.log2(known), np.arange(len(known)))
    low = np.minimum(place.astype(int), max(len(known) - 2, 0))
    high = np.minimum(low + 1, len(known) - 1)
    share = (place - low)[:, None]
    return values[low] * (1 - share) + values[high] * share


def stacked(curves: Mapping[Any, Placements]) -> dict[str, np.ndarray]:
    """All curves as arrays of a file; `name` is the number of the key, [curves], and `value` all values, one curve's
    behind the other's."""
    every = [(i, curve) for i, places in enumerate(curves.values()) for curve in places.values()]
    return {
        "name": np.array([i for i, _ in every], np.int32),
        "place": np.array([(c.ranks, c.ranks_per_node) for _, c in every], np.float64).reshape(-1, 2),
        "start": np.array([c.start for _, c in every], np.int32),
        "length": np.array([len(c.value) for _, c in every], np.int32),
        "value": np.concatenate([c.value for _, c in every]) if every else np.zeros(0, np.float32),
    }


def unstacked(keys: list[Any], arrays: Mapping[str, np.ndarray], prefix: str) -> dict[Any, Placements]:
    """Inverse of `stacked`, whose arrays have this prefix to their names."""
    found = {name: arrays[prefix + name] for name in ("name", "place", "start", "length", "value")}
    values = np.split(found["value"], np.cumsum(found["length"])[:-1])
    result: dict[Any, dict[tuple[float, float], Curve]] = {}
    places = zip(found["name"].tolist(), found["place"].tolist(), found["start"].tolist(), values, strict=False)
    for name, (ranks, per_node), start, value in places:
        result.setdefault(keys[name], {})[ranks, per_node] = Curve(ranks, per_node, start, value)
    return dict(result)
