"""Evaluates many structures with a few duration vectors each in one call."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.timeline._durations import Durations, being_traced, checked, in_numpy
from perfmodel.timeline._loops import (
    LANES,
    ROW_OPTIONS,
    Items,
    row_of_counts,
    row_of_lanes,
    rows_needed,
)
from perfmodel.timeline._tables import CompiledStructure, OpTables, bucket, join, n_cpu_devices

SMALLEST_ITEMS = 256
"""Least number of items and rows to which batches are padded, so that small ones share a trace."""
SMALLEST_ROWS = 1 << 14
LEAST_DIVIDED = 200_000
"""Least number of ops (times rows of lanes) for which a batch is divided among the cores."""


@dataclass(frozen=True, eq=False)
class ProgramBatch:
    """Concatenated compiled structures, for calls of `makespan_many` with other durations."""

    programs: tuple[CompiledStructure, ...]
    _tables: dict[tuple[int, int, int], OpTables] = field(default_factory=dict, repr=False)

    def tables(self, first: int, end: int, device: int) -> OpTables:
        """Tables of a range of programs, for makespans alone, on one of JAX's CPU devices."""
        key = first, end, device
        if key not in self._tables:
            self._tables[key] = join(self.programs[first:end], with_pred=False, device=device)
        return self._tables[key]

    @cached_property
    def tables_with_pred(self) -> OpTables:
        """Tables of all programs, for makespans and derivatives."""
        return join(self.programs)


def makespan_many(
    programs: Sequence[CompiledStructure] | ProgramBatch,
    durations: Sequence[Float[Durations, "lanes classes"]],
) -> list[Float[Durations, " lanes"]]:
    """`makespan_lanes` of several structures in one call, each with its own durations.

    Programs lie end to end in one table and run one after another, 16 lanes at a time: the call
    costs a single dispatch per core (or CPU device of JAX, if there are more), among which large
    batches are divided, and shares one trace with all batches of like size.

    Args:
        programs: compiled structures, or a `ProgramBatch` of them (joined once for many calls).
        durations: seconds of each program, of shape (lanes, classes); NumPy input is rounded to
            float32 and gives NumPy output, JAX input may be traced and differentiated.

    Returns:
        For each program the makespans of its lanes, in seconds.

    Raises:
        PerfModelError: not as many duration arrays as programs, or one of another shape or not
            finite.
    """
    batch = programs if isinstance(programs, ProgramBatch) else ProgramBatch(tuple(programs))
    if len(durations) != len(batch.programs):
        raise PerfModelError(
            f"durations: give one array per program, got {len(durations)} for {len(batch.programs)} programs"
        )
    if not batch.programs:
        return []
    values = []
    for compiled, program_durations in zip(batch.programs, durations, strict=True):
        values.append(checked(program_durations, compiled.structure.n_classes, ndim=2))
    lanes = [value.shape[0] for value in values]

    # JAX's arrays may be tracers of a caller that differentiates: one call over the whole batch.
    if any(isinstance(value, jax.Array) for value in values):
        items = _items(batch.programs, lanes)
        spans = _run(batch.tables_with_pred, items, _rows_traced(values))
        return _by_program(spans, lanes)

    # NumPy's are divided among the cores, in Python threads: JAX computes outside of the
    # interpreter's lock.
    devices = n_cpu_devices()
    run = _run if being_traced() else _run_rows

    def part(bounds: tuple[int, int], device: int = 0) -> list[Float[Durations, " lanes"]]:
        part_of_batch = slice(*bounds)
        rows = _rows(values[part_of_batch])  # pyright: ignore[reportArgumentType]
        tables = batch.tables(*bounds, device)
        items = _items(batch.programs[part_of_batch], lanes[part_of_batch])
        return _by_program(in_numpy(run, rows.dtype, tables, items, rows), lanes[part_of_batch])

    bounds = _divided(batch.programs, lanes, max(os.cpu_count() or 1, devices))
    if len(bounds) == 1:
        return part(bounds[0])
    device_of_part = [i % devices for i in range(len(bounds))]
    with ThreadPoolExecutor(len(bounds)) as threads:
        parts = threads.map(part, bounds, device_of_part)
        return list(chain.from_iterable(parts))


def _divided(
    programs: Sequence[CompiledStructure], lanes: Sequence[int], parts: int
) -> list[tuple[int, int]]:
    """Ranges of programs with about equal work; one range if there is little work."""
    # Work is ops times rows of lanes: a row costs the same however many of its lanes are padding.
    work = []
    for compiled, n_lanes in zip(programs, lanes, strict=True):
        n_rows = rows_needed(n_lanes)
        work.append(compiled.n_ops * n_rows)
    total = np.cumsum(work)
    if parts == 1 or total[-1] < LEAST_DIVIDED or len(programs) < parts:
        return [(0, len(programs))]

    # Each part ends with the program that reaches its share; one that reaches several shares ends
    # one part.
    ends = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts) + 1
    inner_bounds = {int(end) for end in ends if end < len(programs)}
    return list(pairwise([0, *sorted(inner_bounds), len(programs)]))


