"""The loops that run a compiled program: one lane, sixteen lanes, or a tile of lanes by bundles.

XLA:CPU turns a `while` whose body touches less than about 1 kB per iteration into a single
function, and otherwise dispatches every fusion of the body on its own (30 to 60 times slower for
scalars). The loops over single ops stay below that limit: scalars are read one by one from flat
tables, by forms that XLA:CPU compiles to single instructions (unsigned indices need no test for
negative ones, and in-place updates by `dynamic_update` stay in place), and a value just written is
read back from the new state (reading the old one would copy the slots at every step).
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from perfmodel.timeline._tables import (
    BUNDLE,
    DESTINATION,
    DURATION,
    GROUP,
    LAG_A,
    LAG_B,
    NEVER_S,
    NEVER_SLOT,
    RESULT_SLOT,
    SOURCE_A,
    SOURCE_B,
    SPARE_SLOT,
    BundleTables,
    OpTables,
)

LANES: Final = 16
"""Number of lanes in a row, in the loop over single ops."""
TILE: Final = 128
"""Number of lanes in the loop over bundles, the fewest for which XLA vectorises its row loops."""
ROW_OPTIONS: Final = {"xla_backend_optimization_level": 2, "xla_cpu_prefer_vector_width": 512}
"""Compiler options of the loop over a row of lanes: LLVM's third level unrolls `LANES` wholly and
leaves them scalar, which takes more than twice as long; a register for all lanes, where there is
one, saves a tenth. (JAX takes no options for a function that is traced inside another.)"""


class Items(NamedTuple):
    """Work items in a table of concatenated programs: each is a program with a row of lanes."""

    first_op: Int[Array | np.ndarray, " items"]
    """Position in the table of the item's first op."""
    n_ops: Int[Array | np.ndarray, " items"]
    first_class: Int[Array | np.ndarray, " items"]
    """Row of the durations that holds the item's class 0."""
    count: Int[Array | np.integer, ""]
    """Number of real items; the rest is padding."""


