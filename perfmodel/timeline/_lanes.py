"""Evaluates many duration vectors on one structure in single precision, for searches.

Few lanes run as rows of `LANES` in the loop over single ops, as do derivatives; many run in tiles
by bundles.
"""

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax
from jaxtyping import Array, Float, Int

from perfmodel.timeline._durations import (
    Durations,
    being_traced,
    checked,
    in_numpy,
    padded_classes,
    padded_lanes,
)
from perfmodel.timeline._loops import (
    LANES,
    ROW_OPTIONS,
    TILE,
    Items,
    row_of_counts,
    row_of_lanes,
    rows_needed,
    tile_of_lanes,
)
from perfmodel.timeline._tables import BundleTables, CompiledStructure, OpTables


@jax.custom_jvp
def spans_of_rows(
    durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""], tables: OpTables
) -> Float[Array, " lanes"]:
    """Makespan of every lane in the first `n_rows` rows; a row has `LANES` lanes."""
    items, rows = _as_rows(tables, durations, n_rows)
    return row_of_lanes(tables, items, rows).reshape(-1)


@spans_of_rows.defjvp
def _jvp_in_rows(primals, tangents):
    durations, n_rows, tables = primals
    return _with_tangent(tables, durations, n_rows, tangents[0])


def counts_of_rows(
    durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""], tables: OpTables
) -> tuple[Float[Array, " lanes"], Float[Array, "lanes classes"]]:
    """Makespan and critical-path counts of every lane in the first `n_rows` rows."""
    items, rows = _as_rows(tables, durations, n_rows)
    spans, counts = row_of_counts(tables, items, rows)

    # Undo the layout of `_as_rows`. Class 0 stands for the constant 0, which no count belongs to.
    classes = durations.shape[1]
    by_row = counts.reshape(-1, classes, LANES)
    by_lane = by_row.transpose(0, 2, 1).reshape(durations.shape)
    return spans.reshape(-1), by_lane.at[:, 0].set(0)


# Under `vmap`, JAX's own batching would change the body of the loop over ops into a slower form
# (see `_loops`). Instead a further batch axis joins the lanes, which the loop has rows for.


@custom_batching.custom_vmap
def spans_of_lanes(
    tables: OpTables, durations: Float[Array, "lanes classes"]
) -> Float[Array, " lanes"]:
    """Makespan of any number of lanes; further batch axes join the lanes."""
    padded, n_rows = _full_rows(durations)
    return spans_of_rows(padded, n_rows, tables)[: durations.shape[0]]


@spans_of_lanes.def_vmap
def _spans_of_batch(
    axis_size: int, _, tables: OpTables, durations: Float[Array, "batch lanes classes"]
):
    """Run a batch of lanes as that many more lanes."""
    spans = spans_of_lanes(tables, durations.reshape(-1, durations.shape[-1]))
    return spans.reshape(axis_size, -1), True


@custom_batching.custom_vmap
def counts_of_lanes(
    tables: OpTables, durations: Float[Array, "lanes classes"]
) -> tuple[Float[Array, " lanes"], Float[Array, "lanes classes"]]:
    """Makespan and counts of any number of lanes; further batch axes join the lanes."""
    padded, n_rows = _full_rows(durations)
    spans, counts = counts_of_rows(padded, n_rows, tables)
    return spans[: durations.shape[0]], counts[: durations.shape[0]]


@counts_of_lanes.def_vmap
def _counts_of_batch(
    axis_size: int, _, tables: OpTables, durations: Float[Array, "batch lanes classes"]
):
    spans, counts = counts_of_lanes(tables, durations.reshape(-1, durations.shape[-1]))
    return (spans.reshape(axis_size, -1), counts.reshape(durations.shape)), (True, True)


def _full_rows(
    durations: Float[Array, "lanes classes"],
) -> tuple[Float[Array, "padded classes"], Int[Array, ""]]:
    """Pad lanes with zeros to full rows, and return the number of rows."""
    lanes = durations.shape[0]
    n_rows = rows_needed(lanes)
    padded = jnp.pad(durations, ((0, n_rows * LANES - lanes), (0, 0)))
    return padded, jnp.int32(n_rows)


def _as_rows(
    tables: OpTables, durations: Float[Array, "lanes classes"], n_rows: Int[Array, ""]
) -> tuple[Items, Float[Array, "rows_times_classes {LANES}"]]:
    """Work items: each row of lanes runs the whole table with its own durations.

    A class's durations in the lanes of a row lie beside each other, so that an op loads them at
    once.
    """
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


