"""Builds a structure from a spec, in vectorised NumPy and linear time.

The ops and edges of all parts of a step, once sorted, become a structure: stream order, end of the
step, binary joins, classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.program._communication import (
    add_layer_gathers,
    add_offloads,
    add_reductions,
    add_step_gathers,
    add_transfers,
)
from perfmodel.program._passes import add_passes, variants_of
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import (
    NO_STREAM,
    Edges,
    Ids,
    ProgramOrder,
    Structure,
    StructureBuilder,
)
from perfmodel.program._updates import add_step_end, add_updates
from perfmodel.schedule import Schedule, require_valid


def build(spec: ProgramSpec, schedule: Schedule | None = None) -> Structure:
    """The structure of one step.

    Classes are one per (kind, variant, global stage, segment) that occurs. A class of segment
    0..S-1 covers that layer group of the stage; where a structure has split ops beside whole ones,
    whole ones have segment `WHOLE` (-1). With one segment all are 0. Transfers are classed by the
    sending stage, the optimizer by the stage of its device's chunk 0 (the op updates all chunks).

    Args:
        spec: schedule, stages and options of the step.
        schedule: an order of one's own in place of the one that `spec.schedule` names.

    Raises:
        PerfModelError: the schedule lacks or repeats work, or deadlocks.
    """
    # Schedules of this package do all work and never deadlock, which tests hold them to (`check`).
    is_of_package = schedule is None and spec.digest == ""
    schedule = spec.build_schedule() if schedule is None else schedule
    if not is_of_package:
        require_valid(schedule)

    # Parts are added in any order; keys put their ops into program order when the builder sorts
    # them. Before an instruction there is room for the gathers of a whole step (in a stream of
    # steps), or for those that layers are ahead.
    variants = variants_of(schedule, spec.combines_passes)
    builder = StructureBuilder(schedule.devices, schedule.n_stages, spec.segments, variants.table)
    is_stream = bool(schedule.updates.any())
    most_gathers = schedule.chunks * spec.segments if is_stream else 0
    order = ProgramOrder(
        schedule.devices, spec.segments, lead_in=max(most_gathers, spec.gathers_ahead)
    )
    passes = add_passes(builder, spec, schedule, variants, order)
    arrivals = add_transfers(builder, spec, passes, order)
    if spec.offload:
        add_offloads(builder, passes, order)
    add_reductions(builder, spec, passes, order)
    optimizers: Ids = np.zeros(0, np.int64)
    if is_stream and spec.optimizer:
        optimizers = add_updates(builder, spec, passes, order)
    if spec.gathers_by_layer:
        add_layer_gathers(builder, spec, passes, order, optimizers, arrivals)
    if spec.param_gather == "step_overlap" and not is_stream:
        add_step_gathers(builder, spec, passes, order)
    builder.sort()

    # The end of the step waits for the last op of each stream, so it is added after the sort.
    add_step_end(builder, spec, schedule)
    return _assembled(builder)


def _assembled(builder: StructureBuilder) -> Structure:
    """The structure of a builder whose ops are in program order."""
    builder.edges = [_without_implied(builder, edges) for edges in builder.edges]

    # The ops of each stream run one after another. NumPy sorts 16-bit integers by radix, in linear
    # time.
    stream = builder.columns().stream
    order = np.argsort(stream.astype(np.int16 if stream.max() < 2**15 else np.int32), kind="stable")
    follows = (stream[order[1:]] == stream[order[:-1]]) & (stream[order[1:]] != NO_STREAM)
    builder.connect(order[:-1][follows], order[1:][follows])

    # The last op, the end of the step, joins all ops that nothing else waits for.
    waited_for: Bool[np.ndarray, " ops"] = np.zeros(builder.n_ops, bool)
    for edges in builder.edges:
        waited_for[edges.source] = True
    builder.connect(np.flatnonzero(~waited_for), builder.add_join())

    # Joins get places of their own between the ops added, whose columns spread out accordingly.
    position, pred, lag_code = binary_joins(builder.n_ops, builder.edges)
    ops = builder.columns()
    class_code = _placed_between_joins(ops.class_code, position, 0)
    classes = _classes(builder, class_code, lag_code)
    return Structure(
        duration=classes.number[class_code],
        pred=pred,
        lag=classes.number[lag_code],
        stream=_placed_between_joins(ops.stream, position, NO_STREAM),
        micro_batch=_placed_between_joins(ops.micro_batch, position, -1),
        class_kind=classes.kind,
        class_stage=classes.stage,
        class_segment=classes.segment,
        class_variant=classes.variant,
        variants=builder.variants,
        alloc=_placed_between_joins(ops.alloc, position, 0),
        free=_placed_between_joins(ops.free, position, 0),
        devices=builder.devices,
    )


def _placed_between_joins(column: Ids, position: Ids, join: int) -> Int[np.ndarray, " ops"]:
    """A column of added ops as one of all ops; joins have the value `join`."""
    column_with_joins = np.full(position[-1] + 1, join, np.int32)
    column_with_joins[position] = column
    return column_with_joins


class _Classes(NamedTuple):
    """Numbers of the class codes that occur, `Kind.ZERO` first, with their meaning."""

    number: Int[np.ndarray, " codes"]
    """Number of every code up to the largest; undefined for codes that do not occur."""
    kind: Int[np.ndarray, " classes"]
    variant: Int[np.ndarray, " classes"]
    stage: Int[np.ndarray, " classes"]
    segment: Int[np.ndarray, " classes"]


def _classes(builder: StructureBuilder, *codes: Ids) -> _Classes:
    """Number the class codes that occur, in their order."""
    occurs = np.zeros(max(int(code.max()) for code in codes) + 1, bool)
    occurs[0] = True
    for code in codes:
        occurs[code] = True
    number = (np.cumsum(occurs) - 1).astype(np.int32)

    # Undo `StructureBuilder.class_code`.
    known = np.flatnonzero(occurs).astype(np.int32)
    kind_and_stage, segment = np.divmod(known, builder.segments + 1)
    kind_and_variant, stage = np.divmod(kind_and_stage, builder.n_stages)
    kind, variant = np.divmod(kind_and_variant, len(builder.variants))
    segment = np.where(known == 0, 0, segment - 1) if builder.segments > 1 else np.zeros_like(known)
    return _Classes(number, kind, variant, stage, segment)


def _without_implied(builder: StructureBuilder, edges: Edges) -> Edges:
    """Drop edges between ops of one stream that its order already implies."""
    # An edge with a lag still says more than the order does.
    stream = builder.columns().stream
    destination_stream = stream[edges.destination]
    crosses = stream[edges.source] != destination_stream
    is_needed = crosses | (destination_stream == NO_STREAM) | (edges.lag_code > 0)
    if is_needed.all():
        return edges
    return Edges(edges.source[is_needed], edges.destination[is_needed], edges.lag_code[is_needed])


class BinaryJoins(NamedTuple):
    """Ops of which each waits for at most two others."""

    position: Int[np.ndarray, " added"]
    """Final position of each added op; joins stand between them."""
    pred: Int[np.ndarray, "ops 2"]
    """Predecessors of all ops; -1 for none."""
    lag_code: Int[np.ndarray, "ops 2"]
    """Codes of the classes of the delays after these predecessors."""


def binary_joins(n_ops: int, added: Sequence[Edges]) -> BinaryJoins:
    """Expand ops with more than two predecessors into trees of joins placed right before them.

    With k predecessors the tree is a binary heap of 2k - 1 nodes: node 0 is the op, nodes 1 to k -
    2 are joins, n places before the op, the rest are the predecessors; node n has children 2n + 1,
    2n + 2.

    Args:
        n_ops: added ops, numbered so that edges go to higher numbers.
        added: all edges, in as many pieces as they were added in.
    """
    edges = Edges(*map(np.concatenate, zip(*added, strict=True)))
    place = np.concatenate(_places(n_ops, added))
    degree = np.bincount(edges.destination, minlength=n_ops)
    position = np.arange(n_ops) + np.cumsum(np.maximum(degree - 2, 0))
    pred = np.full((position[-1] + 1, 2), -1, np.int32)
    lag_code = np.zeros_like(pred)

    # Ops of one or two predecessors need no tree, and are nearly all.
    direct = degree[edges.destination] <= 2
    row, side = position[edges.destination[direct]], place[direct]
    pred[row, side] = position[edges.source[direct]]
    lag_code[row, side] = edges.lag_code[direct]
    if direct.all():
        return BinaryJoins(position, pred, lag_code)

    # The edges of ops with more predecessors, op by op, are the leaves of their trees.
    wide = np.flatnonzero(degree > 2)
    k = degree[wide]
    leaf_start = np.zeros(n_ops, np.int64)
    leaf_start[wide] = np.cumsum(k) - k
    leaf = np.empty(int(k.sum()), np.int64)
    leaf[leaf_start[edges.destination[~direct]] + place[~direct]] = np.flatnonzero(~direct)

    # Inner nodes of all trees at once: each points to two children, which are joins or leaves.
    op = np.repeat(wide, k - 1)
    node = np.arange(len(op)) - np.repeat(np.cumsum(k - 1) - (k - 1), k - 1)
    joins = degree[op] - 1
    for side in (0, 1):
        child = 2 * node + 1 + side
        is_leaf = child >= joins
        edge = leaf[leaf_start[op] + np.where(is_leaf, child - joins, 0)]
        row = position[op] - node
        pred[row, side] = np.where(is_leaf, position[edges.source[edge]], position[op] - child)
        lag_code[row, side] = np.where(is_leaf, edges.lag_code[edge], 0)
    return BinaryJoins(position, pred, lag_code)


def _places(n_ops: int, added: Sequence[Edges]) -> list[Ids]:
    """Index of every edge among the edges of its destination.

    Args:
        n_ops: number of ops, of which some are destinations.
        added: pieces of edges, in the order in which they were added.
    """
    edges_before = np.zeros(n_ops, np.int64)
    places = []
    for edges in added:
        # After the edges of earlier pieces. Where all destinations are distinct, none needs
        # sorting.
        edges_of_op = np.bincount(edges.destination, minlength=n_ops)
        place = edges_before[edges.destination]
        if edges_of_op.max() > 1:
            # Sorted by destination, the edges of an op stand in one run: an edge's place is its
            # distance from the run's first.
            order = np.argsort(edges.destination, kind="stable")
            first_of_run = np.cumsum(edges_of_op) - edges_of_op
            place[order] += np.arange(len(order)) - first_of_run[edges.destination[order]]
        edges_before += edges_of_op
        places.append(place)
    return places
