"""Correction curves over message sizes at each measured placement (ranks, ranks per node): fit,
mean, interpolation, storage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

Key = TypeVar("Key")
PER_OCTAVE: Final = 4
"""Points of the grid in each doubling of the size."""
LOWEST: Final = 4
"""log2 of the smallest size of the grid: 16 bytes."""
HIGHEST: Final = 38
"""log2 of the largest size of the grid: 256 GiB."""
GRID: Final = np.arange(LOWEST * PER_OCTAVE, HIGHEST * PER_OCTAVE + 1) / PER_OCTAVE
"""log2 bytes (or tokens) at which every curve is known, float64[g]."""
LARGE: Final = 20
"""log2 of the bytes from which a message counts as large: 1 MiB."""
_TRANSFER_SHARE: Final = 1 / (1 + np.exp2(LARGE - GRID))
"""Usual share of the transfer in the time of a message, half at the size from which it counts as
large: it takes 10 us at 100 GB/s, the latency of a collective on eight ranks. float64[g]."""


@dataclass(frozen=True)
class Curve:
    """The correction at one placement: log(measured / physical time), piecewise linear over
    sizes."""

    ranks: float
    ranks_per_node: float
    start: int
    """Index into `GRID` of the first value."""
    value: np.ndarray
    """Log correction at successive points of `GRID`, float32[m]."""

    def everywhere(self) -> np.ndarray:
        """The curve on the whole grid, float64[g].

        It is constant beyond the largest measured size, and below the smallest if latency was
        measured there. A correction that was measured on transfers alone says nothing of latency,
        so below the smallest size it falls with their share of the time.
        """
        index = np.clip(np.arange(len(GRID)) - self.start, 0, len(self.value) - 1)
        share_lost = np.maximum(_TRANSFER_SHARE[self.start] - _TRANSFER_SHARE, 0.0)
        return self.value[index] * (1.0 - share_lost)

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


def _fit_curve(
    ranks: float, ranks_per_node: float, size: np.ndarray, residual: np.ndarray
) -> Curve:
    """Medians of quarter octaves, joined; `size` is log2 bytes, `residual` log(measured /
    physical), float64[n]."""
    order = np.argsort(size, kind="stable")
    x = np.clip(size[order], LOWEST, HIGHEST)
    y = residual[order]

    # Take a median per quarter of an octave, because repeats scatter and some runs are slow. Each
    # median stands at the mean of its sizes; the grid is interpolated between these points.
    cell = np.round(x * PER_OCTAVE).astype(int)
    first_of_cell = np.flatnonzero(np.diff(cell, prepend=cell[0] - 1))
    middle = np.array([part.mean() for part in np.split(x, first_of_cell[1:])])
    median = np.array([np.median(part) for part in np.split(y, first_of_cell[1:])])
    start = cell[0] - LOWEST * PER_OCTAVE
    end = cell[-1] - LOWEST * PER_OCTAVE
    value = np.interp(GRID[start : end + 1], middle, median).astype(np.float32)
    return Curve(ranks, ranks_per_node, int(start), value)


def fit_curves(
    groups: Iterable[tuple[Key, np.ndarray]],
    ranks: np.ndarray,
    ranks_per_node: np.ndarray,
    size: np.ndarray,
    residual: np.ndarray,
) -> dict[Key, dict[tuple[float, float], Curve]]:
    """One curve per key and placement; `groups`: keys with the indices of their rows."""
    result: dict[Key, dict[tuple[float, float], Curve]] = {}
    for key, index in groups:
        places = set(zip(ranks[index].tolist(), ranks_per_node[index].tolist(), strict=True))
        for place in sorted(places):
            at_place = index[(ranks[index] == place[0]) & (ranks_per_node[index] == place[1])]
            result.setdefault(key, {})[place] = _fit_curve(
                *place, size[at_place], residual[at_place]
            )
    return result


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves of one placement, at sizes where at least one was measured."""
    if len(curves) == 1:
        return curves[0]
    start = min(c.start for c in curves)
    end = max(c.start + len(c.value) for c in curves)
    value = np.mean([c.everywhere()[start:end] for c in curves], axis=0)
    return replace(curves[0], start=start, value=value.astype(np.float32))


