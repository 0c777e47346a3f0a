"""Memory of grids of layouts, and a step time that no order of events can beat: priced without any program."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._grid_model import GridModel, distinct
from perfmodel.prediction._grid_pipelines import PipelineBlocks, longest_path_s
from perfmodel.prediction._grid_states import StateSeconds
from perfmodel.prediction._memory import CATEGORIES, BlockBytes, Sharding, rank_memory
from perfmodel.prediction._phases import PASSED, PLAIN, Phase, full_recompute_s, modes_of, recompute_s
from perfmodel.prediction._price import block_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._step_costs import step_factors
from perfmodel.program import COMBINED, PAIRED
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout


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
    for variant in map(tuple, pipeline.variants.tolist()):
        own = tables
        if variant != PLAIN or slices > 1:
            own = model.times(grid, variant, slices)
        phase_s.append(np.stack([t.paired.phase_s if variant[2] == PAIRED else t.phase_s for t in own], axis=-1))
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
    """A step time that the layout does not beat (float32); infinite where no layout of the grid fits."""
    left_out: Int[np.ndarray, " categories"]
    """Layouts of the grid as it was given, with choices of which none fits, by what takes most of their memory."""

    def spread(self, of_memory: np.ndarray) -> np.ndarray:
        """What is known by choices that differ in memory, for all layouts of the grid."""
        return of_memory[:, self.of_shard][..., self.of_state]

    def fits(self, usable_bytes: float) -> Bool[np.ndarray, "pipelines own_shards recomputes own_states"]:
        """Which choices that differ in memory are layouts that fit."""
        return self.grid.valid & (self.peak_bytes <= usable_bytes)

    @cached_property
    def alike(self) -> Int[np.ndarray, "1 own_shards 1 own_states"]:
        """Layouts that each choice stands for."""
        _, shards, _, states = self.peak_bytes.shape
        of_shard, of_state = np.bincount(self.of_shard, minlength=shards), np.bincount(self.of_state, minlength=states)
        return of_shard[None, :, None, None] * of_state

    def too_large(self, usable_bytes: float) -> Int[np.ndarray, " categories"]:
        """Layouts that do not fit, by what takes most of their memory."""
        over = self.grid.valid & (self.peak_bytes > usable_bytes)
        weights = np.broadcast_to(self.alike, over.shape)[over]
        return np.bincount(self.largest[over], weights, len(CATEGORIES)).astype(int)

    def fitting(self, usable_bytes: float) -> "GridCosts":
        """Without the choices of which no layout fits; as it is where none does at all. Before bounds are known."""
        fits = self.fits(usable_bytes)
        if not fits.any() or fits.all():
            return self
        axes = range(fits.ndim)
        pipelines, shards, recomputes, states = (
            np.asarray(fits.any(axis=tuple(other for other in axes if other != axis))) for axis in axes
        )
        chosen = [np.flatnonzero(of) for of in (pipelines, shards[self.of_shard], recomputes, states[self.of_state])]
        grid = self.grid.only(chosen)
        kept = replace(
            self,
            grid=grid,
            peak_bytes=self.peak_bytes[pipelines][:, :, recomputes],
            largest=self.largest[pipelines][:, :, recomputes],
            of_shard=self.of_shard[chosen[1]],
            of_state=self.of_state[chosen[3]],
            bound_s=_never(grid),
        )
        return replace(kept, left_out=self.too_large(usable_bytes) - kept.too_large(usable_bytes))


def lower_bounds_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """A step time that each layout does not beat, whatever the order of its events.

    Raises:
        LayoutError: layouts of uneven stages.
    """
    return np.array([cost.bound_s.item() for cost in price_grids(problem, [*map(LayoutGrid.of, layouts)])])


def price_grids(problem: StepProblem, grids: Sequence[LayoutGrid], usable_bytes: float = np.inf) -> Iterator[GridCosts]:
    """Costs of every grid, in order; the events of all of them are timed in one call.

    Memory needs no times: choices of which no layout fits into `usable_bytes` are left out of their grids untimed.
    """
    full_layers = dict.fromkeys(choice.recompute_full_layers for grid in grids for choice in grid.recomputes)
    model = GridModel(problem, list(full_layers))
    try:
        found = [_memory(model, grid).fitting(usable_bytes) for grid in grids]
        fits = [bool((one.peak_bytes <= usable_bytes).any()) for one in found]
        model.time_events([one.grid for one, possible in zip(found, fits, strict=True) if possible])
        for one, possible in zip(found, fits, strict=True):
            yield replace(one, bound_s=grid_bound_s(model, one.grid)) if possible else one
    finally:
        model.pipelines.save()


def _memory(model: GridModel, grid: LayoutGrid) -> GridCosts:
    """What is known of a grid without any times."""
    own_shards, of_shard = distinct([shard.sequence_parallel for shard in grid.shards])
    own_states, of_state = distinct([(state.zero, state.offload, state.offload_layers) for state in grid.states])
    peak, largest = grid_memory(model, grid, own_shards, own_states)
    return GridCosts(grid, peak, largest, of_shard, of_state, _never(grid), np.zeros(len(CATEGORIES), int))


def _never(grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    return np.broadcast_to(np.float32(np.inf), grid.shape)


def grid_memory(
    model: GridModel, grid: LayoutGrid, own_shards: Sequence[int], own_states: Sequence[int]
) -> tuple[
    Float[np.ndarray, "pipelines shards recomputes states"], Int[np.ndarray, "pipelines shards recomputes states"]
]:
    """Peak bytes, and the place in `CATEGORIES` of what takes most, for some shard and state choices."""
    setting, layout = model.problem.setting, grid.degrees
    states = [grid.states[z] for z in own_states]
    chosen = [layout.replace(zero=state.zero, offload_layers=state.offload_layers) for state in states]
    of_shards = [model.blocks(grid)[s] for s in own_shards]
    modes = modes_of([choice.recompute for choice in grid.recomputes])[None, :, None]
    blocks = BlockBytes.of(of_shards, modes, layout.pp > 1, setting.job, setting.framework)
    offloads = np.array([state.offload for state in states])
    shape = len(grid.pipelines), len(own_shards), len(grid.recomputes), len(own_states)
    peak, largest = np.empty(shape), np.empty(shape, np.int8)
    for offload in np.unique(offloads).tolist():
        alike = Sharding.of([chosen[i] for i in np.flatnonzero(offloads == offload).tolist()])
        memory = rank_memory(model.ranks(grid, offload), blocks, alike, setting)
        peak[..., offloads == offload], largest[..., offloads == offload] = memory.peak, memory.largest
    return peak, largest


def pass_work_s(problem: StepProblem, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes"]:
    """Seconds that the passes of a step keep a rank's compute stream busy at least, mean over pipeline ranks.

    All blocks' phases times the micro-batches, over the ranks: what layers recompute beside the mode, the optimizer
    and completed transfers come on top. 0 for schedules whose passes may overlap, or join or slice micro-batches.
    """
    layouts = [grid.degrees.replace(**shard._asdict()) for shard in grid.shards]
    training = problem.job.mode == "train"
    phases = PASSED if training else [Phase.FORWARD]
    shortest = (1, 0, COMBINED)  # no plain pass runs faster
    by_phase_s = np.array(
        [np.array(t.repeats) @ t.phase_s for t in (block_times(problem, lay, shortest) for lay in layouts)]
    )
    work_s = np.repeat(by_phase_s[:, phases].sum(axis=1)[:, None], len(grid.recomputes), axis=1)
    if training:
        work_s += recompute_s(by_phase_s[:, None], modes_of([choice.recompute for choice in grid.recomputes]))
    plain = np.array([get_schedule(choice.schedule).plain for choice in grid.pipelines], float)
    per_rank = problem.job.num_microbatches(grid.degrees) / grid.degrees.pp
    return plain[:, None, None] * work_s * per_rank * np.prod(step_factors(problem, grid.degrees))
