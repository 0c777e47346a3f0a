"""Memory and lower bounds of the step time for grids of layouts, without building programs.

Arrays have an axis for each kind of choice: pipelines, shards, recomputes, states. A grid of a
million layouts is a few hundred numbers per axis, broadcast against each other.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._memory import CATEGORIES, rank_memory
from perfmodel.prediction._memory_inputs import Sharding
from perfmodel.prediction._price import PriceTable, price_table
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._step_costs import step_factors
from perfmodel.prediction.blocks import BlockTimes
from perfmodel.prediction.grids._grid import LayoutGrid
from perfmodel.prediction.grids._grid_model import GridModel, distinct, model_of_grids
from perfmodel.prediction.grids._grid_pipelines import PipelineBlocks, longest_path_s
from perfmodel.prediction.phases import (
    PASSED,
    Phase,
    Variant,
    full_recompute_s,
    modes_of,
    recompute_s,
)
from perfmodel.program import COMBINED, PAIRED
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout


def grid_bound_s(
    model: GridModel, grid: LayoutGrid, table: PriceTable
) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    """Lower bound of the step time: the longest of some paths that every program contains.

    One goes through the passes, with all work that must come before and after them; the other along
    a communication stream.

    Args:
        table: prices of events; those that it lacks are priced when they are asked for.
    """
    # Passes and transfers depend on pipeline, shard and recompute.
    pipelines = model.pipelines_of(grid)
    shapes, shape_of_pipeline = model.shapes(grid)
    block_times_of_shards = model.times(grid, table)
    send_s_of_shapes = [model.send_s(grid, shape, table) for shape in shapes]
    send_s = [send_s_of_shapes[shape] for shape in shape_of_pipeline]

    passes_s = _passes_s(model, grid, send_s, table)

    # The cost of states depends on the order of a shard's dimensions and on the shape of the
    # pipeline.
    by_order = model.state_seconds(grid, table)
    order_of_shard = model.orders(grid)[1]

    def state_s(name: str) -> Float[np.ndarray, "pipelines shards states"]:
        seconds_of_orders = np.stack([getattr(seconds, name) for seconds in by_order])
        return seconds_of_orders[order_of_shard][:, shape_of_pipeline].transpose(1, 0, 2)

    # Before, after and between the passes; work between them counts once for every micro-batch of a
    # stage.
    micro_batches = np.array([p.spec.micro_batches // p.spec.replicas for p in pipelines])[
        :, None, None
    ]
    reductions = np.array([p.reductions for p in pipelines])[:, None, None]
    step_ends_s = state_s("start_s") + state_s("end_s")
    step_ends_s = (
        step_ends_s
        + micro_batches * state_s("gather_each_s")
        + reductions * state_s("reduce_each_s")
    )

    # Along a communication stream, without regard to the passes. Where steps run into each other
    # some of it is hidden by filling and draining the pipeline.
    stream_each_s = state_s("stream_each_s")
    stream_s = state_s("stream_s") + micro_batches * stream_each_s
    for place, pipeline in enumerate(pipelines):
        if pipeline.spec.steps > 1:
            slack_s = _slack_s(pipeline, block_times_of_shards, send_s[place])
            stream_s[place] -= slack_s[:, None] + stream_each_s[place]

    # In single precision before the axes are joined: the product of all choices is the only large
    # array.
    scale = np.prod(step_factors(model.problem, grid.degrees))
    passes_s = (passes_s * scale).astype(np.float32)
    step_ends_s = (step_ends_s * scale).astype(np.float32)
    stream_s = (stream_s * scale).astype(np.float32)
    bound_s = passes_s[..., None] + step_ends_s[:, :, None]
    return np.maximum(bound_s, stream_s[:, :, None], out=bound_s)


def _passes_s(
    model: GridModel,
    grid: LayoutGrid,
    send_s: Sequence[Float[np.ndarray, "2 stages shards"]],
    table: PriceTable,
) -> Float[np.ndarray, "pipelines shards recomputes"]:
    """Seconds of the longest path through the passes of every pipeline, from those of its
    transfers."""
    full = model.full_places(grid)
    # Pipelines with the same variants of passes have the same seconds by block.
    seconds_of_variants: dict[Hashable, PassSeconds] = {}
    longest_s = []
    for pipeline, sends in zip(model.pipelines_of(grid), send_s, strict=True):
        key = (pipeline.spec.scheduler.slices, pipeline.variants.tobytes())
        if key not in seconds_of_variants:
            seconds_of_variants[key] = _pass_seconds(model, grid, pipeline, table)
        longest_s.append(longest_path_s(pipeline, *seconds_of_variants[key], full, sends))
    return np.stack(longest_s)


class PassSeconds(NamedTuple):
    """Seconds of passes through each block, by variant."""

    phase_s: Float[np.ndarray, "variants blocks 3 shards"]
    """Forward, input gradient and weight gradient."""
    again_s: Float[np.ndarray, "recomputes variants blocks shards"]
    """Seconds that recomputing adds to a backward pass."""
    full_s: Float[np.ndarray, "recomputes variants blocks shards"]
    """Additional seconds of blocks that are recomputed in full."""


def _pass_seconds(
    model: GridModel, grid: LayoutGrid, pipeline: PipelineBlocks, table: PriceTable
) -> PassSeconds:
    """Seconds of a pipeline's passes through each block, under each recompute choice."""
    slices = pipeline.spec.scheduler.slices
    seconds_of_variants = []
    for row in pipeline.variants.tolist():
        variant = Variant(*row)
        times = model.times(grid, table, variant, slices)
        paired = variant.beside == PAIRED
        seconds_of_variants.append(
            np.stack([t.paired.phase_s if paired else t.phase_s for t in times], axis=-1)
        )
    phase_s = np.stack(seconds_of_variants)  # variants, blocks, phases, shards

    # Recomputation is a function of the phases, which it takes as the last axis.
    by_phase_s = np.moveaxis(phase_s, 2, -1)[None]
    modes = modes_of([choice.recompute for choice in grid.recomputes])[:, None, None, None]
    recomputes_layers = np.array(
        [choice.recompute_full_layers is not None for choice in grid.recomputes]
    )
    full_s = np.where(
        recomputes_layers[:, None, None, None], full_recompute_s(by_phase_s, modes), 0.0
    )
    return PassSeconds(phase_s[:, :, PASSED], recompute_s(by_phase_s, modes), full_s)


