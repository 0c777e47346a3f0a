"""Compose: from layouts to programs, whose classes hold blocks and events.

Layouts that share a program and a division of the model are composed together, a lane each.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockTimes, ShardBlocks
from perfmodel.prediction._check import hosted
from perfmodel.prediction._communication import CommunicationEvents, EventClasses, communication_events, event_entries
from perfmodel.prediction._memory import BlockBytes
from perfmodel.prediction._phases import (
    N_PHASES,
    PLAIN,
    PassClasses,
    Variant,
    modes_of,
    pass_classes,
    passed_s,
)
from perfmodel.prediction._price import block_times, priced_events, variant_times
from perfmodel.prediction._problem import Setting, StepProblem, kept
from perfmodel.prediction._programs import prepared, program_spec
from perfmodel.prediction._shard import Ranks, ranks_of, shard_events, variant_events
from perfmodel.prediction._stages import fully_recomputed, stage_blocks
from perfmodel.prediction._step_costs import beside_loss, step_factors
from perfmodel.prediction._zero import StateLayout
from perfmodel.program import Kind, ProgramSpec
from perfmodel.session import Store
from perfmodel.spec import Layout, PerRank, PerStage

_MOST_LAYOUTS: Final = 100_000
"""Of one problem that are kept."""
_MOST_SHARDS: Final = 4096
"""Whose events in the classes of one program are kept."""


class Division(NamedTuple):
    """How a model is divided among stages."""

    kinds: tuple[tuple[bool, int], ...]
    """Of its blocks (`ShardBlocks.kinds`)."""
    partition: PerStage
    full_layers: PerStage
    """See `Layout.recompute_full_layers`."""
    segments: tuple[tuple[int, ...], ...] | None = None
    """Layers of every segment of every stage; None: as even as can be."""


class Composed(NamedTuple):
    """One layout with all that its durations are composed of."""

    times: BlockTimes
    events: ShardBlocks
    """The same blocks without times."""
    spec: ProgramSpec
    division: Division
    """One object for all that are equal, as is `spec`."""
    ranks: Ranks
    states: StateLayout
    factor: float
    """What the step is multiplied by (`step_factors`)."""
    loss: float
    """See `beside_loss`."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Layouts that share one program and one division of the model: a lane each."""

    spec: ProgramSpec
    lanes: tuple[int, ...]
    """Positions in the caller's list."""
    layouts: tuple[Layout, ...]
    composed: tuple[Composed, ...]
    division: Division
    """What `counts` and `full` follow from."""
    counts: Float[np.ndarray, "stages segments blocks"]
    full: Float[np.ndarray, "stages segments blocks"]
    """Blocks among them that are recomputed in full whatever the layouts say of the others."""

    @cached_property
    def tables(self) -> tuple[BlockTimes, ...]:
        """Times of every layout's blocks."""
        return tuple(one.times for one in self.composed)

    @cached_property
    def modes(self) -> Int[np.ndarray, "lanes 1"]:
        """Recompute of each layout, for all of its blocks."""
        return modes_of([layout.recompute for layout in self.layouts])[:, None]

    def bytes(self, setting: Setting) -> BlockBytes:
        """Parameters and bytes of the layouts' blocks."""
        pipelined = self.layouts[0].pp > 1
        return BlockBytes.of(self.tables, self.modes[:, 0], pipelined, setting.job, setting.framework)

    def saved_bytes(self, setting: Setting) -> Float[np.ndarray, "lanes stages"]:
        """Activation bytes that a micro-batch leaves behind in every stage."""
        return self.bytes(setting).saved(self.counts.sum(axis=1), self.full.sum(axis=1))


def bundles(problem: StepProblem, layouts: Sequence[Layout]) -> list[Bundle]:
    """Layouts sorted by the program and division that they share.

    On several kinds of nodes they are composed as on the first: all but times is the same on each (`parts`).

    Raises:
        LayoutError: the model does not divide as a layout asks, or it does not lie on the cluster's kinds of nodes.
    """
    if problem.kinds:
        return bundles(problem.kinds[0], [hosted(problem.cluster, layout) for layout in layouts])
    known, found = _known_layouts(problem), []
    # a stack of linear layers is cut into other blocks where it is split
    alike: dict[tuple[int, int, PerRank], list[int]] = defaultdict(list)
    if len(known) + len(layouts) > _MOST_LAYOUTS:
        known.clear()
    for lane, layout in enumerate(layouts):
        one = known.get(layout) or composed(problem, layout)
        found.append(one)
        alike[id(one.spec), id(one.division), layout.kinds].append(lane)
    made = []
    for lanes in alike.values():
        spec, division, of_lanes = found[lanes[0]].spec, found[lanes[0]].division, tuple(layouts[i] for i in lanes)
        counts, full = _divided(problem.setting, division, spec.n_stages, spec.segments)
        made.append(Bundle(spec, tuple(lanes), of_lanes, tuple(found[i] for i in lanes), division, counts, full))
    return made


