"""Backward walks along the critical path: how often each duration class lies on it.

The makespan is piecewise linear in the durations, so these counts are its gradient. Where the two
predecessors of an op release it at the same time, the first one is on the path.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from perfmodel.timeline._loops import Items, empty_slots, entry, read, run_item, unsigned, write
from perfmodel.timeline._tables import DURATION, LAG_A, LAG_B, OpTables


def counts_of_one_lane(
    tables: OpTables, durations: Float[Array, " classes"], ends: Float[Array, " positions"]
) -> Float[Array, " classes"]:
    """Occurrences of each class on the critical path, from the end time at every position."""

    # With all end times at hand, a comparison tells which predecessor was the later one.
    def released_by_second(
        position: UInt[Array, ""], first_pred: UInt[Array, ""], second_pred: UInt[Array, ""]
    ) -> Array:
        a, b = read(ends, first_pred), read(ends, second_pred)
        if tables.has_lags:
            a = a + read(durations, entry(tables, position, LAG_A))
            b = b + read(durations, entry(tables, position, LAG_B))
        return b > a

    return _walk(tables, jnp.zeros_like(durations), _add_one, tables.n_ops, released_by_second, jnp.uint32(0))


def row_of_counts(
    tables: OpTables, items: Items, durations: Float[Array, "rows lanes"]
) -> tuple[Float[Array, "items lanes"], Float[Array, "rows lanes"]]:
    """Makespan of every item and lane, and counts laid out like the durations."""
    lanes = durations.shape[1]

    def item(i: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        # Forward: all lanes at once, noting for every op and lane which predecessor released it. The next
        # item overwrites these decisions.
        spans, counts, decisions, slots = state
        span, decisions, slots = run_item(tables, items, i, durations, decisions, slots)
        first_op, first_class = unsigned(items.first_op[i]), unsigned(items.first_class[i])

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
    """Follow the predecessors that released each op, from the last op to one that has none.

    `released_by_second(position, first_pred, second_pred)` says whether the second of two predecessors did.
    Positions count inside the op's own structure, which begins at `first_op` of the table.
    """

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        # The op itself is on the path.
        position, counts = unsigned(state[0]), state[1]
        counts = add_one(counts, entry(tables, first_op + position, DURATION))

        # The predecessor that released it is the next op on the path. A missing one (-1) is looked up at
        # position 0, in bounds, and its answer is discarded.
        first_pred_index = (first_op + position) * np.uint32(2)
        first_pred = read(tables.pred, first_pred_index)
        second_pred = read(tables.pred, first_pred_index + np.uint32(1))
        second_is_later = released_by_second(
            position, unsigned(jnp.maximum(first_pred, 0)), unsigned(jnp.maximum(second_pred, 0))
        )
        by_second = (second_pred >= 0) & second_is_later

        # So is the lag of the edge between them (class 0 where it has none, whose count is not used).
        if tables.has_lags:
            column = jnp.where(by_second, np.uint32(LAG_B), np.uint32(LAG_A))
            counts = add_one(counts, entry(tables, first_op + position, column))
        return jnp.where(by_second, second_pred, first_pred), counts

    return lax.while_loop(lambda state: state[0] >= 0, step, (n_ops - 1, counts))[1]


def _add_one(counts: Float[Array, " classes"], duration_class: UInt[Array, ""]) -> Float[Array, " classes"]:
    """The counts of one lane with one occurrence more of a class."""
    return write(counts, read(counts, duration_class) + 1, duration_class)