def _slack_s(
    pipeline: PipelineBlocks,
    times: Sequence[BlockTimes],
    send_s: Float[np.ndarray, "2 stages shards"],
) -> Float[np.ndarray, " shards"]:
    """Seconds by which a step may be shorter than its busiest stream, where steps overlap."""
    # The makespan of a stream of steps grows by that of the busiest stream, less what filling and
    # draining the pipeline may hide: one micro-batch through all stages, over the steps of the
    # shorter of the two streams whose difference is taken.
    micro_batch_s = np.stack(
        [pipeline.blocks @ of_shard.phase_s.sum(axis=1) for of_shard in times], axis=-1
    )
    return (micro_batch_s + send_s.sum(axis=(0, 1))) / (pipeline.spec.steps // 2)


@dataclass(frozen=True, eq=False)
class GridCosts:
    """Memory and lower bounds of the step time of a grid's layouts."""

    grid: LayoutGrid
    """Layouts that the costs are for."""
    peak_bytes: Float[np.ndarray, "pipelines distinct_shards recomputes distinct_states"]
    """Memory of the fullest rank, exact, for choices that differ in it."""
    largest: Int[np.ndarray, "pipelines distinct_shards recomputes distinct_states"]
    """Largest category of that memory (index in `CATEGORIES`)."""
    of_shard: Int[np.ndarray, " shards"]
    """For each shard choice, its row in the tables of choices that differ in memory."""
    of_state: Int[np.ndarray, " states"]
    """For each state choice, its row in the tables of choices that differ in memory."""
    bound_s: Float[np.ndarray, "pipelines shards recomputes states"]
    """Lower bound of each layout's step time (float32); infinite if no layout of the grid fits."""
    left_out: Int[np.ndarray, " categories"]
    """Layouts of the original grid whose choices never fit, by the largest part of their memory."""

    def spread(self, of_memory: np.ndarray) -> np.ndarray:
        """Repeat values that depend on memory choices alone for all layouts of the grid."""
        return of_memory[:, self.of_shard][..., self.of_state]

    def fits(
        self, usable_bytes: float
    ) -> Bool[np.ndarray, "pipelines distinct_shards recomputes distinct_states"]:
        """Return which of the choices that differ in memory fit."""
        return self.grid.valid & (self.peak_bytes <= usable_bytes)

    @cached_property
    def multiplicity(self) -> Int[np.ndarray, "1 distinct_shards 1 distinct_states"]:
        """Number of layouts that share each combination of choices."""
        _, shards, _, states = self.peak_bytes.shape
        shard_choices = np.bincount(self.of_shard, minlength=shards)
        state_choices = np.bincount(self.of_state, minlength=states)
        return shard_choices[None, :, None, None] * state_choices

    def too_large(self, usable_bytes: float) -> Int[np.ndarray, " categories"]:
        """Number of layouts that do not fit, by their largest memory category."""
        over_capacity = self.grid.valid & (self.peak_bytes > usable_bytes)
        weights = np.broadcast_to(self.multiplicity, over_capacity.shape)[over_capacity]
        return np.bincount(self.largest[over_capacity], weights, len(CATEGORIES)).astype(int)

    def fitting(self, usable_bytes: float) -> "GridCosts":
        """Drop the choices with which no layout fits; if no layout fits at all, keep all of them.

        Called before bounds are known.
        """
        fits = self.fits(usable_bytes)
        if not fits.any() or fits.all():
            return self
        # A choice stays where any layout with it fits. Costs are kept once for shards and for
        # states that do not differ in them, so that the places of these are looked up.
        pipelines, shards, recomputes, states = (
            _fits_along(fits, axis) for axis in range(fits.ndim)
        )
        chosen_shards = np.flatnonzero(shards[self.of_shard])
        chosen_states = np.flatnonzero(states[self.of_state])
        grid = self.grid.only(
            [np.flatnonzero(pipelines), chosen_shards, np.flatnonzero(recomputes), chosen_states]
        )
        remaining = replace(
            self,
            grid=grid,
            peak_bytes=self.peak_bytes[pipelines][:, :, recomputes],
            largest=self.largest[pipelines][:, :, recomputes],
            of_shard=self.of_shard[chosen_shards],
            of_state=self.of_state[chosen_states],
            bound_s=_no_bound(grid),
        )
        return replace(
            remaining, left_out=self.too_large(usable_bytes) - remaining.too_large(usable_bytes)
        )


def _fits_along(fits: Bool[np.ndarray, "..."], axis: int) -> Bool[np.ndarray, " choices"]:
    """Whether any layout with each choice of an axis fits."""
    remaining_axes = tuple(i for i in range(fits.ndim) if i != axis)
    return np.asarray(fits.any(axis=remaining_axes))


def lower_bounds_s(
    problem: StepProblem, layouts: Sequence[Layout]
) -> Float[np.ndarray, " layouts"]:
    """Lower bound of each layout's step time for any order of events.

    Raises:
        LayoutError: layouts of uneven stages.
    """
    return np.array(
        [cost.bound_s.item() for cost in price_grids(problem, [*map(LayoutGrid.of, layouts)])]
    )


def price_grids(
    problem: StepProblem, grids: Sequence[LayoutGrid], usable_bytes: float = np.inf
) -> Iterator[GridCosts]:
    """Costs of every grid, in order; the events of all of them are priced in one batch.

    Memory needs no times: choices of which no layout fits into `usable_bytes` are left out of their
    grids untimed.
    """
    model = model_of_grids(problem, grids)
    try:
        costs_before_bounds = [_memory_costs(model, grid).fitting(usable_bytes) for grid in grids]
        some_fit = [bool((costs.peak_bytes <= usable_bytes).any()) for costs in costs_before_bounds]

        fitting = [
            costs.grid for costs, fits in zip(costs_before_bounds, some_fit, strict=True) if fits
        ]
        table = price_table(problem, model.events_of(fitting))
        for costs, fits in zip(costs_before_bounds, some_fit, strict=True):
            if fits:
                trained_s = np.maximum(grid_bound_s(model, costs.grid, table), problem.job.input_s)
                yield replace(costs, bound_s=trained_s + problem.job.generation_s)
            else:
                yield costs
    finally:
        model.pipelines.save()


def _memory_costs(model: GridModel, grid: LayoutGrid) -> GridCosts:
    """The costs of a grid without its bounds, which need times."""
    # Other choices of shards (overlap, order of dimensions) and of states (overlap) take no memory,
    # except for weights that ZeRO 3 gathers ahead.
    shards, of_shard = distinct([choice.sequence_parallel for choice in grid.shards])
    memory_of_states = []
    for choice in grid.states:
        gathers_ahead = choice.zero == 3 and choice.overlap_param_gather
        memory_of_states.append((choice.zero, gathers_ahead, choice.offload, choice.offload_layers))
    states, of_state = distinct(memory_of_states)
    peak_bytes, largest = grid_memory(model, grid, shards, states)
    none_left_out = np.zeros(len(CATEGORIES), int)
    return GridCosts(grid, peak_bytes, largest, of_shard, of_state, _no_bound(grid), none_left_out)


def _no_bound(grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    """Infinite bounds, of layouts that cannot run."""
    return np.broadcast_to(np.float32(np.inf), grid.shape)


def grid_memory(
    model: GridModel, grid: LayoutGrid, shard_places: Sequence[int], state_places: Sequence[int]
) -> tuple[
    Float[np.ndarray, "pipelines shards recomputes states"],
    Int[np.ndarray, "pipelines shards recomputes states"],
]:
    """Peak bytes and the largest category (index in `CATEGORIES`), for some shard and state
    choices."""
    setting = model.problem.setting
    block_bytes = model.block_bytes(grid, shard_places)
    states = [grid.states[place] for place in state_places]
    layouts = []
    for state in states:
        layout = grid.degrees.replace(
            zero=state.zero,
            offload_layers=state.offload_layers,
            overlap_param_gather=state.overlap_param_gather,
        )
        layouts.append(layout)

    # Schedules keep other activations alive where some are offloaded, so these have ranks of their
    # own.
    offloads = np.array([state.offload for state in states])
    shape = (len(grid.pipelines), len(shard_places), len(grid.recomputes), len(state_places))
    peak_bytes = np.empty(shape)
    largest = np.empty(shape, np.int8)
    for offload in np.unique(offloads).tolist():
        places = np.flatnonzero(offloads == offload)
        sharding = Sharding.of([layouts[place] for place in places.tolist()], setting.job)
        memory = rank_memory(model.ranks(grid, offload), block_bytes, sharding, setting)
        peak_bytes[..., places] = memory.peak
        largest[..., places] = memory.largest
    return peak_bytes, largest


def pass_work_s(
    problem: StepProblem, grid: LayoutGrid
) -> Float[np.ndarray, "pipelines shards recomputes"]:
    """Least seconds that the passes of a step keep a rank's compute stream busy, mean over pipeline
    ranks.

    0 for schedules whose passes may overlap, or join or slice micro-batches.
    """
    # All blocks' phases times the micro-batches, over the ranks: what layers recompute beside the
    # mode, the optimizer and completed transfers come on top.
    layouts = [grid.degrees.replace(**shard._asdict()) for shard in grid.shards]
    training = problem.job.mode == "train"
    phases = PASSED if training else [Phase.FORWARD]
    # No plain pass runs faster than one beside which experts are exchanged.
    shortest = Variant(beside=COMBINED)
    phase_s_of_shards = []
    for layout in layouts:
        times = block_times(problem, layout, shortest)
        phase_s_of_shards.append(np.array(times.repeats) @ times.phase_s)
    by_phase_s = np.array(phase_s_of_shards)
    work_s = np.repeat(by_phase_s[:, phases].sum(axis=1)[:, None], len(grid.recomputes), axis=1)
    if training:
        work_s += recompute_s(
            by_phase_s[:, None], modes_of([choice.recompute for choice in grid.recomputes])
        )
    is_plain = np.array([get_schedule(schedule).plain for schedule in grid.schedules], float)
    per_rank = problem.job.num_microbatches(grid.degrees) / grid.degrees.pp
    return (
        is_plain[:, None, None] * work_s * per_rank * np.prod(step_factors(problem, grid.degrees))
    )
