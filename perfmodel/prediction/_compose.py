"""Compose: from layouts to programs, whose classes hold blocks and events.

Layouts that share a program and a division of the model are composed together, a lane each.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockTimes, ShardBlocks
from perfmodel.prediction._check import hosted
from perfmodel.prediction._communication import CommunicationEvents, EventClasses, communication_events, event_entries
from perfmodel.prediction._memory import BlockBytes
from perfmodel.prediction._phases import N_PHASES, PLAIN, Variant, modes_of, passed_s
from perfmodel.prediction._price import block_times, priced_events
from perfmodel.prediction._problem import Setting, StepProblem, session_cached
from perfmodel.prediction._programs import Division, PartitionedProgram, divided, program_spec
from perfmodel.prediction._shard import ranks_of, shard_events
from perfmodel.prediction._stages import layer_count
from perfmodel.prediction._step_costs import step_factors
from perfmodel.prediction._zero import StateLayout
from perfmodel.program import PAIRED, Kind, ProgramSpec
from perfmodel.spec import Layout, PerRank

_MOST_LAYOUTS: Final = 100_000
"""Of one problem that are kept."""
_MOST_PLACED: Final = 4096
"""Whose events in the classes of one program are kept."""


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """A shard's blocks on numbered ranks, which decide the events between blocks; equal ones are one object."""

    blocks: ShardBlocks
    ranks: Layout
    """How ranks are numbered (`ranks_of`)."""
    states: StateLayout


class LayoutTerms(NamedTuple):
    """Everything from which the durations of one layout are computed."""

    program: PartitionedProgram
    times: BlockTimes
    placed: PlacedBlocks
    mode: int
    """Recompute of its blocks (`modes_of`)."""
    factor: float
    """What the step is multiplied by (`step_factors`)."""

    @property
    def events(self) -> ShardBlocks:
        """Its blocks without times."""
        return self.placed.blocks


@dataclass(frozen=True, eq=False)
class LayoutBatch:
    """Layouts that share one program and one division of the model: a lane each."""

    program: PartitionedProgram
    lanes: tuple[int, ...]
    """Positions in the caller's list."""
    layouts: tuple[Layout, ...]
    composed: tuple[LayoutTerms, ...]

    @property
    def spec(self) -> ProgramSpec:
        """The program."""
        return self.program.spec

    @property
    def counts(self) -> Float[np.ndarray, "stages segments blocks"]:
        """See `PartitionedProgram`."""
        return self.program.counts

    @property
    def full(self) -> Float[np.ndarray, "stages segments blocks"]:
        """See `PartitionedProgram`."""
        return self.program.full

    @property
    def tables(self) -> list[BlockTimes]:
        """Times of every layout's blocks."""
        return [one.times for one in self.composed]

    @property
    def modes(self) -> Int[np.ndarray, "lanes 1"]:
        """Recompute of each layout, for all of its blocks."""
        return np.array([one.mode for one in self.composed])[:, None]

    @cached_property
    def bytes(self) -> BlockBytes:
        """Parameters and bytes of the layouts' blocks."""
        setting, pipelined = self.program.setting, self.layouts[0].pp > 1
        return BlockBytes.of(self.tables, self.modes[:, 0], pipelined, setting.job, setting.framework)

    @property
    def saved_bytes(self) -> Float[np.ndarray, "lanes stages"]:
        """Activation bytes that a micro-batch leaves behind in every stage."""
        return self.bytes.saved(self.counts.sum(axis=1), self.full.sum(axis=1))


def layout_batches(problem: StepProblem, layouts: Sequence[Layout]) -> list[LayoutBatch]:
    """Layouts sorted by the program and division that they share.

    On several kinds of nodes they are composed as on the first: all but times is the same on each (`parts`).

    Raises:
        LayoutError: the model does not divide as a layout asks, or it does not lie on the cluster's kinds of nodes.
    """
    if problem.kinds:
        return layout_batches(problem.kinds[0], [hosted(problem.cluster, layout) for layout in layouts])
    terms = composed_layouts(problem).of(layouts)
    lanes_of: dict[tuple[PartitionedProgram, PerRank], list[int]] = defaultdict(list)
    for lane, layout in enumerate(layouts):
        lanes_of[terms[lane].program, layout.kinds].append(lane)
    return [
        LayoutBatch(program, tuple(lanes), tuple([layouts[i] for i in lanes]), tuple([terms[i] for i in lanes]))
        for (program, _), lanes in lanes_of.items()
    ]


