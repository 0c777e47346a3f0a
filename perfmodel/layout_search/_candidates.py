"""All layouts of a search in one row of numbers: what each needs and what it cannot beat."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction import CATEGORIES, GridCosts
from perfmodel.spec import Layout

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Candidates:
    """Every layout of some grids under one number: its place in them end to end."""

    costs: tuple[GridCosts, ...]
    bound_s: Float[np.ndarray, " layouts"]
    """A step time that each layout does not beat; infinite where it does not fit or is no layout of its own."""
    feasible: int
    """Layouts that fit into memory."""

    @property
    def starts(self) -> Int[np.ndarray, " grids"]:
        """Number of the first layout of every grid."""
        sizes = [cost.bound_s.size for cost in self.costs]
        return np.cumsum([0, *sizes[:-1]])

    def layouts(self, numbers: Int[np.ndarray, " some"]) -> list[Layout]:
        """Some layouts by their numbers."""
        starts = self.starts
        of_grid = np.searchsorted(starts, numbers, side="right") - 1
        pairs = zip(of_grid.tolist(), (numbers - starts[of_grid]).tolist(), strict=True)
        return [self.costs[grid].grid.layout(place) for grid, place in pairs]

    def column(self, name: str) -> Float[np.ndarray, " layouts"]:
        """A numeric field of every layout: degrees, `devices`, `micro_batch`, `zero`, `vpp` or `memory_bytes`."""
        return np.concatenate(
            [np.broadcast_to(_column(cost, name), cost.grid.shape).reshape(-1) for cost in self.costs]
        )

    def frame(self, numbers: Int[np.ndarray, " some"] | None = None) -> "pd.DataFrame":
        """One row per layout (those that fit, if none are named): its fields, peak bytes and bound."""
        import pandas as pd

        numbers = np.flatnonzero(np.isfinite(self.bound_s)) if numbers is None else numbers
        starts = self.starts
        ends = np.searchsorted(numbers, np.append(starts[1:], len(self.bound_s)))
        parts = np.split(numbers, ends[:-1])
        frames = [
            _frame(cost, part - start)
            for cost, part, start in zip(self.costs, parts, starts.tolist(), strict=True)
            if len(part)
        ]
        return pd.concat(frames, ignore_index=True).assign(number=numbers) if frames else pd.DataFrame()


def gather(costs: Iterable[GridCosts], usable_bytes: float, rejected: Counter[str]) -> Candidates:
    """Join priced grids; layouts that need more than `usable_bytes` are counted in `rejected` by what is largest."""
    kept, bounds, feasible = [], [], 0
    for cost in costs:
        fits = _spread(cost, cost.peak_bytes <= usable_bytes)
        valid = np.broadcast_to(cost.grid.valid, cost.grid.shape)
        too_large = np.bincount(_spread(cost, cost.largest)[valid & ~fits], minlength=len(CATEGORIES))
        for part, count in zip(CATEGORIES, too_large.tolist(), strict=True):
            if count:
                rejected[f"out of memory, mostly {part}"] += count
        feasible += int((valid & fits).sum())
        kept.append(cost)
        bounds.append(np.where(valid & fits, cost.bound_s, np.float32(np.inf)).reshape(-1))
    return Candidates(tuple(kept), np.concatenate(bounds), feasible)


def _spread(cost: GridCosts, of_memory: np.ndarray) -> np.ndarray:
    return np.broadcast_to(cost.spread(of_memory), cost.grid.shape)


def _column(cost: GridCosts, name: str) -> Float[np.ndarray, "..."]:
    grid = cost.grid
    match name:
        case "memory_bytes":
            return cost.spread(cost.peak_bytes)
        case "zero":
            return np.array([float(state.zero) for state in grid.states])
        case "vpp":
            return np.array([float(choice.vpp) for choice in grid.pipelines])[:, None, None, None]
    return np.array(getattr(grid.degrees, name), float)


def _frame(cost: GridCosts, places: Int[np.ndarray, " some"]) -> "pd.DataFrame":
    import pandas as pd

    grid = cost.grid
    index = np.unravel_index(places, grid.shape)
    columns = {f.name: getattr(grid.degrees, f.name) for f in fields(grid.degrees)}
    for axis, choices in zip(index, (grid.pipelines, grid.shards, grid.recomputes, grid.states), strict=True):
        for name in choices[0]._fields:
            values = [getattr(choice, name) for choice in choices]
            if name == "recompute_full_layers":  # of every stage alike
                values = [sum(value or ()) for value in values]
            columns[name] = np.array(values)[axis]
    columns["peak_bytes"] = _spread(cost, cost.peak_bytes)[index]
    columns["bound_s"] = cost.bound_s[index]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(places)))
