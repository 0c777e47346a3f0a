"""Prepares programs and tables of a step-time function, once, in NumPy.

The public prediction composes one program per micro-batch size. Here those of all sizes are joined
end to end, so that JAX traces one set of arrays: passes have a lane per size and variant, events
between blocks an entry per class.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Collective, Op
from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._communication import (
    PartitionedStep,
    communication_events,
    event_entries,
    summed,
)
from perfmodel.prediction._compose import LayoutBatch, weighted_programs
from perfmodel.prediction._price import PriceTable, priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._step_costs import Overlap, overlap_loss
from perfmodel.prediction.blocks import BlockTimes
from perfmodel.prediction.differentiable._prices import PriceRequest, joined_prices, prices
from perfmodel.prediction.differentiable._program import Cuts, Programs, Tables, Times
from perfmodel.prediction.host import host_bandwidth, host_block_s
from perfmodel.prediction.layer_copies import CopyClasses, LayerCopies, offloads_layers
from perfmodel.prediction.overlap import BlockEvents
from perfmodel.prediction.phases import Variant, modes_of
from perfmodel.prediction.sites import factors_of
from perfmodel.program import PAIRED
from perfmodel.spec import Layout

MOST_KNOTS: Final = 12
"""Most numbers of layers at which a stage's reductions, gathers and updates are priced. Between
these they are interpolated, because they are nearly linear in their size."""
_PER_OP: Final = (
    "counts",
    "kernel",
    "attention",
    "ring_product",
    "in_rings",
    "overlappable",
    "beside_attention",
    "follows",
    "lateness",
    "lost",
)
"""Fields of `BlockEvents` whose last axis is of events."""


class _Part(NamedTuple):
    """A program that is part of the step of one micro-batch size."""

    step: int
    """Index of the micro-batch size."""
    batches: list[LayoutBatch]
    """The layout in this program, under each element type."""
    weight: float
    """Weight of its makespan in the step time."""


class _Between(NamedTuple):
    """Events between blocks at all knots of the number of layers."""

    ops: tuple[Op, ...]
    """Distinct events."""
    knot: Int[np.ndarray, " entries"]
    """Knot of every occurrence."""
    class_index: Int[np.ndarray, " entries"]
    """Class of every occurrence."""
    op_index: Int[np.ndarray, " entries"]
    """Event (place in `ops`) of every occurrence."""


class ComposedLayout(NamedTuple):
    """A layout as a differentiable function of its machine needs it."""

    programs: Programs
    tables: Tables
    times: Times
    """Times on the machine as it is."""
    families: list[str]
    """Op families of the kernels."""


def composed(
    problems: Sequence[StepProblem],
    steps: Sequence[Sequence[LayoutBatch]],
    layers: Int[np.ndarray, " stages"],
    scales: Sequence[float],
    *,
    elastic: bool,
) -> ComposedLayout:
    """Compose the programs of a layout.

    Args:
        problems: the problem under each of its element types.
        steps: batches by micro-batch size and element type, with the one layout as its only lane,
            which recomputes nothing in full.
        layers: layers of every stage.
        scales: factor of the step of each size.
        elastic: whether prices follow the machine's rates.
    """
    problem, layout_batch = problems[0], steps[0][0]
    spec = layout_batch.spec
    parts = _parts(steps)
    lanes = _lanes(parts)

    # Blocks of every lane under every element type.
    batches_of_types: list[list[LayoutBatch]] = []
    for i in range(len(problems)):
        batches_of_types.append([batches[i] for batches in steps])
    shards: list[BlockTimes] = []
    requests: list[PriceRequest] = []
    for type_problem, batches in zip(problems, batches_of_types, strict=True):
        for step, variant in lanes:
            lane_layout = batches[step].layouts[0]
            table = block_times(type_problem, lane_layout, variant, spec.scheduler.slices)
            shards.append(table)
            pricer = _block_pricer(lane_layout, variant, spec.scheduler.slices)
            requests.append(PriceRequest(type_problem, table.ops, pricer))
    events, places = _stacked([shard.events for shard in shards], (len(problems), len(lanes)))
    programs = _programs(problem, layout_batch, parts, lanes, events)
    starts = programs.starts
    cuts = Cuts.of(layout_batch.composed[0].events, spec.segments)
    knots = _knots(layers)

    between = _between_blocks(problems, parts, starts, cuts, knots, layers)
    requests += between.requests

    # All events are priced at once. Prices of one request follow those of the one before it.
    family_names = _kernel_families(requests)
    first_price = np.cumsum([0, *(len(request.ops) for request in requests)])
    priced = joined_prices(prices(requests, family_names, elastic=elastic))
    first_between = first_price[len(shards) : -1]
    entry_at = np.concatenate(between.entries)
    entry_price = np.concatenate(
        [begin + ops for begin, ops in zip(first_between, between.entry_ops, strict=True)]
    )

    # Times on the unchanged machine, for functions in which neither rates nor host costs vary.
    shape = len(problems), len(knots), starts[-1]
    between_s = summed(entry_at, priced.time_s[entry_price], prod(shape)).reshape(shape)
    times = Times(_phase_s_of_lanes(shards, lanes, len(problems)), between_s)
    tables = Tables(
        prices=priced,
        events=events,
        event_price=places + first_price[: len(shards)].reshape(*places.shape[:2], 1),
        entry_at=entry_at,
        entry_price=entry_price,
        knots=knots.astype(float),
        runs=_runs_of_lanes(parts, lanes, starts),
        cuts=cuts,
        beside=_joined([part.batches[0].program.overlap for part in parts], starts),
        scale=np.repeat([scales[step] for step in programs.steps], np.diff(starts)),
        **_host_tables(problems, batches_of_types, programs),
    )
    return ComposedLayout(programs, tables, times, family_names)


class _EventsBetween(NamedTuple):
    """Events between blocks, by type of device and part of the program."""

    entries: list[np.ndarray]
    """Places in a table of (type, knot, class) to which events add."""
    entry_ops: list[np.ndarray]
    """Event of the request that each place adds."""
    requests: list[PriceRequest]
    """Requests for the events' prices."""