def rows_needed(lanes: int) -> int:
    """Number of rows of `LANES` that hold a number of lanes."""
    return -(-lanes // LANES)


def one_lane(
    tables: OpTables, durations: Float[Array, " classes"], *, keep_ends: bool
) -> tuple[Float[Array, ""], Float[Array, " positions"]]:
    """Makespan, and with `keep_ends` the end time at every position (else an empty array).

    Solves `end = max_j(end[pred_j] + d[lag_j]) + d[duration]`, `GROUP` ops per step.
    """
    slots = empty_slots(tables.n_slots, durations)
    padded_ops = tables.program.shape[0] // tables.width
    ends = jnp.zeros(padded_ops if keep_ends else 0, durations.dtype)

    # The loop is unrolled by `GROUP`. A last group that is not full runs on into the padding, rows
    # that change nothing.
    def group(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        slots, ends = state
        positions = [unsigned(step) * np.uint32(GROUP) + np.uint32(i) for i in range(GROUP)]
        for position in positions:
            # Where both predecessors release the op at once, the first counts (`b > a`, not `>=`),
            # as in the walk back along the critical path.
            row = _row(tables, position)
            a, b = _released(tables, slots, durations, row, jnp.uint32(0))
            end = jnp.where(b > a, b, a) + read(durations, row[DURATION])
            slots = write(slots, end, row[DESTINATION])
        # Read back from the new slots, in a second pass: the allocation keeps every slot of a group
        # until the group is done.
        if keep_ends:
            for position in positions:
                destination = entry(tables, position, DESTINATION)
                ends = write(ends, read(slots, destination), position)
        return slots, ends

    n_groups = (tables.n_ops + (GROUP - 1)) // GROUP
    slots, ends = lax.fori_loop(np.int32(0), n_groups, group, (slots, ends))
    return slots[RESULT_SLOT], ends


def row_of_lanes(
    tables: OpTables, items: Items, durations: Float[Array, "rows lanes"]
) -> Float[Array, "items lanes"]:
    """Makespan of every item and lane, without recording which predecessors released the ops."""

    no_decisions = jnp.zeros((0, durations.shape[1]), bool)

    def item(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        spans, slots = state
        span, _, slots = run_item(tables, items, i, durations, no_decisions, slots)
        return write(spans, span, unsigned(i)), slots

    spans = jnp.zeros((items.n_ops.shape[0], durations.shape[1]), durations.dtype)
    start = spans, empty_slots(tables.n_slots, durations)
    spans, _ = lax.fori_loop(np.int32(0), items.count, item, start)
    return spans


def run_item(
    tables: OpTables,
    items: Items,
    i: Int[Array, ""],
    durations: Float[Array, "rows lanes"],
    decisions: Bool[Array, "positions lanes"],
    slots: Float[Array, "slots lanes"],
) -> tuple[Float[Array, " lanes"], Bool[Array, "positions lanes"], Float[Array, "slots lanes"]]:
    """Makespan of item `i`, where second predecessors release ops, and the slots.

    `decisions` is an array to write to, or an empty one if they are not wanted. `slots` may hold
    what another item left behind: a program reads no slot that it has not written, but for the
    special ones, which none writes.

    The end of an op is written to its slot at the start of the next step, so that one fusion reads
    all of its operands.
    """
    first_op = unsigned(items.first_op[i])
    first_class = unsigned(items.first_class[i])

    def op(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        # First the end of the op before, still on its way to its slot.
        slots, end, destination, decisions = state
        slots = write(slots, _within_range(end), destination)

        # Then this op, which may read it.
        row = _row(tables, first_op + unsigned(k))
        a, b = _released(tables, slots, durations, row, first_class)
        end = jnp.where(b > a, b, a) + read(durations, first_class + row[DURATION])
        if len(decisions) > 0:
            decisions = write(decisions, b > a, unsigned(k))
        return slots, end, row[DESTINATION], decisions

    # Before the first op there is no end to write; a 0 goes to the slot that nobody reads.
    start = (
        slots,
        jnp.zeros(durations.shape[1], durations.dtype),
        jnp.uint32(SPARE_SLOT),
        decisions,
    )
    slots, end, _, decisions = lax.fori_loop(np.int32(0), items.n_ops[i], op, start)
    return end, decisions, slots


def tile_of_lanes(
    tables: BundleTables, durations: Float[Array, "classes lanes"]
) -> Float[Array, " lanes"]:
    """Makespan of every lane; each step runs a bundle of independent ops for all lanes.

    As in `run_item`, a bundle's ends are written to their slots at the start of the next step.
    Until then they lie in `ends` below a row that is not used: XLA would split the step's
    arithmetic among threads, at many times its cost, were it not part of an update in place.
    """

    def bundle(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        # First the ends of the bundle before, one contiguous block; the row's last entry says
        # where.
        slots, ends = state
        row = unsigned(read(tables.rows, unsigned(k)))
        slots = lax.dynamic_update_slice(slots, ends[1:], (row[-1], jnp.uint32(0)))

        # Then this bundle's ops, side by side, over all lanes.
        columns = [row[i : i + BUNDLE] for i in range(0, row.shape[0] - 1, BUNDLE)]
        source_a, source_b, duration, *lags = columns
        a = gather(slots, source_a)
        b = gather(slots, source_b)
        if tables.has_lags:
            lag_a, lag_b = lags
            a = a + gather(durations, lag_a)
            b = b + gather(durations, lag_b)
        end = jnp.where(b > a, b, a) + gather(durations, duration)
        return slots, lax.dynamic_update_slice(ends, end, (1, 0))

    # The last op is alone in the last bundle, so its end is the first one there, below the unused
    # row.
    lanes = durations.shape[1]
    start = empty_slots(tables.n_slots, durations), jnp.zeros((1 + BUNDLE, lanes), durations.dtype)
    _, ends = lax.fori_loop(np.int32(0), tables.n_bundles, bundle, start)
    return ends[1]


def empty_slots(n: int, durations: Float[Array, "classes *lanes"]) -> Float[Array, "slots *lanes"]:
    """Initial slots; the special ones hold their constants."""
    empty = jnp.zeros((n, *durations.shape[1:]), durations.dtype)
    return empty.at[NEVER_SLOT].set(NEVER_S)


def _within_range(end: Float[Array, " lanes"]) -> Float[Array, " lanes"]:
    """End times unchanged, because none is out of range, but with three extra comparisons.

    LLVM unrolls a bare copy of `LANES` values wholly into scalar moves, from which the vector loads
    of later ops are not forwarded; a loop of as many instructions as this it leaves for the
    vectoriser: an op takes a third less.
    """
    end = jnp.where(end > NEVER_S, end, NEVER_S)
    end = jnp.where(end < -NEVER_S, end, -NEVER_S)
    return jnp.where(end > 2 * NEVER_S, end, 2 * NEVER_S)


def _row(tables: OpTables, position: UInt[Array, ""]) -> list[UInt[Array, ""]]:
    """All columns of the program's row at a position."""
    return [entry(tables, position, column) for column in range(tables.width)]


def entry(
    tables: OpTables, position: UInt[Array, ""], column: int | UInt[Array, ""]
) -> UInt[Array, ""]:
    """One column of the program's row at a position."""
    return unsigned(read(tables.program, position * np.uint32(tables.width) + jnp.uint32(column)))


def _released(
    tables: OpTables,
    slots: Float[Array, "slots *lanes"],
    durations: Float[Array, "classes *lanes"],
    row: list[UInt[Array, ""]],
    first_class: UInt[Array, ""],
) -> tuple[Float[Array, "*lanes"], Float[Array, "*lanes"]]:
    """Times at which the two predecessors release the op of this row."""
    a = read(slots, row[SOURCE_A])
    b = read(slots, row[SOURCE_B])
    if tables.width > LAG_A:
        a = a + read(durations, first_class + row[LAG_A])
    if tables.width > LAG_B:
        b = b + read(durations, first_class + row[LAG_B])
    return a, b


def unsigned(i: Int[Array, "..."]) -> UInt[Array, "..."]:
    """Mark an index as non-negative."""
    return i.astype(jnp.uint32)


def read(array: Array, i: UInt[Array, ""]) -> Array:
    """The element at `i`, `array[i]`."""
    return lax.dynamic_index_in_dim(array, i, keepdims=False)  # pyright: ignore[reportArgumentType]


def write(array: Array, value: Array, i: UInt[Array, ""]) -> Array:
    """`array` with `value` at `i`."""
    return lax.dynamic_update_index_in_dim(array, value, i, 0)  # pyright: ignore[reportArgumentType]


def gather(rows: Float[Array, "n lanes"], i: UInt[Array, " m"]) -> Float[Array, "m lanes"]:
    """`rows[i]`, indices within bounds."""
    return rows.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


# --- backward, along the critical path
# ----------------------------------------------------------------
#
# The makespan is piecewise linear in the durations, so that how often each class lies on the
# critical path is its gradient. Where the two predecessors of an op release it at the same time,
# the first one is on the path.


def counts_of_one_lane(
    tables: OpTables, durations: Float[Array, " classes"], ends: Float[Array, " positions"]
) -> Float[Array, " classes"]:
    """Occurrences of each class on the critical path, from the end time at every position."""

    # Given all end times, a comparison shows which predecessor was the later one.
    def released_by_second(
        position: UInt[Array, ""], first_pred: UInt[Array, ""], second_pred: UInt[Array, ""]
    ) -> Array:
        a = read(ends, first_pred)
        b = read(ends, second_pred)
        if tables.has_lags:
            a = a + read(durations, entry(tables, position, LAG_A))
            b = b + read(durations, entry(tables, position, LAG_B))
        return b > a

    def add_one(
        counts: Float[Array, " classes"], duration_class: UInt[Array, ""]
    ) -> Float[Array, " classes"]:
        return write(counts, read(counts, duration_class) + 1, duration_class)

    return _walk(
        tables, jnp.zeros_like(durations), add_one, tables.n_ops, released_by_second, jnp.uint32(0)
    )


def row_of_counts(
    tables: OpTables, items: Items, durations: Float[Array, "rows lanes"]
) -> tuple[Float[Array, "items lanes"], Float[Array, "rows lanes"]]:
    """Makespan of every item and lane, and counts laid out like the durations."""
    lanes = durations.shape[1]

    def item(
        i: Array, state: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, Array, Array, Array]:
        # Forward: all lanes at once, noting for every op and lane which predecessor released it.
        # The next item overwrites these decisions.
        spans, counts, decisions, slots = state
        span, decisions, slots = run_item(tables, items, i, durations, decisions, slots)
        first_op = unsigned(items.first_op[i])
        first_class = unsigned(items.first_class[i])

        # Backward: lanes have critical paths of their own, so each is walked alone.
        def lane(j: Array, counts: Array) -> Array:
            def released_by_second(position: UInt[Array, ""], *_: Array) -> Array:
                return lax.dynamic_slice(decisions, (position, unsigned(j)), (1, 1))[0, 0]

            def add_one(counts: Array, duration_class: Array) -> Array:
                entry_of_lane = (first_class + duration_class, unsigned(j))
                count = lax.dynamic_slice(counts, entry_of_lane, (1, 1))
                return lax.dynamic_update_slice(counts, count + 1, entry_of_lane)

            return _walk(tables, counts, add_one, items.n_ops[i], released_by_second, first_op)

        counts = lax.fori_loop(np.int32(0), np.int32(lanes), lane, counts)
        return write(spans, span, unsigned(i)), counts, decisions, slots

    start = (
        jnp.zeros((items.n_ops.shape[0], lanes), durations.dtype),
        jnp.zeros_like(durations),
        jnp.zeros((tables.longest, lanes), bool),
        empty_slots(tables.n_slots, durations),
    )
    spans, counts, *_ = lax.fori_loop(np.int32(0), items.count, item, start)
    return spans, counts


def _walk(
    tables: OpTables,
    counts: Float[Array, "..."],
    add_one: Callable[[Array, Array], Array],
    n_ops: Int[Array, ""],
    released_by_second: Callable[[Array, Array, Array], Bool[Array, ""]],
    first_op: UInt[Array, ""],
) -> Float[Array, "..."]:
    """Follow the predecessors that released each op, from the last op to one without predecessors.

    `released_by_second(position, first_pred, second_pred)` says whether the second of two
    predecessors did. Positions count inside the op's own structure, which begins at `first_op` of
    the table.
    """

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        # The op itself is on the path.
        position = unsigned(state[0])
        counts = state[1]
        counts = add_one(counts, entry(tables, first_op + position, DURATION))

        # The predecessor that released it is the next op on the path. A missing one (-1) is looked
        # up at position 0, in bounds, and its answer is discarded.
        first_pred_index = (first_op + position) * np.uint32(2)
        first_pred = read(tables.pred, first_pred_index)
        second_pred = read(tables.pred, first_pred_index + np.uint32(1))
        second_is_later = released_by_second(
            position, unsigned(jnp.maximum(first_pred, 0)), unsigned(jnp.maximum(second_pred, 0))
        )
        by_second = (second_pred >= 0) & second_is_later

        # So is the lag of the edge between them (class 0 where it has none, whose count is not
        # used).
        if tables.has_lags:
            column = jnp.where(by_second, np.uint32(LAG_B), np.uint32(LAG_A))
            counts = add_one(counts, entry(tables, first_op + position, column))
        return jnp.where(by_second, second_pred, first_pred), counts

    return lax.while_loop(lambda state: state[0] >= 0, step, (n_ops - 1, counts))[1]
