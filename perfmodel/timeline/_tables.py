"""Compiles a structure to a flat program over slots, and to padded arrays for JAX.

Lengths are padded to powers of two, so that structures of like size share one trace; the loops run
over the true number of ops, so padding costs memory, not time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array, Int, UInt

from perfmodel.program import Structure
from perfmodel.timeline._allocate import (
    BUNDLE,
    NEVER_SLOT,
    RESULT_SLOT,
    SPARE_SLOT,
    ZERO_SLOT,
    blocks,
    bundles,
    level_order,
    levels,
)

# Least sizes of padded arrays: programs below them all share a trace.
SMALLEST_OPS: Final = 4096
SMALLEST_JOINED_OPS: Final = 1 << 17
SMALLEST_BUNDLES: Final = 64
SMALLEST_SLOTS: Final = 1024
SMALLEST_TILE_SLOTS: Final = 256
"""Fewer than elsewhere, as each of them is a row of a whole tile of lanes."""

SOURCE_A, SOURCE_B, DESTINATION, DURATION, LAG_A, LAG_B = range(6)
"""Columns of a program; the last two are absent where no edge has a lag, the last also as `_lags_first` has it."""
NO_OP: Final = (ZERO_SLOT, NEVER_SLOT, SPARE_SLOT, 0, 0, 0)
"""A row that changes nothing."""


def bucket(n: int, smallest: int) -> int:
    """The least power of two that holds `n` and `smallest`, itself a power of two.

    Each size is a compilation more, so the smallest ones are as large as costs little to fill.
    """
    return max(smallest, 1 << (max(n, 1) - 1).bit_length())


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["program", "pred", "n_ops"],
    meta_fields=["width", "n_slots", "longest"],
)
@dataclass(frozen=True, eq=False)
class OpTables:
    """One structure, or several end to end, as the program of a loop over single ops."""

    program: UInt[Array, " padded_ops*width"]
    """Rows of `width` columns, flat: a scalar from a flat array is the cheapest read there is."""
    pred: Int[Array, " padded_ops*2"]
    """Positions of both predecessors inside the op's own structure, flat; -1 for none."""
    n_ops: Int[Array, ""]
    """Ops of the structure, or of the longest."""
    width: int
    """Columns of a row: 4 without lags, 5 with one per op, 6 with two."""
    n_slots: int
    """Slots for end times, padded."""
    longest: int
    """Padded ops of the longest structure, 0 without `pred`."""

    @property
    def padded_ops(self) -> int:
        return self.program.shape[0] // self.width

    @property
    def has_lags(self) -> bool:
        return self.width > LAG_A


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "n_bundles"], meta_fields=["has_lags", "n_slots"])
@dataclass(frozen=True, eq=False)
class BundleTables:
    """One structure as the program of a loop over bundles of independent ops."""

    rows: UInt[Array, "padded_bundles columns"]
    """`BUNDLE` entries of each program column but the destination, then the first slot that the bundle
    before writes. One read per step brings all of it."""
    n_bundles: Int[Array, ""]
    has_lags: bool
    n_slots: int


@dataclass(frozen=True, eq=False)
class CompiledStructure:
    """A `Structure` as a flat program over slots; "position" counts ops in the program's own order."""

    structure: Structure
    order: Int[np.ndarray, " ops"]
    """Op of the structure at each position; the last position holds the last op."""
    bundle: Int[np.ndarray, " ops"]
    """Bundle of each position, not descending; ops of one bundle do not depend on each other."""
    program: UInt[np.ndarray, "ops columns"]
    """Columns of each op: the slots of both predecessors' end times, the slot of its own (never one
    of its sources), its duration class, and the lag classes unless all are 0."""
    pred: Int[np.ndarray, "ops 2"]
    """Positions of the two predecessors, -1 for none; a lone one comes first."""
    n_slots: int
    """Slots for end times that the program uses, the special ones included."""

    def __post_init__(self) -> None:
        # Structures are kept and shared between calls, so nobody may write to them.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def n_ops(self) -> int:
        return len(self.order)

    @property
    def n_classes(self) -> int:
        return self.structure.n_classes

    @property
    def n_bundles(self) -> int:
        return int(self.bundle[-1]) + 1

    @cached_property
    def op_tables(self) -> OpTables:
        """The program for the loops over single ops."""
        return join([self])

    @cached_property
    def bundle_tables(self) -> BundleTables:
        """The program for the loop over bundles."""
        return lay_out(self)