def _between_blocks(
    problems: Sequence[StepProblem],
    parts: Sequence[_Part],
    starts: Sequence[int],
    cuts: Cuts,
    knots: Int[np.ndarray, " knots"],
    layers: Int[np.ndarray, " stages"],
) -> _EventsBetween:
    """Events between blocks under each type of device."""
    entries: list[np.ndarray] = []
    entry_ops: list[np.ndarray] = []
    requests: list[PriceRequest] = []
    for i, type_problem in enumerate(problems):
        for part, begin in zip(parts, starts[:-1], strict=True):
            events_between = _events_at_knots(type_problem, part.batches[i], cuts, knots, layers)
            entries.append(
                (i * len(knots) + events_between.knot) * starts[-1]
                + begin
                + events_between.class_index
            )
            entry_ops.append(events_between.op_index)
            requests.append(
                PriceRequest(type_problem, events_between.ops, _event_pricer(events_between.ops))
            )
    return _EventsBetween(entries, entry_ops, requests)


def _parts(steps: Sequence[Sequence[LayoutBatch]]) -> list[_Part]:
    """The programs of all micro-batch sizes: one each, or two where no flush separates steps."""
    parts = []
    for step, batches in enumerate(steps):
        # Element types share the programs, and so their weights.
        for same_program in zip(*map(weighted_programs, batches), strict=True):
            program_batches, weights = zip(*same_program, strict=True)
            parts.append(_Part(step, list(program_batches), weights[0]))
    return parts


def _lanes(parts: Sequence[_Part]) -> list[tuple[int, Variant]]:
    """Every micro-batch size with every variant of its passes: blocks take the same time in all
    programs of a lane."""
    lanes: list[tuple[int, Variant]] = []
    for part in parts:
        variants = part.batches[0].program.passes.runs
        lanes += [(part.step, variant) for variant in variants if (part.step, variant) not in lanes]
    return lanes


def _programs(
    problem: StepProblem,
    layout_batch: LayoutBatch,
    parts: Sequence[_Part],
    lanes: Sequence[tuple[int, Variant]],
    events: BlockEvents,
) -> Programs:
    """The programs of all parts, with everything that does not depend on the parameters."""
    layout = layout_batch.layouts[0]
    spec = layout_batch.spec
    return Programs(
        prepared=tuple(prepared(part.batches[0].spec) for part in parts),
        steps=tuple(part.step for part in parts),
        weights=tuple(part.weight for part in parts),
        lanes=tuple((step, variant.beside == PAIRED) for step, variant in lanes),
        mode=int(modes_of([layout.recompute])[0]),
        loss=overlap_loss(problem),
        ring_steps=layout.tp if layout.overlap.tp_overlap else 1,
        absent=tuple(
            name for name in ("overlappable", "beside_attention") if not getattr(events, name).any()
        ),
        slices=spec.scheduler.slices,
        offloads=spec.offload,
        offloads_layers=offloads_layers(problem, layout),
        host_states=layout.offload_states != "none",
        ranks=tuple(map(tuple, spec.stage_map.tolist())),
    )


