"""What grids of layouts share: block tables, pipelines, transfers and state events, each worked out once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockTimes, ShardBlocks
from perfmodel.prediction._grid import LayoutGrid, PipelineChoice
from perfmodel.prediction._grid_pipelines import PipelineBlocks, stacked_ranks
from perfmodel.prediction._grid_states import StageShape, StateEvents, StateSeconds
from perfmodel.prediction._memory import RankBlocks
from perfmodel.prediction._phases import PLAIN, Variant
from perfmodel.prediction._pipeline import PipelineCache
from perfmodel.prediction._placement import rank_strides
from perfmodel.prediction._price import block_times, priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import program_spec, segments_of
from perfmodel.prediction._sends import Transfers, hops, transfers
from perfmodel.prediction._shard import shard_events
from perfmodel.prediction._stages import fully_recomputed, layer_count, stage_blocks
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout, PerStage

T = TypeVar("T")


@dataclass(eq=False)
class GridModel:
    """Parts of the costs of some grids of one problem."""

    problem: StepProblem
    full_layers: Sequence[PerStage]
    """Layers recomputed in full, as they occur in the grids' choices."""
    pipelines: PipelineCache = field(default_factory=PipelineCache)
    _known: dict[Hashable, object] = field(default_factory=dict)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # pyright: ignore[reportReturnType]

    def time_events(self, grids: Sequence[LayoutGrid]) -> None:
        """Time the events of all grids in one call."""
        events: dict[int, ShardBlocks | Transfers | StateEvents] = {}
        for grid in grids:
            for layout, (blocks, _) in zip(self.shards(grid), self.senders(grid), strict=True):
                for one in (blocks, self.transfers(layout, blocks, 1.0)):
                    events[id(one)] = one
            for one in self.state_events(grid):
                events[id(one)] = one
            shards = dict(zip(self.blocks(grid), self.shards(grid), strict=True))
            for n in {get_schedule(choice.schedule).slices for choice in grid.pipelines} - {1}:
                for blocks, layout in shards.items():
                    for one in self._once(("slices", blocks, n), lambda n=n, lay=layout: self._slices(lay, n)):
                        events[id(one)] = one
        priced_events(self.problem, list(dict.fromkeys(op for one in events.values() for op in one.ops)))

    def shards(self, grid: LayoutGrid) -> list[Layout]:
        """A layout for each shard choice."""
        return self._once(("shards", grid), lambda: [grid.degrees.replace(**one._asdict()) for one in grid.shards])

    def _slices(self, layout: Layout, slices: int) -> list[ShardBlocks]:
        """Blocks of each slice of the sequence."""
        return [shard_events(self.problem.setting, layout, slices, index) for index in range(slices)]

    def blocks(self, grid: LayoutGrid) -> list[ShardBlocks]:
        """Blocks of each shard choice."""
        setting = self.problem.setting
        return self._once(
            ("blocks", grid),
            lambda: [shard_events(setting, layout) for layout in self.shards(grid)],
        )

    def orders(self, grid: LayoutGrid) -> tuple[list[Layout], Int[np.ndarray, " shards"]]:
        """A layout for each order of dimensions, and which of them each shard choice has."""
        layouts = self.shards(grid)
        first, of_shard = distinct([layout.order for layout in layouts])
        return [layouts[s] for s in first], of_shard

    def pipelines_of(self, grid: LayoutGrid, offload: bool = False) -> list[PipelineBlocks]:
        """The pipeline of each choice with the model's blocks."""
        of_grid = lambda: [self._pipeline(grid, choice, offload) for choice in grid.pipelines]  # noqa: E731
        return self._once(("pipelines", grid.pipelines, offload, *self._alike(grid)), of_grid)

    def ranks(self, grid: LayoutGrid, offload: bool) -> RankBlocks:
        """The fullest ranks of all pipelines under each recompute choice (`stacked_ranks`)."""
        full = self.full_places(grid)
        return self._once(
            ("ranks", grid.pipelines, offload, *self._alike(grid), full.tobytes()),
            lambda: stacked_ranks([one.ranks for one in self.pipelines_of(grid, offload)], full),
        )

    def _alike(self, grid: LayoutGrid) -> tuple[Hashable, ...]:
        """What of the degrees the pipelines with the model's blocks depend on."""
        lay = grid.degrees
        combines = lay.ep_overlap and lay.ep > 1
        return lay.pp, self.problem.job.num_microbatches(lay), combines, self.blocks(grid)[0].repeats

    def _pipeline(self, grid: LayoutGrid, choice: PipelineChoice, offload: bool) -> PipelineBlocks:
        def make() -> PipelineBlocks:
            blocks = self.blocks(grid)[0]
            chosen = grid.degrees.replace(schedule=choice.schedule, vpp=choice.vpp, offload=offload)
            spec = program_spec(self.problem.setting, chosen, layer_count(blocks.pairs))
            counts, full = self._once(
                ("counts", spec.n_stages, blocks.repeats), lambda: self._counts(blocks, spec.n_stages)
            )
            return PipelineBlocks(spec, self.pipelines.get(spec, counts, blocks.layers, blocks.kinds), counts, full)

        return self._once(("pipeline", choice, offload, *self._alike(grid)), make)

    def _counts(self, blocks: ShardBlocks, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of every stage; those that are recomputed in full, under each of `full_layers`."""
        counts = stage_blocks(blocks.kinds, stages, 1).sum(axis=1)
        full = [fully_recomputed(counts, blocks.layers, n) for n in self.full_layers]
        return counts, np.stack(full)

    def full_places(self, grid: LayoutGrid) -> Int[np.ndarray, " recomputes"]:
        """Place in `full_layers` of each recompute choice."""
        return np.array([self.full_layers.index(choice.recompute_full_layers) for choice in grid.recomputes])

    def shapes(self, grid: LayoutGrid) -> tuple[list[StageShape], Int[np.ndarray, " pipelines"]]:
        """What stages the ranks of the grid's pipelines hold, and which of these each pipeline has."""
        specs = [pipeline.spec for pipeline in self.pipelines_of(grid)]
        keys = [
            (spec.stage_map.shape, spec.stage_map.tobytes(), spec.steps > 1, spec.scheduler.plain) for spec in specs
        ]
        first, of_pipeline = distinct(keys)
        blocks = self.blocks(grid)[0]

        def shape(place: int) -> StageShape:
            stages = specs[place].n_stages
            segments = segments_of(layer_count(blocks.pairs), stages)
            return StageShape(specs[place], stage_blocks(blocks.kinds, stages, segments))

        known = [self._once(("shape", keys[place], blocks.repeats), lambda p=place: shape(p)) for place in first]
        return known, of_pipeline

    def senders(self, grid: LayoutGrid) -> list[tuple[ShardBlocks, int]]:
        """What the transfers of each shard choice depend on: its blocks, and ranks from one stage to the next."""
        return self._once(
            ("senders", grid),
            lambda: [
                (blocks, rank_strides(layout)["pp"])
                for layout, blocks in zip(self.shards(grid), self.blocks(grid), strict=True)
            ],
        )

    def transfers(self, layout: Layout, blocks: ShardBlocks, share: float) -> Transfers:
        """Transfers of a shard that carry `share` of a micro-batch."""
        return self._once(
            ("transfers", blocks, share),
            lambda: transfers(layout, blocks.blocks, share, self.problem.job, self.problem.cluster),
        )

    def send_s(self, grid: LayoutGrid, shape: StageShape) -> Float[np.ndarray, "2 stages shards"]:
        """Seconds of the transfers out of every stage."""
        spec, counts = shape.spec, shape.by_segments
        if spec.n_stages == 1:
            return np.zeros((2, 1, len(grid.shards)))

        def seconds(layout: Layout, sender: tuple[ShardBlocks, int]) -> np.ndarray:
            sent = self.transfers(layout, sender[0], 1 / spec.scheduler.slices)
            table = self._once(("transfer seconds", sent), lambda: sent.seconds(self.timed_s(sent)))
            way = self._once(("hops", shape, sender[1]), lambda: hops(spec, counts, layout, self.problem.cluster))
            return way.seconds(table)

        own, of_shard = distinct(self.senders(grid))
        shards, senders = self.shards(grid), self.senders(grid)
        return np.stack([seconds(shards[s], senders[s]) for s in own], axis=-1)[..., of_shard]

    def timed_s(self, events: Transfers | StateEvents) -> Float[np.ndarray, " ops"]:
        """Seconds of some events."""
        return priced_events(self.problem, events.ops).time_s

    def state_events(self, grid: LayoutGrid) -> list[StateEvents]:
        """Events of weights, gradients and optimizer states for all shapes of the grid, by order of dimensions."""
        shapes, blocks = self.shapes(grid)[0], self.blocks(grid)[0]
        return [
            self._once(
                ("states", *lay.degrees, lay.order, lay.replicate, lay.offload_states, tuple(shapes)),
                lambda lay=lay: StateEvents(lay, shapes, blocks, self.problem.setting),
            )
            for lay in self.orders(grid)[0]
        ]

    def state_seconds(self, grid: LayoutGrid) -> list[StateSeconds]:
        """Bounds on what the grid's states add, by order of dimensions."""
        return [
            self._once(
                ("state seconds", events, grid.states),
                lambda events=events: events.seconds(self.timed_s(events), grid.states),
            )
            for events in self.state_events(grid)
        ]

    def times(self, grid: LayoutGrid, variant: Variant = PLAIN, slices: int = 1) -> list[BlockTimes]:
        """Timed blocks of each shard choice in a variant of a pass."""
        layouts, blocks = self.shards(grid), self.blocks(grid)
        # all that `block_times` depends on where degrees and micro-batch are alike
        own, of_shard = distinct([(one, lay.tp_overlap) for one, lay in zip(blocks, layouts, strict=True)])
        checked = self.problem.framework.checks(grid.degrees.pp)
        found = [
            self._once(
                ("times", blocks[place], layouts[place].tp_overlap, checked, variant, slices),
                lambda p=place: block_times(self.problem, layouts[p], variant, slices),
            )
            for place in own
        ]
        return [found[n] for n in of_shard.tolist()]


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], Int[np.ndarray, " keys"]]:
    """Place of the first of each distinct key, and which of them each key is."""
    number: dict[Hashable, int] = {}
    of_key = np.array([number.setdefault(key, len(number)) for key in keys])
    return np.unique(of_key, return_index=True)[1].tolist(), of_key
