"""A step time that no order of events can beat, for whole grids of layouts."""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_model import GridModel
from perfmodel.prediction._grid_pipelines import PipelineBlocks, longest_path_s
from perfmodel.prediction._grid_states import StateSeconds
from perfmodel.prediction._phases import PASSED, PLAIN, full_recompute_s, modes_of, recompute_s
from perfmodel.prediction._step_costs import step_factors


def grid_bound_s(model: GridModel, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    """The longest of some paths that every program of a layout contains: through the passes, with what must
    come before and after them, or along a communication stream."""
    pipelines = model.pipelines_of(grid)
    shapes, of_pipeline = model.shapes(grid)
    tables = model.times(grid)
    send_s = [model.send_s(grid, shape) for shape in shapes]
    of_variants: dict[Hashable, PassSeconds] = {}
    for t in pipelines:
        if _variants_of(t) not in of_variants:
            of_variants[_variants_of(t)] = _pass_seconds(model, grid, t, tables)
    full = model.full_places(grid)
    passes_s = np.stack(
        [
            longest_path_s(t, *of_variants[_variants_of(t)], full, send_s[n])
            for t, n in zip(pipelines, of_pipeline, strict=True)
        ]
    )
    states, of_shard = _states(model, grid)
    # axes: pipelines, shards, states
    start_s, end_s, gather_each_s, reduce_each_s, stream_s, stream_each_s = (
        values[of_shard][:, of_pipeline].transpose(1, 0, 2) for values in states
    )
    micro_batches = np.array([t.spec.micro_batches // t.spec.replicas for t in pipelines])[:, None, None]
    reductions = np.array([t.reductions for t in pipelines])[:, None, None]
    beside_s = start_s + end_s + micro_batches * gather_each_s + reductions * reduce_each_s
    stream_s = stream_s + micro_batches * stream_each_s
    for p, t in enumerate(pipelines):
        if t.spec.steps > 1:
            stream_s[p] -= _slack(t, tables, send_s[of_pipeline[p]])[:, None] + stream_each_s[p]
    scale = np.prod(step_factors(model.problem, grid.degrees))
    passes_s, beside_s, stream_s = ((part * scale).astype(np.float32) for part in (passes_s, beside_s, stream_s))
    bound_s = passes_s[..., None] + beside_s[:, :, None]
    return np.maximum(bound_s, stream_s[:, :, None], out=bound_s)


class PassSeconds(NamedTuple):
    """Seconds of passes through each block, by variant."""

    phase_s: Float[np.ndarray, "variants blocks 3 shards"]
    again_s: Float[np.ndarray, "recomputes variants blocks shards"]
    """What recomputing adds to a backward pass."""
    full_s: Float[np.ndarray, "recomputes variants blocks shards"]
    """What blocks recomputed in full take beyond that."""


def _variants_of(pipeline: PipelineBlocks) -> tuple[int, bytes]:
    """What of a pipeline the seconds of its passes depend on."""
    return pipeline.spec.scheduler.slices, pipeline.variants.tobytes()


def _pass_seconds(
    model: GridModel, grid: LayoutGrid, pipeline: PipelineBlocks, tables: list[BlockTimes]
) -> PassSeconds:
    phase_s = []
    slices = pipeline.spec.scheduler.slices
    for span, index, paired in pipeline.variants.tolist():
        own = tables
        if (span, index) != PLAIN[:2] or slices > 1:
            own = model.times(grid, (span, index, bool(paired)), slices)
        phase_s.append(np.stack([t.overlapped_phase_s if paired else t.phase_s for t in own], axis=-1))
    phases = np.stack(phase_s)  # variants, blocks, phases, shards
    by_phase, modes = np.moveaxis(phases, 2, -1), modes_of([choice.recompute for choice in grid.recomputes])
    again_s = recompute_s(by_phase[None], modes[:, None, None, None])
    in_full = np.array([choice.recompute_full_layers is not None for choice in grid.recomputes])[:, None, None, None]
    full_s = np.where(in_full, full_recompute_s(by_phase[None], modes[:, None, None, None]), 0.0)
    return PassSeconds(phases[:, :, PASSED], again_s, full_s)


def _states(model: GridModel, grid: LayoutGrid) -> tuple[tuple[np.ndarray, ...], Int[np.ndarray, " shards"]]:
    """Arrays of `StateSeconds`, stacked over the orders of dimensions; and the order of each shard choice."""
    found = model.state_seconds(grid)
    names = StateSeconds.__dataclass_fields__
    return tuple(np.stack([getattr(seconds, name) for seconds in found]) for name in names), model.orders(grid)[1]


def _slack(
    pipeline: PipelineBlocks, tables: list[BlockTimes], send_s: Float[np.ndarray, "2 stages shards"]
) -> Float[np.ndarray, " shards"]:
    """By how much less than its busiest stream a step may take where steps run into each other.

    The makespan of a stream of steps then grows by that of the busiest stream, less what filling and draining
    the pipeline may hide: one micro-batch through all stages, over the steps of the shorter of the two streams
    whose difference is taken.
    """
    blocks = pipeline.blocks
    once = np.stack([blocks @ table.phase_s.sum(axis=1) for table in tables], axis=-1)
    return (once + send_s.sum(axis=(0, 1))) / (pipeline.spec.steps // 2)