def composed(problem: StepProblem, layout: Layout) -> Composed:
    """One layout composed, the same object in a session.

    Raises:
        LayoutError: the model does not divide as it asks.
    """
    known = _known_layouts(problem)
    one = known.get(layout)
    if one is None:
        one = _compose(problem, layout)
        if not layout.schedule.startswith("file:"):  # files change
            known[layout] = one
    return one


@kept
def _known_layouts(problem: StepProblem) -> dict[Layout, Composed]:
    """Layouts composed before; grows."""
    return {}


def _compose(problem: StepProblem, layout: Layout) -> Composed:
    events, spec, division = _laid_out(problem.setting, layout)
    return Composed(
        block_times(problem, layout),
        events,
        spec,
        division,
        ranks_of(problem.setting, layout),
        StateLayout.of(layout),
        prod(step_factors(problem, layout)),
        beside_loss(problem, layout),
    )


def _laid_out(setting: Setting, layout: Layout) -> tuple[ShardBlocks, ProgramSpec, Division]:
    """A layout's blocks, its program, and how the program's stages divide the blocks."""
    events = shard_events(setting, layout)
    sends = "blocking" if setting.framework.blocking_sends else "lag"
    tied = bool(getattr(setting.model, "tied_embeddings", False))
    layers = sum(n for is_layer, n in events.kinds if is_layer)
    spec = program_spec(layout, setting.job, layers, tied, sends)
    division = Division(events.kinds, layout.partition, layout.recompute_full_layers)
    return events, _one_of_equal(setting, spec), _one_of_equal(setting, division)


def price_step(problem: StepProblem, layout: Layout) -> None:
    """Time all events of a layout in one call, for what is composed of them to find: those of its blocks in every pass
    that its program has, and those between blocks.

    Raises:
        LayoutError: the model does not divide as the layout asks.
    """
    if problem.kinds or layout in _known_layouts(problem):  # each kind of nodes has prices of its own
        return
    setting = problem.setting
    blocks, spec, division = _laid_out(setting, layout)
    ranks, states = ranks_of(setting, layout), StateLayout.of(layout)
    between, _, _ = _entries(setting, spec, division._replace(full_layers=None), blocks, ranks, states)
    slices = spec.scheduler.slices
    passes = {(span, index) for span, index, _ in prepared(spec).structure.variants.tolist()}
    shards = [variant_events(setting, layout, (span, index, False), slices) for span, index in sorted(passes)]
    ops = chain(blocks.ops, between, *(shard.ops for shard in shards))
    priced_events(problem, list(dict.fromkeys(ops)))


@kept
def _one_of_equal(setting: Setting, value: Hashable) -> Any:
    return value


@kept
def _divided(
    setting: Setting, division: Division, stages: int, segments: int
) -> tuple[Float[np.ndarray, "stages segments blocks"], Float[np.ndarray, "stages segments blocks"]]:
    """Blocks of every segment of every stage, and those of them that are recomputed in full."""
    counts = stage_blocks(division.kinds, stages, segments, division.partition, division.segments)
    layers = np.array([is_layer for is_layer, _ in division.kinds])
    return counts, fully_recomputed(counts, layers, division.full_layers)


def with_segments(problem: StepProblem, bundle: Bundle, layers: tuple[tuple[int, ...], ...]) -> Bundle:
    """The bundle with other numbers of layers in every segment of every stage, none of them recomputed in full."""
    division = bundle.division._replace(full_layers=None, segments=layers)
    spec = replace(bundle.spec, segments=len(layers[0]))
    counts, full = _divided(problem.setting, division, spec.n_stages, spec.segments)
    return replace(bundle, spec=spec, division=division, counts=counts, full=full)


def in_program_of(problem: StepProblem, bundle: Bundle, layout: Layout) -> Bundle:
    """Another layout, with blocks of its own, in the bundle's program."""
    times, events = block_times(problem, layout), shard_events(problem.setting, layout)
    ranks, states = ranks_of(problem.setting, layout), StateLayout.of(layout)
    factor, loss = prod(step_factors(problem, layout)), beside_loss(problem, layout)
    one = Composed(times, events, bundle.spec, bundle.division, ranks, states, factor, loss)
    return replace(bundle, lanes=(0,), layouts=(layout,), composed=(one,))