@overload
def makespan_lanes(
    compiled: CompiledStructure, durations: Float[np.ndarray, "lanes classes"]
) -> Float[np.ndarray, " lanes"]: ...
@overload
def makespan_lanes(
    compiled: CompiledStructure, durations: Float[Array, "lanes classes"]
) -> Float[Array, " lanes"]: ...
def makespan_lanes(compiled, durations):
    """`makespan` of each row of `durations`, in seconds.

    More than 16 lanes run in tiles of 128, so that working memory does not grow with their number.
    NumPy input is rounded to float32 and gives NumPy output; JAX input keeps its precision and may
    be traced and differentiated as in `makespan`.

    Args:
        compiled: result of `compile_structure`.
        durations: seconds, shape (lanes, classes).

    Raises:
        PerfModelError: durations of another shape, or not finite.
    """
    lanes = len(durations)

    # One row of lanes is cheaper in the loop over single ops than a tile that is mostly padding.
    if lanes <= LANES:
        padded, n_rows = _prepared(compiled, durations, LANES)
        with_options = isinstance(padded, np.ndarray) and not being_traced()
        function = _few_rows if with_options else _few
        return _run(function, padded, n_rows, compiled.op_tables)[:lanes]

    padded, n_tiles = _prepared(compiled, durations, TILE)
    return _run(_many, padded, n_tiles, compiled.op_tables, compiled.bundle_tables)[:lanes]


@overload
def makespan_lanes_and_grad(
    compiled: CompiledStructure, durations: Float[np.ndarray, "lanes classes"]
) -> tuple[Float[np.ndarray, " lanes"], Float[np.ndarray, "lanes classes"]]: ...
@overload
def makespan_lanes_and_grad(
    compiled: CompiledStructure, durations: Float[Array, "lanes classes"]
) -> tuple[Float[Array, " lanes"], Float[Array, "lanes classes"]]: ...
def makespan_lanes_and_grad(compiled, durations):
    """Makespan of each row of `durations`, and its gradient.

    Args:
        compiled: result of `compile_structure`.
        durations: seconds, shape (lanes, classes).

    Raises:
        PerfModelError: durations of another shape, or not finite.
    """
    padded, n_rows = _prepared(compiled, durations, LANES)
    spans, counts = _run(_counts, padded, n_rows, compiled.op_tables)
    return spans[: len(durations)], counts[: len(durations), : compiled.structure.n_classes]


def _prepared(
    compiled: CompiledStructure, durations: Durations, tile: int
) -> tuple[Float[Durations, "padded_lanes padded_classes"], np.int32]:
    """Durations, checked and padded to shapes that share a trace, and the tiles in use."""
    durations = checked(durations, compiled.structure.n_classes, ndim=2)
    if isinstance(durations, np.ndarray):
        durations = durations.astype(np.float32)
    n_tiles = np.int32(-(-durations.shape[0] // tile))
    return padded_lanes(padded_classes(durations), tile), n_tiles


def _run(
    function: Callable[..., Any], durations: Durations, n_tiles: np.int32, *tables: Any
) -> Any:
    """Call `function(durations, n_tiles, *tables)`; NumPy in, NumPy out."""
    if isinstance(durations, np.ndarray):
        return in_numpy(function, durations.dtype, durations, n_tiles, *tables)
    return function(durations, n_tiles, *tables)


@jax.custom_jvp
def _spans_in_tiles(
    durations: Float[Array, "lanes classes"],
    n_tiles: Int[Array, ""],
    op_tables: OpTables,
    tables: BundleTables,
) -> Float[Array, " lanes"]:
    """Makespan of each lane, tile by tile."""
    # Only the derivative, which walks back over single ops, needs these.
    del op_tables

    def tile(i: Array, spans: Array) -> Array:
        tile_durations = lax.dynamic_slice_in_dim(durations, i * TILE, TILE)
        tile_spans = tile_of_lanes(tables, tile_durations.T)
        return lax.dynamic_update_slice_in_dim(spans, tile_spans, i * TILE, 0)

    return lax.fori_loop(np.int32(0), n_tiles, tile, jnp.zeros(durations.shape[0], durations.dtype))


@_spans_in_tiles.defjvp
def _jvp_in_tiles(primals, tangents):
    durations, n_tiles, op_tables, _ = primals
    n_rows = n_tiles * np.int32(TILE // LANES)
    return _with_tangent(op_tables, durations, n_rows, tangents[0])


def _with_tangent(
    tables: OpTables,
    durations: Float[Array, "lanes classes"],
    n_rows: Int[Array, ""],
    tangent: Float[Array, "lanes classes"],
) -> tuple[Float[Array, " lanes"], Float[Array, " lanes"]]:
    """Makespans and their directional derivatives: the makespan is linear in the durations with
    counts as factors."""
    primal = lax.stop_gradient(durations)
    spans, counts = counts_of_rows(primal, n_rows, tables)

    # The added 0 carries the first derivative of the primal output into higher orders.
    zero = (counts * (durations - primal)).sum(axis=1)
    return spans + zero, (counts * tangent).sum(axis=1)


# `_few` is for callers that are being traced, where JAX takes no compiler options.
_few = jax.jit(spans_of_rows)
_few_rows = jax.jit(spans_of_rows, compiler_options=ROW_OPTIONS)
_many = jax.jit(_spans_in_tiles)
_counts = jax.jit(counts_of_rows)
