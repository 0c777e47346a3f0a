"""Parts that grids of layouts share: block times, pipelines, transfers and state events, each
computed once.

A search asks for a few hundred grids of one problem. Grids that differ in their degrees often have
the same pipelines, and all shards of a grid have the same state events but for the order of their
dimensions. Every quantity is therefore cached in a field of its own, keyed by exactly its inputs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._communication import Hops, Transfers, hops, transfers
from perfmodel.prediction._memory_inputs import BlockBytes, RankBlocks
from perfmodel.prediction._pipeline import PipelineCache
from perfmodel.prediction._price import PriceTable, priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import program_spec, segments_of
from perfmodel.prediction.blocks import BlockTimes, ShardBlocks, shard_events
from perfmodel.prediction.grids._grid import (
    LayoutGrid,
    PipelineChoice,
    RecomputeChoice,
    StateChoice,
)
from perfmodel.prediction.grids._grid_pipelines import PipelineBlocks, stacked_ranks
from perfmodel.prediction.grids._grid_states import StageShape, StateEvents, StateSeconds
from perfmodel.prediction.phases import PLAIN, Variant, modes_of
from perfmodel.prediction.placement import rank_strides
from perfmodel.program import ProgramSpec, fully_recomputed, stage_blocks
from perfmodel.schedule import get_schedule
from perfmodel.session import current_session
from perfmodel.spec import Layout, StateOffload
from perfmodel.spec.notation import PerStage
from perfmodel.workload import layer_count

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PipelineKey(NamedTuple):
    """The part of a grid's degrees that its pipelines, counted in blocks of the model, depend
    on."""

    pp: int
    """Number of pipeline ranks."""
    micro_batches: int
    """Micro-batches of a step."""
    combines_passes: bool
    """Whether a forward and a backward pass run as one, to hide the experts' exchanges."""
    repeats: tuple[int, ...]
    """How often the model has each of its blocks."""


class StageBlockCounts(NamedTuple):
    """Blocks of every stage of a pipeline."""

    counts: Float[np.ndarray, "stages blocks"]
    recomputed: Float[np.ndarray, "fulls stages blocks"]
    """Blocks that are recomputed in full, under each of `GridModel.full_layers`."""


class StageMapKey(NamedTuple):
    """The part of a pipeline that its exchanges of states depend on."""

    shape: tuple[int, ...]
    """Ranks and chunks."""
    stages: bytes
    """The stage of every rank's chunks."""
    runs_into_next_step: bool
    """Whether no flush separates steps."""
    plain: bool
    """Whether every pass is of one micro-batch and one direction."""


class StateKey(NamedTuple):
    """The part of a grid that its state events depend on."""

    degrees: tuple[int, ...]
    order: str
    replicate: int
    offload_states: StateOffload
    shapes: tuple[StageShape, ...]


class BlockTimesKey(NamedTuple):
    """The part of a shard and a pass that the times of its blocks depend on."""

    blocks: ShardBlocks
    tp_overlap: bool
    checks_numbers: bool
    """Whether hosts check collectives before they issue them."""
    variant: Variant
    slices: int


class BlockBytesKey(NamedTuple):
    """The part of a grid that the bytes of its blocks depend on."""

    blocks: tuple[ShardBlocks, ...]
    """Blocks of each shard choice."""
    recomputes: tuple[RecomputeChoice, ...]
    pipelined: bool
    """Whether pipelines have several stages."""


class SentBlocks(NamedTuple):
    """The part of a shard that its transfers depend on."""

    blocks: ShardBlocks
    stride: int
    """Ranks between neighbouring stages."""