def weighted_programs(bundle: Bundle) -> tuple[tuple[Bundle, float], ...]:
    """Programs whose weighted makespans add up to the step time.

    Without a flush between steps a step takes what a longer stream takes more than a shorter one (but no less than
    its busiest rank, see `rank_busy_s`).
    """
    spec = bundle.spec
    if spec.steps == 1:
        return ((bundle, 1.0),)
    shorter = replace(spec, steps=spec.steps // 2)
    weight = 1 / (spec.steps - shorter.steps)
    return (bundle, weight), (replace(bundle, spec=shorter), -weight)


# --- passes ---------------------------------------------------------------------------------------


def phase_s(problem: StepProblem, bundle: Bundle, variant: Variant = PLAIN) -> Float[np.ndarray, "lanes blocks phases"]:
    """Seconds that each phase of a pass spends in each block."""
    tables = bundle.tables
    slices = bundle.spec.scheduler.slices
    if variant[:2] != PLAIN[:2] or slices > 1:
        tables = [variant_times(problem, layout, variant, slices) for layout in bundle.layouts]
    # a third of the time that `stack` takes
    of_lanes = np.concatenate([t.paired.phase_s if variant[2] else t.phase_s for t in tables])
    return of_lanes.reshape(len(tables), -1, N_PHASES)


def pass_s(problem: StepProblem, bundle: Bundle) -> dict[Kind, Float[np.ndarray, "lanes blocks"]]:
    """Seconds that a plain pass spends in each block, by kind of pass (full recompute comes on top)."""
    forward, backward, weight = passed_s(phase_s(problem, bundle), bundle.modes).swapaxes(0, 1)
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward + weight,
        Kind.BACKWARD_INPUT: backward,
        Kind.BACKWARD_WEIGHT: weight,
    }


def bundle_passes(problem: StepProblem, bundle: Bundle) -> PassClasses:
    """Blocks of each class of the bundle's program."""
    return _passes_of(problem.setting, bundle.spec, bundle.division)


@kept
def _passes_of(setting: Setting, spec: ProgramSpec, division: Division) -> PassClasses:
    return pass_classes(prepared(spec).structure, *_divided(setting, division, spec.n_stages, spec.segments))


# --- events between blocks ------------------------------------------------------------------------


def bundle_events(problem: StepProblem, bundle: Bundle, lane: int) -> CommunicationEvents:
    """Events between blocks of one of the bundle's layouts."""
    one = bundle.composed[lane]
    division = bundle.division._replace(full_layers=None)
    return _events_between(problem.setting, bundle.spec, division, one.events, one.ranks, one.states)


@kept
def _events_between(
    setting: Setting, spec: ProgramSpec, division: Division, blocks: ShardBlocks, ranks: Ranks, states: StateLayout
) -> CommunicationEvents:
    spans = np.unique(prepared(spec).structure.variants[:, 0]).tolist()
    counts, _ = _divided(setting, division, spec.n_stages, spec.segments)
    return communication_events(ranks.layout, states, blocks, spec, spans, counts, setting.job, setting.cluster)


def event_classes(problem: StepProblem, bundle: Bundle) -> list[EventClasses]:
    """Events between blocks in each class, for each of the bundle's layouts."""
    division = bundle.division._replace(full_layers=None)
    of_program = _classes_by_shard(problem, bundle.spec, division)
    found = []
    for one in bundle.composed:
        rest = one.events, one.ranks, one.states
        made = lambda rest=rest: _classes_of(problem, bundle.spec, division, *rest)  # noqa: E731
        found.append(of_program.once(rest, made))
    return found


@kept
def _classes_by_shard(problem: StepProblem, spec: ProgramSpec, division: Division) -> Store:
    """Events in the classes of a program, by blocks, ranks and how states lie on them."""
    return Store(_MOST_SHARDS)


def _classes_of(
    problem: StepProblem, spec: ProgramSpec, division: Division, blocks: ShardBlocks, ranks: Ranks, states: StateLayout
) -> EventClasses:
    ops, class_index, op_index = _entries(problem.setting, spec, division, blocks, ranks, states)
    times = priced_events(problem, ops)
    return EventClasses(ops, times, class_index, op_index, prepared(spec).structure.n_classes)


@kept
def _entries(
    setting: Setting, spec: ProgramSpec, division: Division, blocks: ShardBlocks, ranks: Ranks, states: StateLayout
):
    events = _events_between(setting, spec, division, blocks, ranks, states)
    return tuple(events.ops), *event_entries(prepared(spec).structure, events)