def join(structures: Sequence[CompiledStructure], *, with_pred: bool = True, device: int = 0) -> OpTables:
    """Programs of several structures end to end in one table, on one of JAX's CPU devices.

    Without `pred` (empty then) the table serves the makespans of a batch, not their gradients: which predecessor comes
    first does not matter.
    """
    n_ops = sum(compiled.n_ops for compiled in structures)
    longest = max(compiled.n_ops for compiled in structures)
    programs = [compiled.program for compiled in structures]
    if not with_pred:
        programs = [_lags_first(program) for program in programs]

    # 32 bits are a sixth faster to run than 16 bits, which take half the time to join: the former for a
    # program that runs alone and often, the latter for a batch.
    if with_pred and len(structures) == 1:
        padded, dtype = bucket(n_ops, SMALLEST_OPS), np.uint32
    else:
        padded, dtype = bucket(n_ops, SMALLEST_JOINED_OPS), np.result_type(*programs)

    # A program with fewer columns than the widest gets lags of class 0, which is the constant 0.
    width = max(program.shape[1] for program in programs)
    joined = np.zeros((padded, width), dtype)
    joined[n_ops:] = NO_OP[:width]
    pred = np.full((padded if with_pred else 0, 2), -1, np.int32)
    first = 0
    for compiled, program in zip(structures, programs, strict=True):
        end = first + compiled.n_ops
        joined[first:end, : program.shape[1]] = program
        if with_pred:
            pred[first:end] = compiled.pred
        first = end
    return OpTables(
        program=_on_cpu(joined.reshape(-1), device),
        pred=_on_cpu(pred.reshape(-1), device),
        n_ops=_on_cpu(np.int32(longest), device),
        width=width,
        n_slots=bucket(max(compiled.n_slots for compiled in structures), SMALLEST_SLOTS),
        longest=bucket(longest, SMALLEST_OPS) if with_pred else 0,
    )


def _lags_first(program: UInt[np.ndarray, "ops columns"]) -> UInt[np.ndarray, "ops columns"]:
    """Put an op's only lag at its first predecessor and drop the column for that of the second.

    That is a twelfth less to run. A program in which an op has two lags stays as it is.
    """
    has_two_columns = program.shape[1] > LAG_B
    if not has_two_columns or program[:, LAG_A:].all(axis=1).any():
        return program

    # Where the lag is the second predecessor's, the predecessors change places.
    lag_is_second = program[:, LAG_B] > 0
    exchanged = [SOURCE_B, SOURCE_A, DESTINATION, DURATION, LAG_B]
    reordered = program[:, :LAG_B].copy()
    reordered[lag_is_second] = program[lag_is_second][:, exchanged]
    return reordered