@dataclass(eq=False)
class GridModel:
    """Parts of the costs of some grids of one problem."""

    problem: StepProblem
    """The training step and its machine."""
    full_layers: Sequence[PerStage]
    """Layers recomputed in full, as they occur in the grids' choices."""
    pipelines: PipelineCache = field(default_factory=PipelineCache)
    """Summaries of pipelines on disk."""

    _shards: dict[LayoutGrid, list[Layout]] = field(default_factory=dict)
    _blocks: dict[LayoutGrid, list[ShardBlocks]] = field(default_factory=dict)
    _slices: dict[tuple[ShardBlocks, int], list[ShardBlocks]] = field(default_factory=dict)
    _block_bytes: dict[BlockBytesKey, BlockBytes] = field(default_factory=dict)
    _pipeline: dict[tuple[PipelineKey, PipelineChoice, bool], PipelineBlocks] = field(
        default_factory=dict
    )
    _ranks: dict[tuple[PipelineKey, tuple[PipelineChoice, ...], bool, bytes], RankBlocks] = field(
        default_factory=dict
    )
    _counts: dict[tuple[int, tuple[int, ...]], StageBlockCounts] = field(default_factory=dict)
    _stage_shapes: dict[tuple[StageMapKey, tuple[int, ...]], StageShape] = field(
        default_factory=dict
    )
    _transfers: dict[tuple[ShardBlocks, float], Transfers] = field(default_factory=dict)
    _transfer_s: dict[Transfers, Float[np.ndarray, "..."]] = field(default_factory=dict)
    _hops: dict[tuple[StageShape, int], Hops] = field(default_factory=dict)
    _states: dict[StateKey, StateEvents] = field(default_factory=dict)
    _state_s: dict[tuple[StateEvents, tuple[StateChoice, ...]], StateSeconds] = field(
        default_factory=dict
    )
    _times: dict[BlockTimesKey, BlockTimes] = field(default_factory=dict)

    def events_of(self, grids: Sequence[LayoutGrid]) -> list[Op]:
        """Distinct events of the grids' blocks in plain passes, transfers and states."""
        events: dict[Op, None] = {}
        for grid in grids:
            for part in self._parts_with_events(grid):
                events |= dict.fromkeys(part.ops)
        return list(events)

    def _parts_with_events(self, grid: LayoutGrid) -> list[ShardBlocks | Transfers | StateEvents]:
        """Everything of a grid that has events to price."""
        layouts = self.shards(grid)
        blocks = self.blocks(grid)
        parts: list[ShardBlocks | Transfers | StateEvents] = [*blocks]
        parts += self.state_events(grid)
        # A transfer carries what a pass works on: a micro-batch, or a slice of one.
        for slices in {get_schedule(schedule).slices for schedule in grid.schedules}:
            for layout, of_shard in zip(layouts, blocks, strict=True):
                parts.append(self.transfers(layout, of_shard, 1 / slices))
                if slices > 1:
                    parts += self.slices(layout, of_shard, slices)
        # Shards that differ in an overlap alone have the same blocks and transfers.
        return list(dict.fromkeys(parts))

    def shards(self, grid: LayoutGrid) -> list[Layout]:
        """A layout for each shard choice."""

        def compute() -> list[Layout]:
            return [grid.degrees.replace(**choice._asdict()) for choice in grid.shards]

        return get_or_compute(self._shards, grid, compute)

    def blocks(self, grid: LayoutGrid) -> list[ShardBlocks]:
        """Blocks of each shard choice."""

        def compute() -> list[ShardBlocks]:
            return [shard_events(self.problem.setting, layout) for layout in self.shards(grid)]

        return get_or_compute(self._blocks, grid, compute)

    def slices(self, layout: Layout, blocks: ShardBlocks, slices: int) -> list[ShardBlocks]:
        """Blocks of each slice of the sequence, where a layout's passes compute one slice after
        another."""

        def compute() -> list[ShardBlocks]:
            return [
                shard_events(self.problem.setting, layout, slices, index) for index in range(slices)
            ]

        return get_or_compute(self._slices, (blocks, slices), compute)

    def block_bytes(self, grid: LayoutGrid, shard_places: Sequence[int]) -> BlockBytes:
        """Parameters and bytes of the blocks of some shard choices, under each recompute choice.

        Axes are those of grids without pipelines: shards, recomputes, and one for states.
        """
        blocks_of_shards = self.blocks(grid)
        key = BlockBytesKey(
            tuple(blocks_of_shards[place] for place in shard_places),
            grid.recomputes,
            grid.degrees.pp > 1,
        )

        def compute() -> BlockBytes:
            modes = modes_of([choice.recompute for choice in grid.recomputes])[None, :, None]
            setting = self.problem.setting
            return BlockBytes.of(key.blocks, modes, key.pipelined, setting.job, setting.framework)

        return get_or_compute(self._block_bytes, key, compute)

    def orders(self, grid: LayoutGrid) -> tuple[list[Layout], Int[np.ndarray, " shards"]]:
        """A layout for each order of dimensions, and the index of each shard choice's order."""
        layouts = self.shards(grid)
        first, order_of_shard = distinct([layout.order for layout in layouts])
        return [layouts[shard] for shard in first], order_of_shard

    def pipelines_of(self, grid: LayoutGrid, offload: bool = False) -> list[PipelineBlocks]:
        """The pipeline of each choice with the model's blocks."""
        key = self._pipeline_key(grid)
        pipelines = []
        for choice in grid.pipelines:
            compute = partial(self._pipeline_of, grid, choice, offload)
            pipelines.append(get_or_compute(self._pipeline, (key, choice, offload), compute))
        return pipelines

    def _pipeline_key(self, grid: LayoutGrid) -> PipelineKey:
        """The part of a grid's degrees and blocks that its pipelines depend on."""
        layout = grid.degrees
        micro_batches = self.problem.job.num_microbatches(layout)
        return PipelineKey(
            layout.pp,
            micro_batches,
            layout.overlap.ep_overlap and layout.ep > 1,
            self.blocks(grid)[0].repeats,
        )

    def _pipeline_of(
        self, grid: LayoutGrid, choice: PipelineChoice, offload: bool
    ) -> PipelineBlocks:
        """The pipeline of a grid under one choice of schedule and chunks."""
        blocks = self.blocks(grid)[0]
        layout = grid.degrees.replace(schedule=choice.schedule, vpp=choice.vpp, offload=offload)
        spec = program_spec(self.problem.setting, layout, layer_count(blocks.pairs))
        by_stage = self._stage_block_counts(blocks, spec.n_stages)
        pipeline = self.pipelines.get(spec, by_stage.counts, blocks.layers, blocks.kinds)
        slots_per_stage = self.problem.framework.memory.slots_per_stage
        return PipelineBlocks(spec, pipeline, by_stage.counts, by_stage.recomputed, slots_per_stage)

    def _stage_block_counts(self, blocks: ShardBlocks, n_stages: int) -> StageBlockCounts:
        """Blocks of every stage, and those that each recompute choice repeats in full (cached)."""

        def compute() -> StageBlockCounts:
            counts = stage_blocks(blocks.kinds, n_stages, 1).sum(axis=1)
            recomputed = [
                fully_recomputed(counts, blocks.layers, layers) for layers in self.full_layers
            ]
            return StageBlockCounts(counts, np.stack(recomputed))

        return get_or_compute(self._counts, (n_stages, blocks.repeats), compute)

    def ranks(self, grid: LayoutGrid, offload: bool) -> RankBlocks:
        """The fullest ranks of all pipelines under each recompute choice (`stacked_ranks`)."""
        full = self.full_places(grid)

        def compute() -> RankBlocks:
            return stacked_ranks(
                [pipeline.ranks for pipeline in self.pipelines_of(grid, offload)], full
            )

        key = (self._pipeline_key(grid), grid.pipelines, offload, full.tobytes())
        return get_or_compute(self._ranks, key, compute)

    def full_places(self, grid: LayoutGrid) -> Int[np.ndarray, " recomputes"]:
        """Place in `full_layers` of each recompute choice."""
        return np.array(
            [self.full_layers.index(choice.recompute_full_layers) for choice in grid.recomputes]
        )

    def shapes(self, grid: LayoutGrid) -> tuple[list[StageShape], Int[np.ndarray, " pipelines"]]:
        """Shapes of the grid's pipelines (the stages that their ranks hold), and the index of each
        pipeline's shape."""
        specs = [pipeline.spec for pipeline in self.pipelines_of(grid)]
        keys = [
            StageMapKey(
                spec.stage_map.shape, spec.stage_map.tobytes(), spec.steps > 1, spec.scheduler.plain
            )
            for spec in specs
        ]
        blocks = self.blocks(grid)[0]

        def compute(spec: ProgramSpec) -> StageShape:
            segments = segments_of(layer_count(blocks.pairs), spec.n_stages)
            return StageShape(spec, stage_blocks(blocks.kinds, spec.n_stages, segments))

        # Pipelines differ in many fields, but few of them decide which stages a rank holds.
        first, shape_of_pipeline = distinct(keys)
        shapes = []
        for place in first:
            key = (keys[place], blocks.repeats)
            shapes.append(get_or_compute(self._stage_shapes, key, partial(compute, specs[place])))
        return shapes, shape_of_pipeline

    def transfers(self, layout: Layout, blocks: ShardBlocks, share: float) -> Transfers:
        """Transfers of a shard that carry `share` of a micro-batch."""
        compute = partial(
            transfers, layout, blocks.blocks, share, self.problem.job, self.problem.cluster
        )
        return get_or_compute(self._transfers, (blocks, share), compute)

    def send_s(
        self, grid: LayoutGrid, shape: StageShape, table: PriceTable
    ) -> Float[np.ndarray, "2 stages shards"]:
        """Seconds of the transfers out of every stage, forwards and backwards."""
        spec = shape.spec
        if spec.n_stages == 1:
            return np.zeros((2, 1, len(grid.shards)))
        layouts = self.shards(grid)
        blocks = self.blocks(grid)

        # A transfer depends on the bytes that a shard's blocks send and on the number of ranks
        # between two stages.
        strides = [rank_strides(layout)["pp"] for layout in layouts]
        first, sender_of_shard = distinct(
            [SentBlocks(*sender) for sender in zip(blocks, strides, strict=True)]
        )
        columns = []
        for shard in first:
            sent = self.transfers(layouts[shard], blocks[shard], 1 / spec.scheduler.slices)
            hops_of_stage = self._hops_of(shape, layouts[shard], strides[shard])
            columns.append(hops_of_stage.seconds(self._seconds_of(sent, table)))
        return np.stack(columns, axis=-1)[..., sender_of_shard]

    def _seconds_of(self, sent: Transfers, table: PriceTable) -> Float[np.ndarray, "..."]:
        return get_or_compute(
            self._transfer_s,
            sent,
            lambda: sent.seconds(priced_events(self.problem, sent.ops, table).time_s),
        )

    def _hops_of(self, shape: StageShape, layout: Layout, stride: int) -> Hops:
        compute = partial(hops, shape.spec, shape.by_segments, layout, self.problem.cluster)
        return get_or_compute(self._hops, (shape, stride), compute)

    def state_events(self, grid: LayoutGrid) -> list[StateEvents]:
        """Events of weights, gradients and optimizer states for all shapes of the grid, by order of
        dimensions."""
        shapes = self.shapes(grid)[0]
        blocks = self.blocks(grid)[0]
        events = []
        for layout in self.orders(grid)[0]:
            key = StateKey(
                layout.degrees, layout.order, layout.replicate, layout.offload_states, tuple(shapes)
            )
            compute = partial(StateEvents, layout, shapes, blocks, self.problem.setting)
            events.append(get_or_compute(self._states, key, compute))
        return events

    def state_seconds(self, grid: LayoutGrid, table: PriceTable) -> list[StateSeconds]:
        """Bounds on the seconds that the grid's states add, by order of dimensions."""

        def compute(events: StateEvents) -> StateSeconds:
            return events.seconds(
                priced_events(self.problem, events.ops, table).time_s, grid.states
            )

        seconds = []
        for events in self.state_events(grid):
            seconds.append(
                get_or_compute(self._state_s, (events, grid.states), partial(compute, events))
            )
        return seconds

    def times(
        self, grid: LayoutGrid, table: PriceTable, variant: Variant = PLAIN, slices: int = 1
    ) -> list[BlockTimes]:
        """Timed blocks of each shard choice in a variant of a pass."""
        layouts = self.shards(grid)
        blocks = self.blocks(grid)
        checks_numbers = self.problem.framework.communication.checks(grid.degrees.pp)
        # Degrees and micro-batch of a grid are alike, so its block times differ by these two alone.
        first, times_of_shard = distinct(
            [
                (of_shard, layout.overlap.tp_overlap)
                for of_shard, layout in zip(blocks, layouts, strict=True)
            ]
        )
        times = []
        for shard in first:
            layout = layouts[shard]
            key = BlockTimesKey(
                blocks[shard], layout.overlap.tp_overlap, checks_numbers, variant, slices
            )
            compute = partial(block_times, self.problem, layout, variant, slices, table)
            times.append(get_or_compute(self._times, key, compute))
        return [times[place] for place in times_of_shard.tolist()]