def _items(programs: Sequence[CompiledStructure], lanes: Sequence[int]) -> Items:
    """Divide programs into items to run; a program with more than `LANES` lanes becomes several
    items over the same ops."""
    rows_of_program = [rows_needed(n) for n in lanes]
    count = sum(rows_of_program)
    padding = (0, bucket(count, SMALLEST_ITEMS) - count)

    def column(values: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(values, padding, constant_values=fill).astype(np.int32)

    # Items of a program share its ops; each item has its own durations.
    n_ops = np.array([compiled.n_ops for compiled in programs])
    first_op = np.cumsum(n_ops) - n_ops
    n_classes = np.repeat([compiled.structure.n_classes for compiled in programs], rows_of_program)
    first_class = np.cumsum(n_classes) - n_classes

    # Padding items begin after all durations, so that `first_class` rises and can be searched
    # (`_jvp`).
    return Items(
        first_op=column(np.repeat(first_op, rows_of_program), 0),
        n_ops=column(np.repeat(n_ops, rows_of_program), 0),
        first_class=column(first_class, int(n_classes.sum())),
        count=np.int32(count),
    )


def _rows(
    values: Sequence[Float[np.ndarray, "lanes classes"]],
) -> Float[np.ndarray, "rows {LANES}"]:
    """Durations as the loop reads them: an item's classes in consecutive rows, class 0 is 0."""
    n_rows = 0
    for value in values:
        items = rows_needed(len(value))
        n_rows += items * value.shape[1]

    # Row 0 of an item stays 0, and so do lanes that pad its last row.
    rows = np.zeros((bucket(n_rows, SMALLEST_ROWS), LANES), np.float32)
    first_row = 0
    for value in values:
        classes = value.shape[1]
        for first_lane in range(0, len(value), LANES):
            lanes = value[first_lane : first_lane + LANES]
            rows[first_row + 1 : first_row + classes, : len(lanes)] = lanes[:, 1:].T
            first_row += classes
    return rows


def _rows_traced(
    values: Sequence[Float[Durations, "lanes classes"]],
) -> Float[Array, "rows {LANES}"]:
    """Durations laid out as in `_rows`, by functions that JAX can trace and differentiate."""
    parts = []
    for value in values:
        lanes, classes = value.shape
        padded = jnp.pad(value[:, 1:], ((0, -lanes % LANES), (1, 0)))
        parts.append(padded.reshape(-1, LANES, classes).transpose(0, 2, 1).reshape(-1, LANES))
    rows = jnp.concatenate(parts)
    n_rows = rows.shape[0]
    return jnp.pad(rows, ((0, bucket(n_rows, SMALLEST_ROWS) - n_rows), (0, 0)))


def _by_program(
    spans: Float[Durations, "items {LANES}"], lanes: Sequence[int]
) -> list[Float[Durations, " lanes"]]:
    """Makespans of each program's lanes, without those of padding."""
    flat = spans.reshape(-1)
    spans_of_programs = []
    first = 0
    for n_lanes in lanes:
        spans_of_programs.append(flat[first : first + n_lanes])
        n_rows = rows_needed(n_lanes)
        first += n_rows * LANES
    return spans_of_programs


@jax.custom_jvp
def _spans(
    tables: OpTables, items: Items, rows: Float[Array, "rows {LANES}"]
) -> Float[Array, "items {LANES}"]:
    """Makespans of every item's row of lanes, differentiable in the durations."""
    return row_of_lanes(tables, items, rows)


@_spans.defjvp
def _jvp(primals, tangents):
    """Makespans of many items, and their derivatives in the direction of the tangents."""
    tables, items, rows = primals
    primal = lax.stop_gradient(rows)
    spans, counts = row_of_counts(tables, items, primal)

    # Counts times durations, summed over the classes of each item. Those of class 0 meet rows that
    # are 0.
    item_of_row = jnp.searchsorted(items.first_class, jnp.arange(rows.shape[0]), side="right") - 1

    def by_item(values: Array) -> Array:
        return jax.ops.segment_sum(counts * values, item_of_row, spans.shape[0])

    # The added 0 carries the first derivative of the primal output into higher orders.
    zero = by_item(rows - primal)
    return spans + zero, by_item(tangents[2])


_run = jax.jit(_spans)
_run_rows = jax.jit(_spans, compiler_options=ROW_OPTIONS)
