"""Composes layouts into pipeline programs whose classes contain blocks and events.

Layouts that share a program and a division of the model are composed together, one lane per layout.
The layouts of a search differ far more in blocks and placements than in programs, and an array with
a row per layout costs hardly more than that of a single one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._check import hosted
from perfmodel.prediction._communication import (
    CommunicationEvents,
    EventClasses,
    PartitionedStep,
    communication_events,
    event_entries,
)
from perfmodel.prediction._memory_inputs import BlockBytes
from perfmodel.prediction._price import priced_events
from perfmodel.prediction._problem import Setting, StepProblem, session_cached, session_cached_each
from perfmodel.prediction._programs import Division, PartitionedProgram, divided, program_spec
from perfmodel.prediction._step_costs import step_factors
from perfmodel.prediction._zero import StateLayout
from perfmodel.prediction.blocks import BlockTimes, ShardBlocks, ranks_of, shard_events
from perfmodel.prediction.phases import N_PHASES, PLAIN, RECOMPUTE_MODES, Variant, passed_s
from perfmodel.program import PAIRED, Kind, ProgramSpec
from perfmodel.spec import Layout
from perfmodel.spec.notation import PerRank
from perfmodel.workload import layer_count


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """A shard's blocks with a numbering of ranks, which together determine the events between
    blocks."""

    blocks: ShardBlocks
    """Blocks of the shard, before they are timed."""
    ranks: Layout
    """How ranks are numbered (`ranks_of`)."""
    states: StateLayout
    """How weights, gradients and optimizer states lie on the ranks."""


class LayoutTerms(NamedTuple):
    """All inputs of the durations of one layout."""

    program: PartitionedProgram
    """Program and division of the model, shared with other layouts."""
    times: BlockTimes
    """Times of its blocks in plain passes."""
    placed: PlacedBlocks
    """The layout's blocks on its ranks, which determine the events between blocks."""
    mode: int
    """Recompute of its blocks (`modes_of`)."""
    factor: float
    """Factor of the step time (`step_factors`)."""

    @property
    def events(self) -> ShardBlocks:
        """The layout's blocks, not yet timed."""
        return self.placed.blocks


@dataclass(frozen=True, eq=False)
class LayoutBatch:
    """Layouts that share one program and one division of the model into stages."""

    program: PartitionedProgram
    """Program and division that the layouts share."""
    lanes: tuple[int, ...]
    """Positions in the caller's list."""
    layouts: tuple[Layout, ...]
    """Layouts that are priced together, one per lane."""
    composed: tuple[LayoutTerms, ...]
    """Terms of each lane."""

    @property
    def spec(self) -> ProgramSpec:
        """Pipeline program that all these layouts run."""
        return self.program.spec

    @property
    def tables(self) -> list[BlockTimes]:
        """Times of every layout's blocks."""
        return [terms.times for terms in self.composed]

    @property
    def modes(self) -> Int[np.ndarray, "lanes 1"]:
        """The recomputation mode of each layout."""
        return np.array([terms.mode for terms in self.composed])[:, None]

    @cached_property
    def bytes(self) -> BlockBytes:
        """Parameters and memory of the layouts' blocks."""
        setting = self.program.setting
        pipelined = self.layouts[0].pp > 1
        return BlockBytes.of(
            self.tables, self.modes[:, 0], pipelined, setting.job, setting.framework
        )

    @property
    def saved_bytes(self) -> Float[np.ndarray, "lanes stages"]:
        """Activation bytes that a micro-batch saves in each stage."""
        return self.bytes.saved(self.program.counts.sum(axis=1), self.program.full.sum(axis=1))


