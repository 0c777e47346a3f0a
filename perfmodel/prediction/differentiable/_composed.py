"""From a layout to the programs and tables of its step-time function: all that is done once, in NumPy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Collective, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._communication import communication_events, event_entries, summed
from perfmodel.prediction._compose import LayoutBatch, weighted_programs
from perfmodel.prediction._layer_copies import CopyClasses, LayerCopies, offloads_layers
from perfmodel.prediction._overlap import BlockEvents
from perfmodel.prediction._phases import Variant, modes_of
from perfmodel.prediction._price import block_times, priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._step_costs import Overlap, beside_loss
from perfmodel.prediction._zero import host_bandwidth, host_block_s
from perfmodel.prediction.differentiable._prices import Priced, Prices, prices
from perfmodel.prediction.differentiable._program import Cuts, Programs, Tables, Times
from perfmodel.program import PAIRED
from perfmodel.spec import Layout

MOST_KNOTS: Final = 12
"""Numbers of layers at which a stage's reductions, gathers and updates are priced; between them they are interpolated,
and they are nearly linear in what they carry."""
_PER_OP: Final = ("counts", "kernel", "attention", "ring_product", "in_rings", "overlappable", "beside_attention",
                  "follows", "lateness", "lost")  # fmt: skip
"""Fields of `BlockEvents` whose last axis is of events."""


def composed(
    problems: Sequence[StepProblem],
    steps: Sequence[Sequence[LayoutBatch]],
    layers: Int[np.ndarray, " stages"],
    scales: Sequence[float],
    *,
    elastic: bool,
) -> tuple[Programs, Tables, Times, list[str]]:
    """The programs of a layout, made of what the public prediction composes them, times on the machine as it is, and
    the op families of kernels.

    Args:
        problems: of the job under each of its element types.
        steps: by micro-batch size and element type, with the one layout as its only lane, which recomputes nothing in
            full.
        layers: of every stage.
        scales: what the step of each size is multiplied by.
        elastic: whether prices follow the machine's rates.
    """
    problem, layout_batch = problems[0], steps[0][0]
    spec, layout, slices = layout_batch.spec, layout_batch.layouts[0], layout_batch.spec.scheduler.slices
    parts = [
        (step, [of_type for of_type, _ in part], part[0][1])
        for step, of_types in enumerate(steps)
        for part in zip(*map(weighted_programs, of_types), strict=True)
    ]
    runs = [of_types[0].program.passes.runs for _, of_types, _ in parts]
    lanes = list(dict.fromkeys((step, v) for (step, *_), of in zip(parts, runs, strict=True) for v in of))
    by_type = list(zip(problems, zip(*steps, strict=True), strict=True))
    shards: list[BlockTimes] = []
    asked: list[Priced] = []
    for own, of_sizes in by_type:
        for step, variant in lanes:
            its = of_sizes[step].layouts[0]
            table = block_times(own, its, variant, slices)
            shards.append(table)
            asked.append(Priced(own, table.ops, _block_pricer(its, variant, slices)))
    events, places = _stacked([shard.events for shard in shards], (len(problems), len(lanes)))
    programs = Programs(
        prepared=tuple(prepared(of_types[0].spec) for _, of_types, _ in parts),
        steps=tuple(step for step, *_ in parts),
        weights=tuple(weight for *_, weight in parts),
        lanes=tuple((step, variant[2] == PAIRED) for step, variant in lanes),
        mode=int(modes_of([layout.recompute])[0]),
        loss=beside_loss(problem),
        ring_steps=layout.tp if layout.tp_overlap else 1,
        absent=tuple(name for name in ("overlappable", "beside_attention") if not getattr(events, name).any()),
        slices=slices,
        offloads=spec.offload,
        offloads_layers=offloads_layers(problem, layout),
        host_states=layout.offload_states != "none",
        ranks=tuple(map(tuple, spec.stage_map.tolist())),
    )
    starts, cuts, knots = programs.starts, Cuts.of(layout_batch.composed[0].events, spec.segments), _knots(layers)
    of_lanes = np.zeros((len(lanes), *next(iter(runs[0].values())).shape[:1], starts[-1]))
    for (step, *_), of, begin, end in zip(parts, runs, starts[:-1], starts[1:], strict=True):
        for variant, where in of.items():
            of_lanes[lanes.index((step, variant)), :, begin:end] = where

    between: list[tuple[np.ndarray, np.ndarray]] = []
    for i, own in enumerate(problems):
        for (_, of_types, _), begin in zip(parts, starts[:-1], strict=True):
            ops, knot, of_class, which = _between(own, of_types[i], cuts, knots, layers)
            between.append((((i * len(knots) + knot) * starts[-1] + begin + of_class), which))
            asked.append(Priced(own, ops, lambda p, ops=ops: priced_events(p, ops).time_s))
    families = sorted({factors_of(op)[1] for one in asked for op in one.ops if not isinstance(op, Collective)})
    first = np.cumsum([0, *(len(one.ops) for one in asked)])

    priced = Prices(*map(np.concatenate, zip(*prices(asked, families, elastic=elastic), strict=True)))
    entry_at = np.concatenate([at for at, _ in between])
    entry_price = np.concatenate(
        [begin + which for begin, (_, which) in zip(first[len(shards) : -1], between, strict=True)]
    )
    phase_s = [one.paired.phase_s if variant[2] == PAIRED else one.phase_s
               for one, (_, variant) in zip(shards, lanes * len(problems), strict=True)]  # fmt: skip
    shape = len(problems), len(knots), starts[-1]
    times = Times(
        np.reshape(phase_s, (len(problems), len(lanes), *phase_s[0].shape)).swapaxes(0, 1),
        summed(entry_at, priced.time_s[entry_price], prod(shape)).reshape(shape),
    )
    unit = replace(problem, framework=replace(problem.framework, host_op_s=1.0, kernel_gap_s=1.0)).host
    blocks = layout_batch.composed[0].events
    copies = LayerCopies.of(blocks, layout.offload_layers if programs.offloads_layers else 0)
    per_segment = (layout_batch.counts[0] @ blocks.layers).astype(int).tolist()
    where = [CopyClasses.of(copies, program.structure, per_segment) for program in programs.prepared]
    tables = Tables(
        prices=priced,
        events=events,
        event_price=places + first[: len(shards)].reshape(*places.shape[:2], 1),
        entry_at=entry_at,
        entry_price=entry_price,
        knots=knots.astype(float),
        runs=of_lanes,
        cuts=cuts,
        saved_bytes=np.array([[_saved_bytes(own, b) for b in of_sizes] for own, of_sizes in by_type]),
        host_bytes_per_s=np.float64(
            host_bandwidth(problem.cluster.device) if programs.offloads or programs.offloads_layers else 1.0
        ),
        copies=copies,
        copy_classes=CopyClasses(*(np.concatenate(ways) for ways in zip(*where, strict=True))),
        host_state_s=np.stack(
            [host_block_s(own.setting, layout, of_sizes[0].composed[0].events, spec) for own, of_sizes in by_type]
        ),
        beside=_joined([of_types[0].program.beside for _, of_types, _ in parts], starts),
        scale=np.repeat([scales[step] for step in programs.steps], np.diff(starts)),
        overhead_s=np.float64(problem.host.step_overhead_s),
        host_units=np.array([unit.issue_s, unit.kernel_gap_s]),
    )
    return programs, tables, times, families


def _block_pricer(layout: Layout, variant: Variant, slices: int) -> Callable[[StepProblem], Float[np.ndarray, " n"]]:
    return lambda problem: block_times(problem, layout, variant, slices).times.time_s


def _stacked(
    events: Sequence[BlockEvents], shape: tuple[int, int]
) -> tuple[BlockEvents, Int[np.ndarray, "types lanes ops"]]:
    """Events of several shards in one, as many as the longest has (those added occur nowhere), and the place of each
    in its own."""
    n = max(one.counts.shape[-1] for one in events)
    short = [n - one.counts.shape[-1] for one in events]
    fields: dict[str, Any] = {}
    for name in BlockEvents._fields:
        values = [np.asarray(getattr(one, name)) for one in events]
        if name in _PER_OP:
            values = [np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, by)]) for v, by in zip(values, short, strict=True)]
        fields[name] = np.stack(values).reshape(*shape, *values[0].shape)
    places = [np.where(np.arange(n) < n - by, np.arange(n), 0) for by in short]
    return BlockEvents(**fields), np.reshape(places, (*shape, n))


def _saved_bytes(problem: StepProblem, layout_batch: LayoutBatch) -> Float[np.ndarray, "2 blocks"]:
    kept = layout_batch.bytes
    return np.stack([kept.kept[0], (kept.kept - kept.least)[0]])


def _joined(beside: Sequence[Overlap], starts: Sequence[int]) -> Overlap:
    """Of programs end to end."""
    before = np.cumsum([0, *(len(one.slowed) for one in beside)])
    moved = [
        Overlap(one.comm + at, one.place + slowed, one.share, one.slowed + at)
        for one, at, slowed in zip(beside, starts[:-1], before[:-1], strict=True)
    ]
    return Overlap(*map(np.concatenate, zip(*moved, strict=True)))


def _knots(layers: Int[np.ndarray, " stages"]) -> Int[np.ndarray, " knots"]:
    low, high = layers.min() // 2, min(2 * layers.max(), layers.sum())
    near = np.unique([layers - 1, layers, layers + 1])
    spread = np.unique(np.linspace(low, high, MOST_KNOTS).astype(int))
    found = np.unique([*near, *spread]) if high - low >= MOST_KNOTS else np.arange(low, high + 1)
    return found[(found >= 0) & (found <= layers.sum())]


def _between(
    problem: StepProblem,
    layout_batch: LayoutBatch,
    cuts: Cuts,
    knots: Int[np.ndarray, " knots"],
    layers: Int[np.ndarray, " stages"],
) -> tuple[tuple[Op, ...], *tuple[Int[np.ndarray, " entries"], ...]]:
    """Distinct events between blocks at all knots, and where each occurs: knot, class, and which it is."""
    one, structure = layout_batch.composed[0].placed, layout_batch.program.structure
    spans = np.unique(structure.variants[:, 0]).tolist()
    index: dict[Op, int] = {}
    found = []
    starts = np.cumsum(layers) - layers
    for at, n in enumerate(knots.tolist()):
        counts = cuts.alike(n, starts)
        events = communication_events(
            one.ranks, one.states, one.blocks, layout_batch.spec, spans, counts, problem.job, problem.cluster
        )
        classes, numbers = event_entries(structure, events)
        place = np.array([index.setdefault(op, len(index)) for op in events.ops], int)
        found.append((np.full(len(classes), at), classes, place[numbers]))
    return (tuple(index), *map(np.concatenate, zip(*found, strict=True)))