def _phase_s_of_lanes(
    shards: Sequence[BlockTimes], lanes: list[tuple[int, Variant]], n_types: int
) -> Float[np.ndarray, "lanes types blocks phases"]:
    """Seconds of the blocks' phases; in lanes of paired passes those of a pair.

    Args:
        shards: times of the blocks, for each element type those of all lanes.
    """
    phase_s = []
    for shard, (_, variant) in zip(shards, lanes * n_types, strict=True):
        phase_s.append(shard.paired.phase_s if variant.beside == PAIRED else shard.phase_s)
    by_type = np.reshape(phase_s, (n_types, len(lanes), *phase_s[0].shape))
    return by_type.swapaxes(0, 1)


def _runs_of_lanes(
    parts: Sequence[_Part], lanes: Sequence[tuple[int, Variant]], starts: Sequence[int]
) -> Float[np.ndarray, "lanes passes classes"]:
    """Passes that run in each lane, for the classes of all programs one after another."""
    runs_of_parts = [part.batches[0].program.passes.runs for part in parts]
    n_passed = len(next(iter(runs_of_parts[0].values())))
    runs_of_lanes = np.zeros((len(lanes), n_passed, starts[-1]))
    for part, runs, begin, end in zip(parts, runs_of_parts, starts[:-1], starts[1:], strict=True):
        for variant, runs_of_variant in runs.items():
            runs_of_lanes[lanes.index((part.step, variant)), :, begin:end] = runs_of_variant
    return runs_of_lanes


def _kernel_families(requests: Sequence[PriceRequest]) -> list[str]:
    """Op families of the kernels of requests."""
    families: set[str] = set()
    for request in requests:
        families.update(factors_of(op)[1] for op in request.ops if not isinstance(op, Collective))
    return sorted(families)


def _host_tables(
    problems: Sequence[StepProblem],
    batches_of_types: Sequence[Sequence[LayoutBatch]],
    programs: Programs,
) -> dict[str, Any]:
    """The fields of `Tables` of the host: costs per unit of their parameters, copies of
    activations, states in its memory."""
    problem, layout_batch = problems[0], batches_of_types[0][0]
    layout = layout_batch.layouts[0]
    blocks = layout_batch.composed[0].events
    unit = replace(
        problem, framework=problem.framework.replace(host_op_s=1.0, kernel_gap_s=1.0)
    ).adjusted_framework

    # Activations of a stage, or of single layers, are copied at the link's rate.
    copies_to_host = programs.offloads or programs.offloads_layers
    copies = LayerCopies.of(blocks, layout.offload_layers if programs.offloads_layers else 0)
    per_segment = (layout_batch.program.counts[0] @ blocks.layers).astype(int).tolist()
    copy_classes = [
        CopyClasses.of(copies, program.structure, per_segment) for program in programs.prepared
    ]
    saved_bytes, host_state_s = [], []
    for type_problem, batches in zip(problems, batches_of_types, strict=True):
        saved_bytes.append([_saved_bytes(batch) for batch in batches])
        state_blocks = batches[0].composed[0].events
        host_state_s.append(
            host_block_s(type_problem.setting, layout, state_blocks, layout_batch.spec)
        )
    return {
        "saved_bytes": np.array(saved_bytes),
        "host_bytes_per_s": np.float64(
            host_bandwidth(problem.cluster.device) if copies_to_host else 1.0
        ),
        "copies": copies,
        "copy_classes": CopyClasses(
            forward=np.concatenate([classes.forward for classes in copy_classes]),
            backward=np.concatenate([classes.backward for classes in copy_classes]),
        ),
        "host_state_s": np.stack(host_state_s),
        "overhead_s": np.float64(problem.adjusted_framework.host.step_overhead_s),
        "host_units": np.array([unit.host.issue_s, unit.host.kernel_gap_s]),
    }


def _block_pricer(
    layout: Layout, variant: Variant, slices: int
) -> Callable[[StepProblem, PriceTable], Float[np.ndarray, " n"]]:
    """Prices the events of a layout's blocks."""
    return lambda problem, table: block_times(problem, layout, variant, slices, table).times.time_s


