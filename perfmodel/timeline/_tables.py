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

BUNDLE: Final = 16
"""Most ops of a bundle, and number of slots of a block."""

GROUP: Final = 4
"""A slot is not reused before the end of the aligned group of this many positions that reads it
last, so that a loop may process a group and then still read all of the group's sources."""

ZERO_SLOT: Final = 0
"""Slot that holds 0, the start of an op without predecessors."""
NEVER_SLOT: Final = 1
"""Slot that holds `NEVER_S`, the end of a missing predecessor."""
RESULT_SLOT: Final = 2
"""Slot for the end time of the last op, the end of the step."""
SPARE_SLOT: Final = 3
"""Slot to which padding writes."""
NEVER_S: Final = -1e15
"""A time before any event, but finite, so that smooth maxima have finite gradients."""

_FIRST_BLOCK: Final = 1
"""First block for end times; block 0 holds the four special slots."""

# Least sizes of padded arrays: programs below them all share a trace.
SMALLEST_OPS: Final = 4096
SMALLEST_JOINED_OPS: Final = 1 << 17
SMALLEST_BUNDLES: Final = 64
SMALLEST_SLOTS: Final = 1024
SMALLEST_TILE_SLOTS: Final = 256
"""Least number of slots in tiles, which is small because each slot is a row of a whole tile of
lanes."""

SOURCE_A, SOURCE_B, DESTINATION, DURATION, LAG_A, LAG_B = range(6)
"""Columns of a program; the last two are absent if no edge has a lag, the last also after
`_lags_first`."""
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
    """One structure, or several concatenated ones, as the program of a loop over single ops."""

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
    def has_lags(self) -> bool:
        return self.width > LAG_A


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "n_bundles"],
    meta_fields=["has_lags", "n_slots"],
)
@dataclass(frozen=True, eq=False)
class BundleTables:
    """One structure as the program of a loop over bundles of independent ops."""

    rows: UInt[Array, "padded_bundles columns"]
    """`BUNDLE` entries of each program column but the destination, then the first slot that the
    previous bundle writes. One read per step loads everything."""
    n_bundles: Int[Array, ""]
    has_lags: bool
    n_slots: int


@dataclass(frozen=True, eq=False)
class CompiledStructure:
    """A `Structure` as a flat program over slots; "position" is the program's order of ops."""

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
    """Number of slots for end times, including the special ones."""

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


def join(
    structures: Sequence[CompiledStructure], *, with_pred: bool = True, device: int = 0
) -> OpTables:
    """Concatenate the programs of several structures in one table, on one of JAX's CPU devices.

    Without `pred` (empty then) the table serves the makespans of a batch, not their gradients:
    which predecessor comes first does not matter.
    """
    n_ops = sum(compiled.n_ops for compiled in structures)
    longest = max(compiled.n_ops for compiled in structures)
    programs = [compiled.program for compiled in structures]
    if not with_pred:
        programs = [_lags_first(program) for program in programs]

    # 32 bits are a sixth faster to run than 16 bits, which take half the time to join: the former
    # for a program that runs alone and often, the latter for a batch.
    if with_pred and len(structures) == 1:
        padded = bucket(n_ops, SMALLEST_OPS)
        dtype = np.uint32
    else:
        padded = bucket(n_ops, SMALLEST_JOINED_OPS)
        dtype = np.result_type(*programs)

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
    """The program by bundles; unused places of a bundle compute 0 and are never read."""
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

    # The first bundle finds no ends to write: its zeros go to block 1, its own, which it writes
    # afterwards.
    before = np.full((padded, 1), BUNDLE, compiled.program.dtype)
    before[1:n_bundles, 0] = compiled.program[first[:-1], DESTINATION] // BUNDLE * BUNDLE
    return BundleTables(
        rows=_on_cpu(np.concatenate([by_column, before], axis=1)),
        n_bundles=_on_cpu(np.int32(n_bundles)),
        has_lags=LAG_A in columns,
        n_slots=bucket(compiled.n_slots, SMALLEST_TILE_SLOTS),
    )


def n_cpu_devices() -> int:
    """Number of CPU devices that JAX has: 1 unless its host platform is configured otherwise."""
    return max(1, len(_cpu_devices()))


def _cpu_devices() -> list[Any]:
    """JAX's CPU devices; empty if there are none."""
    # `JAX_PLATFORMS` may leave the CPU out.
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:
        return []


def _on_cpu(array: np.ndarray | np.generic, device: int = 0) -> Array:
    """Commit an array to the CPU: long scalar loops are slow on an accelerator.

    The array is concrete even while the caller is being traced, as tables are kept across traces.
    """
    devices = _cpu_devices()
    with jax.ensure_compile_time_eval():
        return jax.device_put(array, devices[device] if devices else None)


