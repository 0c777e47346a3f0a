"""What the fits say of a cluster's links: constants per network level for one collective kind."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.learn._collective_constants import Series
from perfmodel.learn._collective_links import link_class
from perfmodel.learn._collective_relatives import relative_vector
from perfmodel.learn._collective_weights import CollectiveWeights, ReferenceGrid


@dataclass(frozen=True)
class ReferenceVectors:
    """Constants of one kind on one cluster."""

    intra: np.ndarray
    """Constants inside the node, float64[8] (see `LinkConstants.from_vector`)."""
    inter: np.ndarray
    """Constants of each level taken as the one between nodes, float64[levels, 8]."""
    grids: tuple[ReferenceGrid, ...]
    """Measured corrections of this device or, if it was not measured, of all of its link class."""
    ranks: np.ndarray
    """Rank counts measured inside a node of this very device."""
    low_bytes: float
    high_bytes: float
    most_ranks_inside: int
    """Most ranks measured inside a node on links of its class; 0 if that was never measured."""
    most_ranks_between: int
    """Most ranks measured between nodes of any machine."""

    def correction(self, ranks: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Log correction at rank counts and log2 sizes, float64[n]: the mean of the grids, bilinear within
        what was measured and constant beyond."""
        total = np.zeros(len(size))
        for grid in self.grids:
            total += _bilinear(grid, ranks, size)
        return total / max(len(self.grids), 1)


def reference_vectors(
    weights: CollectiveWeights, kind: str, device_names: Sequence[str], level_names: Sequence[str]
) -> ReferenceVectors:
    """Constants for a device (any of its names) and its network levels, innermost first.

    Stands on the reference sources (timed on the device, without dispatch cost) wherever one has the kind.
    Between nodes only series count whose links ran near their nominal rate.
    """
    links = {link_class(level_names[0], name, False).name for name in device_names}
    series = _of_reference_sources(weights, kind, links)
    measured = {s.name.split("|")[1] for s in series}
    device = next((name for name in device_names if name in measured), device_names[0])
    source = series[0].name.split("|") if series else ["", "", "", kind, "auto", ""]
    name = "|".join([source[0], device, level_names[0], source[3], source[4], source[5]])
    link = link_class(level_names[0], device, False)
    own = [s for s in series if s.name.split("|")[1] == device and s.name.split("|")[3] == kind]
    akin = [s for s in series if _link(s) == link.name]
    healthy = [s for s in weights.series if s.ranks_between and not s.name.startswith(tuple(weights.unhealthy))]
    inter = [
        relative_vector("|".join(["", device, level, kind, "auto", ""]), healthy, True)[0] for level in level_names
    ]
    return ReferenceVectors(
        intra=relative_vector(name, own or akin or series)[0],
        inter=np.array(inter),
        grids=tuple(weights.grids[s.name] for s in own or akin if s.name in weights.grids),
        ranks=np.array(sorted({r for s in own for r in s.ranks}), float),
        low_bytes=min((s.low_bytes for s in own), default=np.inf),
        high_bytes=max((s.high_bytes for s in own), default=0.0),
        most_ranks_inside=max((r for s in akin for r in s.ranks), default=0),
        most_ranks_between=max((r for s in healthy for r in s.ranks_between), default=0),
    )


def _of_reference_sources(weights: CollectiveWeights, kind: str, links: set[str]) -> list[Series]:
    """Series of the first source that has the kind on these links, else of the first that has the kind."""
    wanted = "all_reduce" if kind == "broadcast" else kind
    having = []
    for source in weights.reference_sources:
        found = [s for s in weights.series if s.ranks and _is_reference(s, source, wanted)]
        if any(_link(s) in links for s in found):
            return found
        having += [found] if found else []
    return having[0] if having else [s for s in weights.series if s.ranks]


def _link(series: Series) -> str:
    _, device, interconnect, *_ = series.name.split("|")
    return link_class(interconnect, device, False).name


def _is_reference(series: Series, source: str, kind: str) -> bool:
    parts = series.name.split("|")
    return parts[0] == source and parts[3] == kind and parts[4] == "auto"


def _bilinear(grid: ReferenceGrid, ranks: np.ndarray, size: np.ndarray) -> np.ndarray:
    column = np.clip((size - grid.size[0]) / (grid.size[1] - grid.size[0]), 0, len(grid.size) - 1)
    left = np.minimum(column.astype(np.int64), len(grid.size) - 2)
    log_ranks = np.log2(grid.ranks)
    row = np.interp(np.log2(np.maximum(ranks, 1.0)), log_ranks, np.arange(len(log_ranks)))
    low = np.minimum(row.astype(np.int64), max(len(log_ranks) - 2, 0))
    high = np.minimum(low + 1, len(log_ranks) - 1)
    at, up = column - left, row - low
    value = grid.correction
    below = value[low, left] * (1 - at) + value[low, left + 1] * at
    above = value[high, left] * (1 - at) + value[high, left + 1] * at
    return below * (1 - up) + above * up