def model_of_grids(problem: StepProblem, grids: Sequence[LayoutGrid]) -> GridModel:
    """The model of a problem's grids; searches of one problem share it, as most of their grids have
    equal parts."""
    full_layers: dict[PerStage, None] = {}
    schedules: set[str] = set()
    for grid in grids:
        full_layers |= dict.fromkeys(choice.recompute_full_layers for choice in grid.recomputes)
        schedules |= set(grid.schedules)
    model = GridModel(problem, tuple(full_layers))

    # A schedule of the user's may be another one under the same name next time.
    if any(get_schedule(schedule).digest != "" for schedule in schedules):
        return model
    key = (problem, model.full_layers, model.pipelines.directory)
    return current_session().grid_models.get_or_compute(key, lambda: model)


def get_or_compute(values: dict[K, V], key: K, compute: Callable[[], V]) -> V:
    """The value of a key, computed if absent."""
    if key not in values:
        values[key] = compute()
    return values[key]


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], Int[np.ndarray, " keys"]]:
    """Return the index of the first occurrence of each distinct key, and for every key the number
    of its distinct key."""
    number: dict[Hashable, int] = {}
    first: list[int] = []
    number_of_key = []
    for position, key in enumerate(keys):
        key_number = number.setdefault(key, len(number))
        number_of_key.append(key_number)
        if key_number == len(first):
            first.append(position)
    return first, np.array(number_of_key)
