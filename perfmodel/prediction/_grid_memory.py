"""Memory of whole grids of layouts: the exact figure, on the ranks that may be the fullest."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_model import GridModel
from perfmodel.prediction._memory import BlockBytes, Sharding, rank_memory
from perfmodel.prediction._phases import modes_of


def grid_memory(
    model: GridModel, grid: LayoutGrid, own_shards: Sequence[int], own_states: Sequence[int]
) -> tuple[
    Float[np.ndarray, "pipelines shards recomputes states"], Int[np.ndarray, "pipelines shards recomputes states"]
]:
    """Peak bytes, and the place in `CATEGORIES` of what takes most, for some shard and state choices."""
    setting, layout = model.problem.setting, grid.degrees
    offloads = np.array([grid.states[z].offload for z in own_states])
    zero = np.array([grid.states[z].zero for z in own_states])
    of_shards = [model.blocks(grid)[s] for s in own_shards]
    modes = modes_of([choice.recompute for choice in grid.recomputes])[None, :, None]
    blocks = BlockBytes.of(of_shards, modes, layout.pp > 1, setting.job, setting.framework)
    shape = len(grid.pipelines), len(own_shards), len(grid.recomputes), len(own_states)
    peak, largest = np.empty(shape), np.empty(shape, np.int8)
    for offload in np.unique(offloads).tolist():
        alike = Sharding.of([layout.replace(zero=stage) for stage in zero[offloads == offload].tolist()])
        memory = rank_memory(model.ranks(grid, offload), blocks, alike, setting)
        peak[..., offloads == offload], largest[..., offloads == offload] = memory.peak, memory.largest
    return peak, largest