def layout_batches(problem: StepProblem, layouts: Sequence[Layout]) -> list[LayoutBatch]:
    """Group layouts that share a program and a division of the model.

    Raises:
        LayoutError: the model does not divide as a layout asks, or it does not lie on the cluster's
            kinds of nodes.
    """
    # On several kinds of nodes layouts are composed as on the first: all but times is the same on
    # each, and `by_node_kind` prices every kind by itself.
    if problem.kinds:
        return layout_batches(
            problem.kinds[0], [hosted(problem.cluster, layout) for layout in layouts]
        )
    terms = composed(problem, layouts)
    lanes_of: dict[tuple[PartitionedProgram, PerRank], list[int]] = defaultdict(list)
    for lane, layout in enumerate(layouts):
        lanes_of[terms[lane].program, layout.kinds].append(lane)
    batches = []
    for (program, _), lanes in lanes_of.items():
        batch_layouts = [layouts[i] for i in lanes]
        batch_terms = [terms[i] for i in lanes]
        batches.append(LayoutBatch(program, tuple(lanes), tuple(batch_layouts), tuple(batch_terms)))
    return batches


def composed(problem: StepProblem, layouts: Sequence[Layout]) -> list[LayoutTerms]:
    """The inputs of the durations of each layout.

    Raises:
        LayoutError: the model does not divide as a layout asks.
    """
    # The file of a schedule may change between calls.
    if any(layout.effective_schedule.startswith("file:") for layout in layouts):
        return [_terms_of(problem, layout) for layout in layouts]
    return _cached_terms(problem, layouts)


@session_cached_each
def _cached_terms(
    problem: StepProblem, layouts: list[Layout]
) -> Iterator[tuple[Layout, LayoutTerms]]:
    """The terms of each layout, for schedules that follow from their names."""
    for layout in layouts:
        yield layout, _terms_of(problem, layout)


def _terms_of(
    problem: StepProblem, layout: Layout, program: PartitionedProgram | None = None
) -> LayoutTerms:
    """Compose a layout in the program whose stages divide its blocks, or in a given program that
    does."""
    setting = problem.setting

    # Shard: the events of its blocks, and the ranks and states that decide which events lie between
    # blocks.
    blocks = shard_events(setting, layout)
    states = StateLayout.of(layout, setting.framework)
    placed = _placed(setting, blocks, ranks_of(setting, layout), states)

    # Price and phases: seconds of each block.
    times = block_times(problem, layout)
    factor = prod(step_factors(problem, layout))

    # Program: the blocks in its stages. A stack of linear layers is cut into other blocks where it
    # is split, so the division depends on the shard, too.
    if program is None:
        spec = program_spec(setting, layout, layer_count(blocks.pairs))
        program = divided(
            setting, spec, Division(blocks.kinds, layout.partition, layout.recompute_full_layers)
        )
    return LayoutTerms(program, times, placed, RECOMPUTE_MODES.index(layout.recompute), factor)


@session_cached
def _placed(
    setting: Setting, blocks: ShardBlocks, ranks: Layout, states: StateLayout
) -> PlacedBlocks:
    """Return one object for equal blocks on equal ranks, because it is the cache key of the events
    between blocks."""
    return PlacedBlocks(blocks, ranks, states)


def in_program_of(problem: StepProblem, layout_batch: LayoutBatch, layout: Layout) -> LayoutBatch:
    """Return the batch of another layout, whose blocks run in the program of an existing batch."""
    terms = _terms_of(problem, layout, layout_batch.program)
    return replace(layout_batch, lanes=(0,), layouts=(layout,), composed=(terms,))


