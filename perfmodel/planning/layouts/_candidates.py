"""All candidate layouts of a search, numbered, with their memory and lower bounds."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, Reason, Rejection
from perfmodel.prediction.grids import GridCosts, RecomputeChoice
from perfmodel.prediction.memory import CATEGORIES
from perfmodel.spec import Layout

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Candidates:
    """Numbered layouts: the grids one after another, without choices that never fit."""

    costs: tuple[GridCosts, ...]
    bound_s: Float[np.ndarray, " layouts"]
    """Lower bound of each layout's step time; infinite if the layout does not fit or duplicates
    another one."""
    feasible: int
    """Layouts that fit into memory."""
    smallest: tuple[Layout, float]
    """The layout that needs the least memory, even if it does not fit, and its bytes."""

    @property
    def starts(self) -> Int[np.ndarray, " grids"]:
        """Number of the first layout of every grid."""
        sizes = [cost.bound_s.size for cost in self.costs]
        return np.cumsum([0, *sizes[:-1]])

    def layouts(self, numbers: Int[np.ndarray, " some"]) -> list[Layout]:
        """The layouts with these numbers."""
        return [self.costs[grid].grid.layout(place) for grid, place in self._places(numbers)]

    def peak_bytes(self, numbers: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """Peak memory of some layouts."""
        peaks_bytes = np.empty(len(numbers))
        for grid, positions, (pipeline, shard, recompute, state) in self._by_grid(numbers):
            cost = self.costs[grid]
            peaks_bytes[positions] = cost.peak_bytes[
                pipeline, cost.of_shard[shard], recompute, cost.of_state[state]
            ]
        return peaks_bytes

    def distinct(
        self, numbers: Int[np.ndarray, " some"], prices: Sequence[Hashable]
    ) -> Int[np.ndarray, " kept"]:
        """Positions of layouts, in order of preference, without those equivalent to an earlier one.

        Layouts are equivalent if they differ only in recompute or offload, which cost time and save
        memory, or in options without effect: same degrees, micro-batch and pipeline, and equal
        prices.
        """
        seen_keys: set[Hashable] = set()
        places = []
        for position, ((grid, place), price) in enumerate(
            zip(self._places(numbers), prices, strict=True)
        ):
            choices = self.costs[grid].grid
            pipeline, shard, _, state = map(int, np.unravel_index(place, choices.shape))

            # Layouts of one grid share degrees and micro-batch. Two sorts of variants lie in
            # grids of their own: orders of the kinds with their cuts, and offloaded layers
            # without a pipeline.
            home: Hashable = grid
            degrees = choices.degrees
            if degrees.kinds is not None:
                kinds = tuple(sorted(degrees.kinds))
                home = (
                    *degrees.degrees,
                    degrees.micro_batch,
                    kinds,
                    choices.pipelines,
                    choices.shards,
                )
            elif degrees.pp == 1:
                home = degrees, choices.pipelines, choices.shards

            # A layout is seen if a better one differs in recompute or offload only, or has the
            # same pipeline and price.
            keys = {
                (home, pipeline, shard, choices.states[state].resident),
                (home, pipeline, price),
            }
            if not keys & seen_keys:
                places.append(position)
            seen_keys |= keys
        return np.array(places, np.int64)

    def dominated(self, numbers: Int[np.ndarray, " some"]) -> Bool[np.ndarray, " some"]:
        """Mark layouts that cannot beat a variant that fits and recomputes or offloads less.

        In an otherwise equal program, more recomputation only lengthens backward passes, and
        offloading only adds transfers. A program never ends earlier with longer durations or more
        waits.
        """
        starts = self.starts
        is_dominated = np.zeros(len(numbers), bool)
        for index, positions, (pipeline, shard, recompute, states) in self._by_grid(numbers):
            grid = self.costs[index].grid
            bound_s = self.bound_s[starts[index] :][: self.costs[index].bound_s.size]
            fits = np.isfinite(bound_s.reshape(grid.shape))

            # For each choice of states the one that keeps on the device what this one offloads,
            # itself where none does.
            resident = np.arange(len(grid.states))
            for i, state in enumerate(grid.states):
                if state.resident in grid.states:
                    resident[i] = grid.states.index(state.resident)

            # Variants that fit, keep states on the device and recompute no more; the layout
            # itself is none.
            fitting = fits[pipeline, shard, :, resident[states]]
            less = fitting & _recomputes_no_more(grid.recomputes)[recompute]
            less[np.arange(len(positions)), recompute] &= resident[states] != states
            is_dominated[positions] = less.any(axis=1)
        return is_dominated

    def _places(self, numbers: Int[np.ndarray, " some"]) -> list[tuple[int, int]]:
        """Grid of some layouts, and their place in it."""
        starts = self.starts
        grid_of_layout = np.searchsorted(starts, numbers, side="right") - 1
        return list(
            zip(grid_of_layout.tolist(), (numbers - starts[grid_of_layout]).tolist(), strict=True)
        )

    def _by_grid(
        self, numbers: Int[np.ndarray, " some"]
    ) -> Iterator[tuple[int, Int[np.ndarray, " in_grid"], tuple[Int[np.ndarray, " in_grid"], ...]]]:
        """Per grid that holds some of the layouts: its index, the positions of its layouts in
        `numbers`, and their places on the axes of the grid."""
        starts = self.starts
        grid_of_layout = np.searchsorted(starts, numbers, side="right") - 1
        order = np.argsort(grid_of_layout, kind="stable")
        grids, first = np.unique(grid_of_layout[order], return_index=True)
        ends = np.append(first, len(order))[1:]
        for grid, begin, end in zip(grids.tolist(), first.tolist(), ends.tolist(), strict=True):
            positions = order[begin:end]
            places = numbers[positions] - starts[grid]
            yield grid, positions, np.unravel_index(places, self.costs[grid].grid.shape)

    def within(self, limit_bytes: float) -> "Candidates":
        """The same candidates; those that need more than `limit_bytes` no longer fit."""
        if not self.costs:
            return self
        fits = [_over_layouts(cost, cost.fits(limit_bytes)).reshape(-1) for cost in self.costs]
        bound_s = np.where(np.concatenate(fits), self.bound_s, np.float32(np.inf))
        return replace(self, bound_s=bound_s, feasible=int(np.isfinite(bound_s).sum()))

    def column_of(self, name: str, numbers: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """A numeric field of some layouts; see `column`."""
        if name == "memory_bytes":
            return self.peak_bytes(numbers)
        values = np.empty(len(numbers))
        for grid, positions, places in self._by_grid(numbers):
            cost = self.costs[grid]
            values[positions] = np.broadcast_to(_column(cost, name), cost.grid.shape)[places]
        return values

    def column(self, name: str) -> Float[np.ndarray, " layouts"]:
        """A numeric field of every layout: degrees, `devices`, `micro_batch`, `zero`, `vpp` or
        `memory_bytes`."""
        parts = [
            np.broadcast_to(_column(cost, name), cost.grid.shape).reshape(-1) for cost in self.costs
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def frame(self) -> "pd.DataFrame":
        """One row per layout that fits, with its fields, peak bytes and lower bound."""
        import pandas as pd

        numbers = np.flatnonzero(np.isfinite(self.bound_s))
        starts = self.starts

        # Numbers are ascending over the grids, so that they split at the grids' starts.
        ends = np.searchsorted(numbers, np.append(starts[1:], len(self.bound_s)))
        parts = np.split(numbers, ends[:-1])
        frames = [
            _frame(cost, part - start)
            for cost, part, start in zip(self.costs, parts, starts.tolist(), strict=True)
            if len(part)
        ]
        if frames:
            return pd.concat(frames, ignore_index=True).assign(number=numbers)
        return pd.DataFrame()


def _recomputes_no_more(
    choices: Sequence[RecomputeChoice],
) -> Bool[np.ndarray, "choices choices"]:
    """Whether everything that the choice of the column recomputes is also recomputed by the choice
    of the row."""
    # Modes are ordered by how much they recompute. `full` covers any number of layers in full.
    mode = np.array([("none", "selective", "full").index(choice.recompute) for choice in choices])
    full = np.full(len(choices), np.inf)
    for i, choice in enumerate(choices):
        if choice.recompute != "full":
            full[i] = sum(choice.recompute_full_layers or ())
    return (mode[None, :] <= mode[:, None]) & (full[None, :] <= full[:, None])


def gather(
    costs: Iterable[GridCosts], usable_bytes: float, rejected: Counter[Rejection]
) -> Candidates:
    """Join priced grids; layouts that need more than `usable_bytes` are counted in `rejected` by
    their largest part.

    Grids of which no layout fits are left out.
    """
    possible = []
    bounds = []
    feasible = 0
    smallest: tuple[Layout, float] | None = None
    for cost in costs:
        fits = cost.fits(usable_bytes)
        too_large = cost.left_out + cost.too_large(usable_bytes)
        for part, count in zip(CATEGORIES, too_large.tolist(), strict=True):
            if count:
                rejected[Rejection(Reason.MEMORY, part)] += count

        # Remember the smallest layout of all, to say how far from fitting a job is if nothing
        # fits. The first comparison also counts invalid layouts, and saves spreading grids that
        # cannot hold it.
        if smallest is None or cost.peak_bytes.min() < smallest[1]:
            peak = _over_layouts(cost, np.where(cost.grid.valid, cost.peak_bytes, np.inf))
            if smallest is None or peak.min() < smallest[1]:
                smallest = cost.grid.layout(int(peak.argmin())), float(peak.min())

        # Choices of equal memory share an entry of `fits`; `multiplicity` counts the layouts that
        # it stands for.
        n_fitting = int((fits * cost.multiplicity).sum())
        if n_fitting:
            feasible += n_fitting
            possible.append(cost)
            bounds.append(
                np.where(_over_layouts(cost, fits), cost.bound_s, np.float32(np.inf)).reshape(-1)
            )
    if smallest is None:
        raise LayoutError("the search has no layout to evaluate")
    bound_s = np.concatenate(bounds) if bounds else np.zeros(0, np.float32)
    return Candidates(tuple(possible), bound_s, feasible, smallest)


def _over_layouts(cost: GridCosts, values: np.ndarray) -> np.ndarray:
    """Expand values per memory state to values per layout of the grid."""
    return np.broadcast_to(cost.spread(values), cost.grid.shape)


def _column(cost: GridCosts, name: str) -> Float[np.ndarray, "..."]:
    """A quantity of a grid's layouts, with the grid axes that it depends on."""
    grid = cost.grid
    match name:
        case "memory_bytes":
            return cost.spread(cost.peak_bytes)
        case "zero":
            return np.array([float(state.zero) for state in grid.states])
        case "vpp":
            return np.array([float(choice.vpp) for choice in grid.pipelines])[:, None, None, None]
        case "etp":
            return np.array(grid.degrees.expert_tp, float)
    return np.array(getattr(grid.degrees, name), float)


def _frame(cost: GridCosts, places: Int[np.ndarray, " some"]) -> "pd.DataFrame":
    """Return a row per layout of a grid at some places."""
    import pandas as pd

    # Degrees are the same in all of a grid. Each of its axes has the choices of some other fields.
    grid = cost.grid
    columns = grid.degrees.values()
    index = np.unravel_index(places, grid.shape)
    axes = (grid.pipelines, grid.shards, grid.recomputes, grid.states)
    for choice_of_row, choices in zip(index, axes, strict=True):
        for name in choices[0]._fields:
            values = [getattr(choice, name) for choice in choices]
            if name == "recompute_full_layers":  # of every stage alike
                values = [sum(value or ()) for value in values]
            columns[name] = np.array(values)[choice_of_row]
    columns["peak_bytes"] = _over_layouts(cost, cost.peak_bytes)[index]
    columns["bound_s"] = cost.bound_s[index]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(places)))
