"""Memory of whole grids of layouts: the exact figure, on the ranks that may be the fullest."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import RECOMPUTE_MODES
from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_model import GridModel
from perfmodel.prediction._grid_pipelines import Ranks
from perfmodel.prediction._memory import MemoryBatch, dummy_gradient_bytes, gathered_params, rank_memory


def grid_memory(
    model: GridModel, grid: LayoutGrid, own_shards: Sequence[int], own_states: Sequence[int]
) -> tuple[
    Float[np.ndarray, "pipelines shards recomputes states"], Int[np.ndarray, "pipelines shards recomputes states"]
]:
    """Peak bytes, and the place in `CATEGORIES` of what takes most, for some shard and state choices."""
    offloads = np.array([grid.states[z].offload for z in own_states])
    zero = np.array([grid.states[z].zero for z in own_states])
    shape = len(grid.pipelines), len(own_shards), len(grid.recomputes), len(own_states)
    peak, largest = np.empty(shape), np.empty(shape, np.int8)
    for offload in np.unique(offloads).tolist():
        chosen = offloads == offload
        memory = _memory(model, grid, own_shards, zero[chosen], offload)
        peak[..., chosen], largest[..., chosen] = memory.peak, memory.largest
    return peak, largest


def _memory(
    model: GridModel, grid: LayoutGrid, own_shards: Sequence[int], zero: Int[np.ndarray, " states"], offload: bool
) -> MemoryBatch:
    """Axes: pipelines, shards, recomputes, states, ranks."""
    fixed, lay = model.fixed, grid.degrees
    drafts = [model.drafts(grid)[s] for s in own_shards]
    saved = np.stack([draft.activation_bytes for draft in drafts])
    mode = [RECOMPUTE_MODES.index(choice.recompute) for choice in grid.recomputes]
    full = model.full_places(grid)
    kept = saved[:, :, mode].transpose(0, 2, 1)
    dropped = saved[:, None, :, 0] - kept
    dropped_full = saved[:, None, :, 0] - saved[:, None, :, -1]
    workspace = np.stack([draft.workspace_bytes for draft in drafts])
    if fixed.job.mode != "train":
        workspace = workspace + saved[:, :, 0]
    dense, expert = drafts[0].dense_params(lay.pp > 1), drafts[0].expert_params
    terms = [model.terms(grid, choice, offload) for choice in grid.pipelines]
    ranks = Ranks.of(terms)
    gathered = gathered_params(dense + expert, drafts[0].layers, ranks.held)
    alive = np.einsum("prb,scb->pscr", ranks.alive, kept)
    alive = alive - np.einsum("pcrb,scb->pscr", ranks.alive_full[:, full], kept - saved[:, None, :, -1])
    own = np.where((ranks.held > 0)[:, None, None], (dropped + workspace[:, None])[None, :, :, None], 0.0)
    again = ranks.recomputes[:, None, full]
    in_full = np.where(again, (dropped_full + workspace[:, None])[None, :, :, None], 0.0)
    transient = np.maximum(own, in_full).max(axis=-1)
    dummy = np.array([dummy_gradient_bytes(draft, fixed.job, fixed.framework) for draft in drafts])[:, None, None]
    return rank_memory(
        dense=(ranks.held @ dense)[:, None, None, None],
        expert=(ranks.held @ expert)[:, None, None, None],
        shards=np.array(lay.dp * lay.cp),
        expert_shards=np.array(lay.dp * lay.cp // lay.ep),
        zero=zero[:, None],
        versions=ranks.versions[:, None, None, None],
        activations=alive[:, :, :, None],
        transient=(transient + dummy)[:, :, :, None],
        gathered=gathered[:, None, None, None],
        job=fixed.job,
        framework=fixed.framework,
    )