def weighted_programs(layout_batch: LayoutBatch) -> tuple[tuple[LayoutBatch, float], ...]:
    """Programs whose weighted makespans add up to the step time."""
    spec = layout_batch.spec
    if spec.steps == 1:
        return ((layout_batch, 1.0),)

    # Without a flush between steps, filling and draining the pipeline count once for a stream of
    # many steps. So a step takes the difference between a longer and a shorter stream, over the
    # difference in steps (but no less than its busiest rank, see `rank_busy_s`).
    shorter = replace(spec, steps=spec.steps // 2)
    weight = 1 / (spec.steps - shorter.steps)
    shorter_batch = replace(layout_batch, program=layout_batch.program.with_spec(shorter))
    return (layout_batch, weight), (shorter_batch, -weight)


def joined(batches: Sequence[LayoutBatch]) -> LayoutBatch:
    """Join batches whose programs are equivalent (`PartitionedProgram.canonical`) into one."""
    lanes = chain.from_iterable([batch.lanes for batch in batches])
    layouts = chain.from_iterable([batch.layouts for batch in batches])
    terms = chain.from_iterable([batch.composed for batch in batches])
    return LayoutBatch(batches[0].program, tuple(lanes), tuple(layouts), tuple(terms))


# --- passes ---------------------------------------------------------------------------------------


def phase_s(
    problem: StepProblem, layout_batch: LayoutBatch, variant: Variant = PLAIN
) -> Float[np.ndarray, "lanes blocks phases"]:
    """Seconds that each phase of a pass spends in each block."""
    tables = layout_batch.tables
    slices = layout_batch.spec.scheduler.slices
    if variant != PLAIN or slices > 1:
        tables = [block_times(problem, layout, variant, slices) for layout in layout_batch.layouts]
    paired = variant.beside == PAIRED
    # `concatenate` takes a third of the time of `stack`.
    of_lanes = np.concatenate(
        [table.paired.phase_s if paired else table.phase_s for table in tables]
    )
    return of_lanes.reshape(len(tables), -1, N_PHASES)


def pass_s(
    problem: StepProblem, layout_batch: LayoutBatch
) -> dict[Kind, Float[np.ndarray, "lanes blocks"]]:
    """Seconds that a pass spends in each block, by kind of pass, without full recomputation."""
    forward, backward, weight = passed_s(
        phase_s(problem, layout_batch), layout_batch.modes
    ).swapaxes(0, 1)
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward + weight,
        Kind.BACKWARD_INPUT: backward,
        Kind.BACKWARD_WEIGHT: weight,
    }


# --- events between blocks ------------------------------------------------------------------------


def bundle_events(
    problem: StepProblem, layout_batch: LayoutBatch, lane: int
) -> CommunicationEvents:
    """Events between blocks, for one layout of a batch."""
    return _events_between(
        problem.setting, layout_batch.program.without_recompute, layout_batch.composed[lane].placed
    )


@session_cached
def _events_between(
    setting: Setting, program: PartitionedProgram, placed: PlacedBlocks
) -> CommunicationEvents:
    """Events between blocks of a placement in a program, before they are priced."""
    step = PartitionedStep(
        ranks=placed.ranks,
        states=placed.states,
        blocks=placed.blocks,
        spec=program.spec,
        counts=program.counts,
        job=setting.job,
        cluster=setting.cluster,
    )
    return communication_events(step, program.structure.spans)


def event_classes(problem: StepProblem, layout_batch: LayoutBatch) -> list[EventClasses]:
    """Events between blocks in each class, for each layout of a batch."""
    # Neither the number of micro-batches nor recompute changes the events of a class: programs that
    # differ in these alone share results.
    program = layout_batch.program.canonical.without_recompute
    return _cached_event_classes(
        problem, [(program, terms.placed) for terms in layout_batch.composed]
    )


@session_cached_each
def _cached_event_classes(
    problem: StepProblem, placements: list[tuple[PartitionedProgram, PlacedBlocks]]
) -> Iterator[tuple[tuple[PartitionedProgram, PlacedBlocks], EventClasses]]:
    """Priced events between blocks in the classes of programs, for each placement of a program's
    blocks."""
    for program, placed in placements:
        ops, class_index, op_index = _class_entries(problem.setting, program, placed)
        times = priced_events(problem, ops)
        yield (
            (program, placed),
            EventClasses(ops, times, class_index, op_index, program.structure.n_classes),
        )


class _ClassEntries(NamedTuple):
    """Events between blocks and the classes in which they occur."""

    ops: tuple[Op, ...]
    """The distinct events."""
    class_index: Int[np.ndarray, " entries"]
    """Class of each occurrence."""
    op_index: Int[np.ndarray, " entries"]
    """Event of each occurrence."""


@session_cached
def _class_entries(
    setting: Setting, program: PartitionedProgram, placed: PlacedBlocks
) -> _ClassEntries:
    """Occurrences of events between blocks in a program's classes."""
    events = _events_between(setting, program, placed)
    class_index, op_index = event_entries(program.structure, events)
    return _ClassEntries(tuple(events.ops), class_index, op_index)