def composed(problem: StepProblem, layout: Layout) -> LayoutTerms:
    """One layout composed, the same object in a session.

    Raises:
        LayoutError: the model does not divide as it asks.
    """
    (terms,) = composed_layouts(problem).of([layout])
    return terms


class ComposedLayouts:
    """Layouts of one problem, each composed the first time that it is asked for."""

    def __init__(self, problem: StepProblem) -> None:
        self._problem = problem
        self._composed: dict[Layout, LayoutTerms] = {}

    def of(self, layouts: Sequence[Layout]) -> list[LayoutTerms]:
        """All of some layouts (raises `LayoutError` if the model does not divide as one of them asks)."""
        if len(self._composed) + len(layouts) > _MOST_LAYOUTS:
            self._composed.clear()
        return [self._composed.get(layout) or self._compose(layout) for layout in layouts]

    def _compose(self, layout: Layout) -> LayoutTerms:
        blocks, program = _laid_out(self._problem.setting, layout)
        terms = _composed_in(self._problem, program, blocks, layout)
        # the file of a schedule may change between calls
        if not layout.schedule.startswith("file:"):
            self._composed[layout] = terms
        return terms


@session_cached
def composed_layouts(problem: StepProblem) -> ComposedLayouts:
    """The composed layouts of a problem, one table in a session."""
    return ComposedLayouts(problem)


def _composed_in(problem: StepProblem, program: PartitionedProgram, blocks: ShardBlocks, layout: Layout) -> LayoutTerms:
    times, placed = block_times(problem, layout), _placed_as(problem.setting, blocks, layout)
    (mode,), factor = modes_of([layout.recompute]).tolist(), prod(step_factors(problem, layout))
    return LayoutTerms(program, times, placed, mode, factor)


def _laid_out(setting: Setting, layout: Layout) -> tuple[ShardBlocks, PartitionedProgram]:
    """A layout's blocks, and its program, whose stages divide them."""
    blocks = shard_events(setting, layout)
    spec = program_spec(setting, layout, layer_count(blocks.pairs))
    # a stack of linear layers is cut into other blocks where it is split
    return blocks, divided(setting, spec, Division(blocks.kinds, layout.partition, layout.recompute_full_layers))


def _placed_as(setting: Setting, blocks: ShardBlocks, layout: Layout) -> PlacedBlocks:
    """A layout's blocks on its ranks."""
    return _placed(setting, blocks, ranks_of(setting, layout), StateLayout.of(layout))


@session_cached
def _placed(setting: Setting, blocks: ShardBlocks, ranks: Layout, states: StateLayout) -> PlacedBlocks:
    return PlacedBlocks(blocks, ranks, states)


def in_program_of(problem: StepProblem, layout_batch: LayoutBatch, layout: Layout) -> LayoutBatch:
    """Another layout, with blocks of its own, in the bundle's program."""
    one = _composed_in(problem, layout_batch.program, shard_events(problem.setting, layout), layout)
    return replace(layout_batch, lanes=(0,), layouts=(layout,), composed=(one,))


