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

    def second(position: UInt[Array, ""], first_pred: UInt[Array, ""], second_pred: UInt[Array, ""]) -> Array:
        a, b = read(ends, first_pred), read(ends, second_pred)
        if tables.has_lags:
            a = a + read(durations, entry(tables, position, LAG_A))
            b = b + read(durations, entry(tables, position, LAG_B))
        return b > a

    return _walk(tables, jnp.zeros_like(durations), _add_one, tables.n_ops, second, jnp.uint32(0))


def row_of_counts(
    tables: OpTables, items: Items, durations: Float[Array, "rows lanes"]
) -> tuple[Float[Array, "items lanes"], Float[Array, "rows lanes"]]:
    """Makespan of every item and lane, and counts laid out like the durations."""
    lanes = durations.shape[1]

    def item(i: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        spans, counts, decisions, slots = state
        span, decisions, slots = run_item(tables, items, i, durations, decisions, slots)
        first_op, first_class = unsigned(items.first_op[i]), unsigned(items.first_class[i])

        def lane(j: Array, counts: Array) -> Array:
            def second(position: UInt[Array, ""], *_: Array) -> Array:
                return lax.dynamic_slice(decisions, (position, unsigned(j)), (1, 1))[0, 0]

            def add_one(counts: Array, of_class: Array) -> Array:
                at = (first_class + of_class, unsigned(j))
                return lax.dynamic_update_slice(counts, lax.dynamic_slice(counts, at, (1, 1)) + 1, at)

            return _walk(tables, counts, add_one, items.n_ops[i], second, first_op)

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
    second: Callable[[Array, Array, Array], Bool[Array, ""]],
    first_op: UInt[Array, ""],
) -> Float[Array, "..."]:
    """Follow the predecessors that released each op, from the last op to one that has none.

    `second(position, first_pred, second_pred)` says whether the second of two predecessors did.
    """

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        position, counts = unsigned(state[0]), state[1]
        counts = add_one(counts, entry(tables, first_op + position, DURATION))
        at = (first_op + position) * np.uint32(2)
        first_pred, second_pred = read(tables.pred, at), read(tables.pred, at + np.uint32(1))
        by_second = (second_pred >= 0) & second(
            position, unsigned(jnp.maximum(first_pred, 0)), unsigned(jnp.maximum(second_pred, 0))
        )
        if tables.has_lags:
            column = jnp.where(by_second, np.uint32(LAG_B), np.uint32(LAG_A))
            counts = add_one(counts, entry(tables, first_op + position, column))
        return jnp.where(by_second, second_pred, first_pred), counts

    return lax.while_loop(lambda state: state[0] >= 0, step, (n_ops - 1, counts))[1]


def _add_one(counts: Float[Array, " classes"], of_class: UInt[Array, ""]) -> Float[Array, " classes"]:
    return write(counts, read(counts, of_class) + 1, of_class)
