"""Memory and lower bounds of grids of layouts, priced without any program."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_bound import grid_bound_s
from perfmodel.prediction._grid_memory import grid_memory
from perfmodel.prediction._grid_model import GridModel, distinct
from perfmodel.prediction._step_model import StepModel
from perfmodel.spec import Layout


@dataclass(frozen=True, eq=False)
class GridCosts:
    """What is known of a grid's layouts before any is evaluated."""

    grid: LayoutGrid
    peak_bytes: Float[np.ndarray, "pipelines own_shards recomputes own_states"]
    """Memory of the fullest rank, exact, for choices that differ in it."""
    largest: Int[np.ndarray, "pipelines own_shards recomputes own_states"]
    """What takes most of it (place in `CATEGORIES`)."""
    of_shard: Int[np.ndarray, " shards"]
    """Place of each shard choice among those that differ in memory."""
    of_state: Int[np.ndarray, " states"]
    """The same for state choices."""
    bound_s: Float[np.ndarray, "pipelines shards recomputes states"]
    """A step time that the layout does not beat (float32)."""

    def spread(self, of_memory: np.ndarray) -> np.ndarray:
        """What is known by choices that differ in memory, for all layouts of the grid."""
        return of_memory[:, self.of_shard][..., self.of_state]


def lower_bounds_s(fixed: StepModel, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """A step time that each layout does not beat, whatever the order of its events.

    Raises:
        LayoutError: layouts of uneven stages.
    """
    return np.array([cost.bound_s.item() for cost in price_grids(fixed, [*map(LayoutGrid.of, layouts)])])


def price_grids(fixed: StepModel, grids: Sequence[LayoutGrid]) -> Iterator[GridCosts]:
    """Costs of every grid, in order; the events of all of them are timed in one call."""
    full_layers = dict.fromkeys(choice.recompute_full_layers for grid in grids for choice in grid.recomputes)
    model = GridModel(fixed, list(full_layers))
    try:
        model.time_events(grids)
        for grid in grids:
            own_shards, of_shard = distinct([shard.sequence_parallel for shard in grid.shards])
            own_states, of_state = distinct([(state.zero, state.offload) for state in grid.states])
            peak, largest = grid_memory(model, grid, own_shards, own_states)
            yield GridCosts(grid, peak, largest, of_shard, of_state, grid_bound_s(model, grid))
    finally:
        model.pipelines.save()