def weighted_programs(layout_batch: LayoutBatch) -> tuple[tuple[LayoutBatch, float], ...]:
    """Programs whose weighted makespans add up to the step time.

    Without a flush between steps a step takes what a longer stream takes more than a shorter one (but no less than
    its busiest rank, see `rank_busy_s`).
    """
    spec = layout_batch.spec
    if spec.steps == 1:
        return ((layout_batch, 1.0),)
    shorter = replace(spec, steps=spec.steps // 2)
    weight = 1 / (spec.steps - shorter.steps)
    return (layout_batch, weight), (replace(layout_batch, program=layout_batch.program.with_spec(shorter)), -weight)


def joined(alike: Sequence[LayoutBatch]) -> LayoutBatch:
    """Layouts of several bundles, whose programs are alike (`PartitionedProgram.alike`), as those of one."""
    lanes, layouts, composed = (
        tuple(chain.from_iterable(parts))
        for parts in zip(*((one.lanes, one.layouts, one.composed) for one in alike), strict=True)
    )
    return LayoutBatch(alike[0].program, lanes, layouts, composed)


# --- passes ---------------------------------------------------------------------------------------


def phase_s(
    problem: StepProblem, layout_batch: LayoutBatch, variant: Variant = PLAIN
) -> Float[np.ndarray, "lanes blocks phases"]:
    """Seconds that each phase of a pass spends in each block."""
    tables = layout_batch.tables
    slices = layout_batch.spec.scheduler.slices
    if variant != PLAIN or slices > 1:
        tables = [block_times(problem, layout, variant, slices) for layout in layout_batch.layouts]
    # a third of the time that `stack` takes
    of_lanes = np.concatenate([t.paired.phase_s if variant[2] == PAIRED else t.phase_s for t in tables])
    return of_lanes.reshape(len(tables), -1, N_PHASES)


def pass_s(problem: StepProblem, layout_batch: LayoutBatch) -> dict[Kind, Float[np.ndarray, "lanes blocks"]]:
    """Seconds that a plain pass spends in each block, by kind of pass (full recompute comes on top)."""
    forward, backward, weight = passed_s(phase_s(problem, layout_batch), layout_batch.modes).swapaxes(0, 1)
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward + weight,
        Kind.BACKWARD_INPUT: backward,
        Kind.BACKWARD_WEIGHT: weight,
    }


# --- events between blocks ------------------------------------------------------------------------


def bundle_events(problem: StepProblem, layout_batch: LayoutBatch, lane: int) -> CommunicationEvents:
    """Events between blocks of one of the bundle's layouts."""
    return _events_between(problem.setting, layout_batch.program.between, layout_batch.composed[lane].placed)


@session_cached
def _events_between(setting: Setting, program: PartitionedProgram, placed: PlacedBlocks) -> CommunicationEvents:
    spans, counts = np.unique(program.structure.variants[:, 0]).tolist(), program.counts
    return communication_events(
        placed.ranks, placed.states, placed.blocks, program.spec, spans, counts, setting.job, setting.cluster
    )


def event_classes(problem: StepProblem, layout_batch: LayoutBatch) -> list[EventClasses]:
    """Events between blocks in each class, for each of the bundle's layouts."""
    tables = program_event_classes(problem, layout_batch.program.alike.between)
    return tables.of([terms.placed for terms in layout_batch.composed])


class ProgramEventClasses:
    """Events between blocks in the classes of one program, for each placement the first time that it is asked for."""

    def __init__(self, problem: StepProblem, program: PartitionedProgram) -> None:
        self._problem, self._program = problem, program
        self._by_placement: dict[PlacedBlocks, EventClasses] = {}

    def of(self, placements: Sequence[PlacedBlocks]) -> list[EventClasses]:
        """Events in each class, for each of some placements."""
        if len(self._by_placement) > _MOST_PLACED:
            self._by_placement.clear()
        for placement in placements:
            if placement not in self._by_placement:
                self._by_placement[placement] = self._classes(placement)
        return [self._by_placement[placement] for placement in placements]

    def _classes(self, placement: PlacedBlocks) -> EventClasses:
        ops, class_index, op_index = _entries(self._problem.setting, self._program, placement)
        times = priced_events(self._problem, ops)
        return EventClasses(ops, times, class_index, op_index, self._program.structure.n_classes)


@session_cached
def program_event_classes(problem: StepProblem, program: PartitionedProgram) -> ProgramEventClasses:
    """The events in the classes of a program, one table in a session."""
    return ProgramEventClasses(problem, program)


@session_cached
def _entries(setting: Setting, program: PartitionedProgram, placed: PlacedBlocks):
    events = _events_between(setting, program, placed)
    return tuple(events.ops), *event_entries(program.structure, events)