def compile_structure(structure: Structure) -> CompiledStructure:
    """Order, bundle and allocate `structure` (130,000 ops take about 50 ms).

    Where an op's two predecessors release it at the same time, the first (`structure.pred[:, 0]`)
    counts as the one that did, whatever the order of ops in the program.
    """
    pred, lag = _normalised_edges(structure)

    # Order by levels, and name predecessors by their positions in this order.
    level = levels(pred)

    # Inside a level the order is by the level of the last reader: a bundle's block of slots is free
    # once all of its values were read. The extra entry at the end collects what missing
    # predecessors (index -1) write.
    last_read = np.zeros(len(level) + 1, np.int64)
    np.maximum.at(last_read, pred[:, 0], level)
    np.maximum.at(last_read, pred[:, 1], level)
    order = np.argsort(level * (level[-1] + 1) + last_read[:-1], kind="stable")

    position = np.empty(len(order) + 1, np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    position[-1] = -1
    pred = position[pred[order]]

    # Allocate a slot to every end time. The last op's is the one in which the loops look for the
    # makespan.
    bundle, rank = bundles(level[order])
    destination = BUNDLE * blocks(bundle, pred) + rank
    n_slots = int(destination.max()) + 1
    destination[-1] = RESULT_SLOT

    # An op without predecessors starts at max(0, never), one with a lone predecessor at max(its
    # end, never).
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


def _normalised_edges(
    structure: Structure,
) -> tuple[Int[np.ndarray, "ops 2"], Int[np.ndarray, "ops 2"]]:
    """Predecessors and lags, a lone predecessor in the first column, no lag without edge."""
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


# --- slots of end times
# -------------------------------------------------------------------------------
#
# Register allocation: the live set of a pipeline schedule is a few values per device, so the
# evaluator keeps end times in slots that are reused, not in an array as long as the program. Ops
# are put in level order and cut into bundles of independent ops, each of which writes one
# contiguous block of slots: the same allocation serves a loop over single ops (one or few lanes)
# and a loop over bundles (many lanes).


def levels(pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Length in ops of the longest path ending in each op; the last op comes after all others.

    A plain loop over lists: the recurrence does not vectorise (a pipeline has thousands of levels
    of some tens of ops each).
    """
    # A virtual op at index 0 has level 0. Shifting predecessors by one maps "none" (-1) to it, so
    # that the loop needs no test for missing predecessors.
    level_of = [0]
    first_pred = (pred[:, 0] + 1).tolist()
    second_pred = (pred[:, 1] + 1).tolist()
    append = level_of.append
    for a, b in zip(first_pred, second_pred, strict=True):
        level_a = level_of[a]
        level_b = level_of[b]
        append(level_a + 1 if level_a > level_b else level_b + 1)
    level = np.array(level_of[1:], dtype=np.int64)

    # The end of the step gets a separate level: it is then the last op of the program, alone in its
    # bundle, and the loops find the makespan at a place that they know.
    level[-1] = level.max() + 1
    return level


def bundles(
    level: Int[np.ndarray, " ops"],
) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " ops"]]:
    """Divide levels into bundles of `BUNDLE` ops: each position's bundle, and rank in it.

    `level` is in level order. Ops of one level do not depend on each other, so those of a bundle
    may run at once.
    """
    new_level = np.r_[True, level[1:] != level[:-1]]
    starts = np.flatnonzero(new_level)
    in_level = np.arange(len(level)) - starts[np.cumsum(new_level) - 1]
    rank = in_level % BUNDLE
    return np.cumsum(rank == 0) - 1, rank


def blocks(
    bundle: Int[np.ndarray, " ops"], pred: Int[np.ndarray, "ops 2"]
) -> Int[np.ndarray, " ops"]:
    """The block of slots that each position writes to, reused once all its values are read.

    This is linear-scan register allocation, with bundles as the values and blocks as the registers.
    """
    # Live ranges: the last position that reads any value of a bundle.
    n_ops = len(bundle)
    last_reader = np.arange(n_ops + 1)
    np.maximum.at(last_reader, pred[:, 0], np.arange(n_ops))
    np.maximum.at(last_reader, pred[:, 1], np.arange(n_ops))
    start = np.flatnonzero(np.r_[True, bundle[1:] != bundle[:-1]])
    last_read = np.maximum.reduceat(last_reader[:-1], start)

    # The first bundle that begins after the aligned group of `GROUP` positions with the last read:
    # until then the loop over single ops may still look into the slot, after it has written all of
    # the group's ends.
    reusable_from = np.searchsorted(start, (last_read // GROUP + 1) * GROUP)

    # Scan the bundles in order. The block freed last is taken first, and a new one only if none is
    # free.
    released: list[list[int]] = [[] for _ in range(len(start) + 1)]
    free: list[int] = []
    n_blocks = _FIRST_BLOCK
    block_of_bundle = []
    for bundle_index, released_at in enumerate(reusable_from.tolist()):
        free += released[bundle_index]
        if free:
            block = free.pop()
        else:
            block = n_blocks
            n_blocks += 1
        block_of_bundle.append(block)
        released[released_at].append(block)
    return np.array(block_of_bundle)[bundle]
