"""Lanes of one structure as rows for the loop over single ops."""

import jax.numpy as jnp
import numpy as np
from jax import custom_batching
from jaxtyping import Array, Float, Int

from perfmodel.timeline._critical_path import row_of_counts
from perfmodel.timeline._loops import LANES, Items, row_of_lanes
from perfmodel.timeline._tables import OpTables


def spans_of_rows(
    tables: OpTables, durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""]
) -> Float[Array, " lanes"]:
    """Makespan of each lane of the first `n_rows` rows of `LANES` lanes."""
    items, rows = _as_rows(tables, durations, n_rows)
    return row_of_lanes(tables, items, rows).reshape(-1)


def counts_of_rows(
    tables: OpTables, durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""]
) -> tuple[Float[Array, " lanes"], Float[Array, "lanes classes"]]:
    """Makespan and critical-path counts of each lane of the first `n_rows` rows of `LANES` lanes."""
    items, rows = _as_rows(tables, durations, n_rows)
    spans, counts = row_of_counts(tables, items, rows)
    by_lane = counts.reshape(-1, durations.shape[1], LANES).transpose(0, 2, 1).reshape(durations.shape)
    return spans.reshape(-1), by_lane.at[:, 0].set(0)


@custom_batching.custom_vmap
def spans_of_lanes(tables: OpTables, durations: Float[Array, "lanes classes"]) -> Float[Array, " lanes"]:
    """Makespan of any number of lanes; further batch axes join the lanes."""
    padded, n_rows = _full_rows(durations)
    return spans_of_rows(tables, padded, n_rows)[: durations.shape[0]]


@spans_of_lanes.def_vmap
def _spans_of_batch(axis_size: int, _, tables: OpTables, durations: Float[Array, "batch lanes classes"]):
    spans = spans_of_lanes(tables, durations.reshape(-1, durations.shape[-1]))
    return spans.reshape(axis_size, -1), True


@custom_batching.custom_vmap
def counts_of_lanes(
    tables: OpTables, durations: Float[Array, "lanes classes"]
) -> tuple[Float[Array, " lanes"], Float[Array, "lanes classes"]]:
    """Makespan and counts of any number of lanes; further batch axes join the lanes."""
    padded, n_rows = _full_rows(durations)
    spans, counts = counts_of_rows(tables, padded, n_rows)
    return spans[: durations.shape[0]], counts[: durations.shape[0]]


@counts_of_lanes.def_vmap
def _counts_of_batch(axis_size: int, _, tables: OpTables, durations: Float[Array, "batch lanes classes"]):
    spans, counts = counts_of_lanes(tables, durations.reshape(-1, durations.shape[-1]))
    return (spans.reshape(axis_size, -1), counts.reshape(durations.shape)), (True, True)


def _full_rows(durations: Float[Array, "lanes classes"]) -> tuple[Float[Array, "padded classes"], Int[Array, ""]]:
    n_rows = -(-durations.shape[0] // LANES)
    return jnp.pad(durations, ((0, n_rows * LANES - durations.shape[0]), (0, 0))), jnp.int32(n_rows)


def _as_rows(
    tables: OpTables, durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""]
) -> tuple[Items, Float[Array, "rows_times_classes {LANES}"]]:
    """Every row of lanes runs the whole table, with its own stretch of the durations."""
    classes = durations.shape[1]
    by_row = durations.reshape(-1, LANES, classes).transpose(0, 2, 1)
    padded_rows = by_row.shape[0]
    items = Items(
        first_op=jnp.zeros(padded_rows, jnp.int32),
        n_ops=jnp.full(padded_rows, tables.n_ops),
        first_class=jnp.arange(padded_rows, dtype=jnp.int32) * np.int32(classes),
        count=n_rows,
    )
    return items, by_row.reshape(-1, LANES)
