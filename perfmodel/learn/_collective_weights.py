"""Everything that a fit of collective tables leaves behind: curve constants, networks, corrections, intervals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfmodel.learn._collective_constants import Series
from perfmodel.learn._collective_residual import ResidualNet
from perfmodel.learn._fine_tables import FineTables
from perfmodel.learn._kriging import Kriging
from perfmodel.learn._local_intervals import LocalErrors


@dataclass(frozen=True)
class Corrected:
    """A family's measured corrections and how far off they are for shapes left out."""

    kriging: Kriging
    errors: LocalErrors
    fine: FineTables
    left_out_error: float
    """Mean absolute error (fraction) on shapes left out."""


@dataclass(frozen=True)
class ReferenceGrid:
    """Log correction of the physical curve inside one node, where a device was measured."""

    ranks: np.ndarray
    """Rank counts measured, ascending, float64[r]."""
    size: np.ndarray
    """log2 bytes, ascending, float64[s]."""
    correction: np.ndarray
    """float64[r, s]."""


@dataclass(frozen=True)
class MoeWeights:
    """The same for mixture-of-experts exchanges."""

    series: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Constants as `moe_curve` takes them, by series name."""
    corrections: Mapping[str, Corrected] = field(default_factory=dict)
    spread: float = 0.5
    """90 % quantile of the absolute log error for devices left out."""


@dataclass(frozen=True)
class CollectiveWeights:
    """A fitted model of collectives."""

    series: tuple[Series, ...]
    nets: Mapping[str, ResidualNet] = field(default_factory=dict)
    """By collective kind."""
    corrections: Mapping[str, Corrected] = field(default_factory=dict)
    """By family name (`family_names`)."""
    grids: Mapping[str, ReferenceGrid] = field(default_factory=dict)
    """By series name, for the reference sources."""
    moe: MoeWeights = field(default_factory=MoeWeights)
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """90 % quantiles of the absolute log error by what was left out (`ranks`, `device`) and kind."""
    reference_sources: tuple[str, ...] = ()
    """Sources timed on the device, best first: what `CollectiveModel.times` stands on."""
    unhealthy: tuple[str, ...] = ()
    """Beginnings of series names whose links between nodes ran far below their nominal rate."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: seeds, rows, measured errors."""

    def spread_of(self, left_out: str, kind: str) -> float:
        """The quantile for one kind, or the widest of all kinds where that kind had no such study."""
        known = self.spread.get(left_out, {})
        return known.get(kind, max(known.values(), default=DEFAULT_SPREAD[left_out]))


DEFAULT_SPREAD = {"ranks": 0.35, "device": 0.7}
"""Where a table was too small to leave anything out."""