def correction(parts: CovarianceTerms, count: np.ndarray) -> np.ndarray:
    """Log correction at rank or node counts on `GRID`, float64[c, g]."""
    total = np.zeros((len(count), len(GRID)))
    for share, curves in parts:
        if not curves:
            continue
        known = sorted(curves)
        values = np.array([curves[known_count].everywhere() for known_count in known])

        # Between the two nearest measured counts, linear in the counts' logarithm; beyond the
        # outermost as at these.
        place = np.interp(np.log2(count), np.log2(known), np.arange(len(known)))
        low = np.minimum(place.astype(int), max(len(known) - 2, 0))
        high = np.minimum(low + 1, len(known) - 1)
        weight = (place - low)[:, None]
        total += share * (values[low] * (1 - weight) + values[high] * weight)
    return total


def between_of(
    placements: Placements, ranks_per_node: float
) -> list[tuple[float, dict[float, Curve]]]:
    """Curves over several nodes by number of nodes, with their weights: those of the requested
    ranks per node or, if these were not measured, of the nearest ones, weighed by nearness in the
    logarithm."""
    between_nodes = {place: curve for place, curve in placements.items() if place[0] > place[1]}
    known = sorted({per_node for _, per_node in between_nodes})
    low = max((per_node for per_node in known if per_node <= ranks_per_node), default=None)
    high = min((per_node for per_node in known if per_node >= ranks_per_node), default=None)

    # At the ends of what was measured one neighbour stands for all; between two both do.
    if low is None or high is None or low == high:
        shares = [(1.0, per_node) for per_node in {low, high} - {None}]
    else:
        weight = float(np.log2(ranks_per_node / low) / np.log2(high / low))
        shares = [(1 - weight, low), (weight, high)]

    parts = []
    for share, known_per_node in shares:
        by_nodes = {
            n / per_node: curve
            for (n, per_node), curve in between_nodes.items()
            if per_node == known_per_node
        }
        parts.append((share, by_nodes))
    return parts


def stacked(curves: Mapping[Any, Placements]) -> dict[str, np.ndarray]:
    """Stack all curves into arrays for a file.

    `name` is the number of every curve's key, and `value` all values, one curve's behind the
    other's.
    """
    key_numbers: list[int] = []
    flat: list[Curve] = []
    for number, placements in enumerate(curves.values()):
        for curve in placements.values():
            key_numbers.append(number)
            flat.append(curve)
    values = [curve.value for curve in flat]
    return {
        "name": np.array(key_numbers, np.int32),
        "place": np.array(
            [(curve.ranks, curve.ranks_per_node) for curve in flat], np.float64
        ).reshape(-1, 2),
        "start": np.array([curve.start for curve in flat], np.int32),
        "length": np.array([len(value) for value in values], np.int32),
        "value": np.concatenate(values) if values else np.zeros(0, np.float32),
    }


def unstacked(
    keys: list[Any], arrays: Mapping[str, np.ndarray], prefix: str
) -> dict[Any, Placements]:
    """Inverse of `stacked`, for arrays with this name prefix."""
    key_numbers, places, starts, lengths, flat_values = (
        arrays[prefix + name] for name in ("name", "place", "start", "length", "value")
    )
    values = np.split(flat_values, np.cumsum(lengths)[:-1])
    result: dict[Any, dict[tuple[float, float], Curve]] = {}
    # not strict: splitting an empty array gives one part where there is no curve
    columns = zip(key_numbers.tolist(), places.tolist(), starts.tolist(), values, strict=False)
    for number, (ranks, per_node), start, value in columns:
        result.setdefault(keys[number], {})[ranks, per_node] = Curve(ranks, per_node, start, value)
    return dict(result)
