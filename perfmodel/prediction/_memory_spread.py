"""How far measured peaks lie from predicted ones, and how likely a layout fits for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import erf, log, sqrt
from statistics import mean, median, pstdev
from types import MappingProxyType

from perfmodel.prediction._sustained import source_group

FILE_NAME = "memory.json"
Figures = Mapping[str, tuple[float, float]]
"""By source, median and median absolute deviation of log(measured / predicted) of its peaks."""
_NORMAL_MAD = 1.4826
"""Standard deviation of normal draws over their median absolute deviation."""
_FEWEST = 3
"""Sources from which a spread between sources is told."""


@dataclass(frozen=True)
class MemorySpread:
    """A normal distribution of log(measured / predicted)."""

    bias: float
    deviation: float

    def probability(self, needed: float, capacity: float) -> float:
        """That a layout which is predicted to need so much finds room in so much, in bytes or shares alike."""
        z = (log(capacity / needed) - self.bias) / self.deviation
        return 0.5 * (1 + erf(z / sqrt(2)))


@lru_cache
def source_figures() -> Figures:
    """Of all published sources with measured peaks; made by `perfmodel fit --sites`."""
    found = json.loads((files("perfmodel.prediction") / FILE_NAME).read_text())
    return MappingProxyType({name: (float(at), float(spread)) for name, (at, spread) in found.items()})


@lru_cache
def memory_spread(without: str = "") -> MemorySpread:
    """The spread that a run of a new source is drawn from, fitted on all published sources but the group that
    `without` is of."""
    return spread_from(source_figures(), without)


def spread_from(figures: Figures, without: str = "") -> MemorySpread:
    """Median bias of the sources; variance between them and, in the mean, inside them, every source counting the same.

    Args:
        figures: of every source.
        without: a source whose group is left out.
    """
    left_out = source_group(without) if without else None
    kept = [figure for name, figure in figures.items() if source_group(name) != left_out]
    between = pstdev([at for at, _ in kept]) if len(kept) >= _FEWEST else max(abs(at) for at, _ in kept)
    inside = mean((_NORMAL_MAD * spread) ** 2 for _, spread in kept)
    return MemorySpread(median(at for at, _ in kept), sqrt(between**2 + inside))