def _event_pricer(
    ops: Sequence[Op],
) -> Callable[[StepProblem, PriceTable], Float[np.ndarray, " n"]]:
    """Prices events between blocks."""
    return lambda problem, table: priced_events(problem, ops, table).time_s


def _stacked(
    events: Sequence[BlockEvents], shape: tuple[int, int]
) -> tuple[BlockEvents, Int[np.ndarray, "types lanes ops"]]:
    """Stack the events of several shards.

    Args:
        shape: element types and lanes of the shards.

    Returns:
        Events, padded with unused ones to the length of the longest shard; and the place of each
        event in its shard.
    """
    n = max(shard.counts.shape[-1] for shard in events)
    missing = [n - shard.counts.shape[-1] for shard in events]
    fields: dict[str, Any] = {}
    for name in BlockEvents._fields:
        values = [np.asarray(getattr(shard, name)) for shard in events]
        if name in _PER_OP:
            for i, value in enumerate(values):
                padding = np.zeros((value.ndim, 2), int)
                padding[-1, 1] = missing[i]
                values[i] = np.pad(value, padding)
        fields[name] = np.stack(values).reshape(*shape, *values[0].shape)
    places = [np.where(np.arange(n) < n - n_missing, np.arange(n), 0) for n_missing in missing]
    return BlockEvents(**fields), np.reshape(places, (*shape, n))


def _saved_bytes(layout_batch: LayoutBatch) -> Float[np.ndarray, "2 blocks"]:
    """Bytes of activations that blocks save, and the reduction of these bytes if they are
    recomputed in full."""
    blocks = layout_batch.bytes
    return np.stack([blocks.kept_bytes[0], (blocks.kept_bytes - blocks.kept_full_bytes)[0]])


def _joined(overlaps: Sequence[Overlap], starts: Sequence[int]) -> Overlap:
    """Join the overlaps of programs whose classes are concatenated."""
    comm = []
    place = []
    share = []
    slowed = []
    n_slowed = 0
    for overlap, start in zip(overlaps, starts[:-1], strict=True):
        comm.append(overlap.comm + start)
        place.append(overlap.place + n_slowed)
        share.append(overlap.share)
        slowed.append(overlap.slowed + start)
        n_slowed += len(overlap.slowed)
    return Overlap(
        np.concatenate(comm), np.concatenate(place), np.concatenate(share), np.concatenate(slowed)
    )


def _knots(layers: Int[np.ndarray, " stages"]) -> Int[np.ndarray, " knots"]:
    """Numbers of layers of a stage at which events between blocks are priced."""
    # All of them if there are few; else as many as are spread over the range, and those next to the
    # stages' own.
    low = layers.min() // 2
    high = min(2 * layers.max(), layers.sum())
    neighbours = np.unique([layers - 1, layers, layers + 1])
    spread = np.unique(np.linspace(low, high, MOST_KNOTS).astype(int))
    knots = (
        np.unique([*neighbours, *spread]) if high - low >= MOST_KNOTS else np.arange(low, high + 1)
    )
    return knots[(knots >= 0) & (knots <= layers.sum())]


def _events_at_knots(
    problem: StepProblem,
    layout_batch: LayoutBatch,
    cuts: Cuts,
    knots: Int[np.ndarray, " knots"],
    layers: Int[np.ndarray, " stages"],
) -> _Between:
    """Events between blocks at all knots, where every stage has the number of layers of the
    knot."""
    placed, structure = layout_batch.composed[0].placed, layout_batch.program.structure
    index: dict[Op, int] = {}
    knot_of_entry, class_of_entry, op_of_entry = [], [], []
    starts = np.cumsum(layers) - layers
    # Knots share most events: each distinct one is numbered once, so that it is priced once.
    for knot, n in enumerate(knots.tolist()):
        step = PartitionedStep(
            ranks=placed.ranks,
            states=placed.states,
            blocks=placed.blocks,
            spec=layout_batch.spec,
            counts=cuts.equal_stages(n, starts),
            job=problem.job,
            cluster=problem.cluster,
        )
        events = communication_events(step, structure.spans)
        classes, numbers = event_entries(structure, events)
        place = np.array([index.setdefault(op, len(index)) for op in events.ops], int)
        knot_of_entry.append(np.full(len(classes), knot))
        class_of_entry.append(classes)
        op_of_entry.append(place[numbers])
    return _Between(
        ops=tuple(index),
        knot=np.concatenate(knot_of_entry),
        class_index=np.concatenate(class_of_entry),
        op_index=np.concatenate(op_of_entry),
    )