def lay_out(compiled: CompiledStructure) -> BundleTables:
    """The program by bundles; places of a bundle that no op fills compute 0 and are never read."""
    n_bundles = compiled.n_bundles
    padded = bucket(n_bundles, SMALLEST_BUNDLES)

    # Each bundle has `BUNDLE` places, which its ops fill from the first on.
    first = np.searchsorted(compiled.bundle, np.arange(n_bundles))
    place_in_bundle = np.arange(compiled.n_ops) - first[compiled.bundle]
    place = compiled.bundle * BUNDLE + place_in_bundle
    columns = [i for i in range(compiled.program.shape[1]) if i != DESTINATION]
    places = np.empty((padded * BUNDLE, len(columns)), compiled.program.dtype)
    places[:] = [NO_OP[i] for i in columns]
    places[place] = compiled.program[:, columns]

    # The loop reads a bundle as one row: all entries of a column side by side.
    by_column = places.reshape(padded, BUNDLE, -1).transpose(0, 2, 1).reshape(padded, -1)

    # The first bundle finds no ends to write: its zeros go to block 1, its own, which it writes afterwards.
    before = np.full((padded, 1), BUNDLE, compiled.program.dtype)
    before[1:n_bundles, 0] = compiled.program[first[:-1], DESTINATION] // BUNDLE * BUNDLE
    return BundleTables(
        rows=_on_cpu(np.concatenate([by_column, before], axis=1)),
        n_bundles=_on_cpu(np.int32(n_bundles)),
        has_lags=LAG_A in columns,
        n_slots=bucket(compiled.n_slots, SMALLEST_TILE_SLOTS),
    )


def n_cpu_devices() -> int:
    """CPU devices that JAX has (1 unless its host platform is told otherwise)."""
    return max(1, len(_cpu_devices()))


def _cpu_devices() -> list[Any]:
    """JAX's CPU devices; none where it has none."""
    # `JAX_PLATFORMS` may leave the CPU out.
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:
        return []


def _on_cpu(array: np.ndarray | np.generic, device: int = 0) -> Array:
    """Commit an array to the CPU: these loops are long and scalar, and an accelerator would crawl through them.

    The array is concrete even while the caller is being traced, as tables are kept across traces.
    """
    devices = _cpu_devices()
    with jax.ensure_compile_time_eval():
        return jax.device_put(array, devices[device] if devices else None)


def compile_structure(structure: Structure) -> CompiledStructure:
    """Order, bundle and allocate `structure` (130,000 ops take some 50 ms).

    Where an op's two predecessors release it at the same time, the first (`structure.pred[:, 0]`)
    counts as the one that did, whatever the order of ops in the program.
    """
    pred, lag = _normalised_edges(structure)

    # Order by levels, and name predecessors by their positions in this order.
    level = levels(pred)
    order = level_order(level, pred)
    position = np.empty(len(order) + 1, np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    position[-1] = -1
    pred = position[pred[order]]

    # Allocate a slot to every end time. The last op's is the one in which the loops look for the makespan.
    bundle, rank = bundles(level[order])
    destination = BUNDLE * blocks(bundle, pred) + rank
    n_slots = int(destination.max()) + 1
    destination[-1] = RESULT_SLOT

    # An op without predecessors starts at max(0, never), one with a lone predecessor at max(its end, never).
    source = np.where(pred < 0, [ZERO_SLOT, NEVER_SLOT], destination[pred])
    columns = [source, destination[:, None], structure.duration[order][:, None]]
    if lag.any():
        columns.append(lag[order])
    program = np.concatenate(columns, axis=1)
    return CompiledStructure(
        structure=structure,
        order=order.astype(np.int32),
        bundle=bundle.astype(np.int32),
        program=program.astype(np.uint16 if program.max() < 1 << 16 else np.uint32),
        pred=pred,
        n_slots=n_slots,
    )


def _normalised_edges(structure: Structure) -> tuple[Int[np.ndarray, "ops 2"], Int[np.ndarray, "ops 2"]]:
    """Predecessors and lags with a lone predecessor in the first column and no lag without an edge."""
    pred = structure.pred.astype(np.int64)
    lag = structure.lag.astype(np.int64)

    # The same edge twice is one edge.
    twice = (pred[:, 0] == pred[:, 1]) & (lag[:, 0] == lag[:, 1])
    pred[twice, 1] = -1

    # A missing first predecessor reads as 0, the start of the step; a missing second one as never.
    lone_second = (pred[:, 0] < 0) & (pred[:, 1] >= 0)
    pred[lone_second] = pred[lone_second, ::-1]
    lag[lone_second] = lag[lone_second, ::-1]
    lag[pred < 0] = 0
    return pred, lag
