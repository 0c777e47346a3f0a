"""A step time that no order of events can beat, for whole grids of layouts."""

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import RECOMPUTE, BlockTable, Phase
from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_model import GridModel
from perfmodel.prediction._grid_pipelines import PipelineTerms, longest_path_s
from perfmodel.prediction._grid_states import StateTerms
from perfmodel.prediction._variants import PLAIN

_PASSES = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]


def grid_bound_s(model: GridModel, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    """The longest of some paths that every program of a layout contains: through the passes, with what must
    come before and after them, or along a communication stream."""
    terms = [model.terms(grid, choice) for choice in grid.pipelines]
    shapes, of_pipeline = model.shapes(grid)
    tables = model.tables(grid)
    send_s = [model.send_s(grid, shape) for shape in shapes]
    passes_s = np.stack([_longest(model, grid, t, tables, send_s[n]) for t, n in zip(terms, of_pipeline, strict=True)])
    states, of_shard = _states(model, grid)
    # axes: pipelines, shards, states
    start_s, end_s, gather_each_s, reduce_each_s, stream_s, stream_each_s = (
        values[of_shard][:, of_pipeline].transpose(1, 0, 2) for values in states
    )
    micro_batches = np.array([t.spec.micro_batches // t.spec.replicas for t in terms])[:, None, None]
    reductions = np.array([t.reductions for t in terms])[:, None, None]
    beside_s = start_s + end_s + micro_batches * gather_each_s + reductions * reduce_each_s
    stream_s = stream_s + micro_batches * stream_each_s
    for p, t in enumerate(terms):
        if t.spec.steps > 1:
            stream_s[p] -= _slack(t, tables, send_s[of_pipeline[p]])[:, None] + stream_each_s[p]
    scale = np.prod(model.fixed.step_factors(grid.degrees))
    passes_s, beside_s, stream_s = ((part * scale).astype(np.float32) for part in (passes_s, beside_s, stream_s))
    bound_s = passes_s[..., None] + beside_s[:, :, None]
    return np.maximum(bound_s, stream_s[:, :, None], out=bound_s)


def _longest(
    model: GridModel,
    grid: LayoutGrid,
    terms: PipelineTerms,
    tables: list[BlockTable],
    send_s: Float[np.ndarray, "2 stages shards"],
) -> Float[np.ndarray, "shards recomputes"]:
    phase_s = []
    slices = terms.spec.scheduler.slices
    for span, index, paired in terms.variants.tolist():
        own = tables
        if (span, index) != PLAIN[:2] or slices > 1:
            own = [model.fixed.variant_table(lay, (span, index, bool(paired)), slices) for lay in model.shards(grid)]
        phase_s.append(np.stack([t.overlapped_phase_s if paired else t.phase_s for t in own], axis=-1))
    phases = np.stack(phase_s)
    again_s = np.stack(
        [
            phases[:, :, RECOMPUTE[choice.recompute]] if choice.recompute in RECOMPUTE else 0 * phases[:, :, 0]
            for choice in grid.recomputes
        ]
    )
    in_full = np.array([choice.recompute_full_layers is not None for choice in grid.recomputes])
    full_s = np.where(in_full[:, None, None, None], phases[:, :, Phase.RECOMPUTE_FULL] - again_s, 0.0)
    return longest_path_s(terms, phases[:, :, _PASSES], again_s, full_s, model.full_places(grid), send_s)


def _states(model: GridModel, grid: LayoutGrid) -> tuple[tuple[np.ndarray, ...], Int[np.ndarray, " shards"]]:
    """Arrays of `StateTerms`, stacked over the orders of dimensions; and the order of each shard choice."""
    found = model.state_terms(grid)
    names = StateTerms.__dataclass_fields__
    return tuple(np.stack([getattr(terms, name) for terms in found]) for name in names), model.orders(grid)[1]


def _slack(
    terms: PipelineTerms, tables: list[BlockTable], send_s: Float[np.ndarray, "2 stages shards"]
) -> Float[np.ndarray, " shards"]:
    """By how much less than its busiest stream a step may take where steps run into each other.

    The makespan of a stream of steps then grows by that of the busiest stream, less what filling and draining
    the pipeline may hide: one micro-batch through all stages, over the steps of the shorter of the two streams
    whose difference is taken.
    """
    blocks = terms.blocks
    once = np.stack([blocks @ table.phase_s.sum(axis=1) for table in tables], axis=-1)
    return (once + send_s.sum(axis=(0, 1))) / (terms.spec.steps // 2)
