"""Compiled structures as padded arrays on the device.

Lengths are padded to powers of two, so that structures of like size share one trace; the loops run
over the true number of ops, so padding costs memory, not time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from perfmodel.timeline._compile import BUNDLE, NEVER_SLOT, SPARE_SLOT, ZERO_SLOT, CompiledStructure

SMALLEST_OPS: Final = 1024
SMALLEST_SLOTS: Final = 256
SMALLEST_CLASSES: Final = 128

SOURCE_A, SOURCE_B, DESTINATION, DURATION, LAG_A, LAG_B = range(6)
"""Columns of a program; the last two are absent where no edge has a lag."""


def bucket(n: int, smallest: int) -> int:
    """The least power of two that holds `n`, and at least `smallest`."""
    return max(smallest, 1 << (n - 1).bit_length())


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["program", "pred", "n_ops"],
    meta_fields=["width", "n_slots", "n_classes"],
)
@dataclass(frozen=True, eq=False)
class OpTables:
    """One structure, or several end to end, as the program of a loop over single ops."""

    program: UInt[Array, " padded*width"]
    """Rows of `width` columns, flat: a scalar read from a flat array is the cheapest there is."""
    pred: Int[Array, " padded*2"]
    """Positions of both predecessors inside the op's own structure, flat; -1 for none."""
    n_ops: Int[Array, ""]
    """Ops of the (longest) structure."""
    width: int
    n_slots: int
    n_classes: int
    """Classes of one structure, padded (unused where several structures lie end to end)."""

    @property
    def padded_ops(self) -> int:
        return self.program.shape[0] // self.width


@partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "n_bundles"], meta_fields=["has_lags", "n_slots"]
)
@dataclass(frozen=True, eq=False)
class BundleTables:
    """One structure as the program of a loop over bundles of independent ops."""

    rows: UInt[Array, "padded_bundles columns"]
    """`BUNDLE` entries each of the program's columns but the destination, then the bundle's first slot."""
    n_bundles: Int[Array, ""]
    has_lags: bool
    n_slots: int


def op_tables(compiled: CompiledStructure) -> OpTables:
    """`compiled` on the device, ready for the loops over single ops (kept with it once made)."""
    return _kept(compiled, "op_tables", lambda: join([compiled]))


def bundle_tables(compiled: CompiledStructure) -> BundleTables:
    """`compiled` on the device, ready for the loop over bundles (kept with it once made)."""
    return _kept(compiled, "bundle_tables", lambda: _bundle_tables(compiled))


def _kept(compiled: CompiledStructure, name: str, make):
    """Transfer once per structure; concrete arrays even where the caller is being traced."""
    if name not in compiled.on_device:
        with jax.ensure_compile_time_eval():
            compiled.on_device[name] = make()
    return compiled.on_device[name]


def join(structures: Sequence[CompiledStructure]) -> OpTables:
    """Programs of several structures end to end, in one table."""
    n = sum(c.n_ops for c in structures)
    width = 6 if any(c.has_lags for c in structures) else 4
    program = np.zeros((bucket(n, SMALLEST_OPS), width), np.uint32)
    program[n:, : DESTINATION + 1] = ZERO_SLOT, NEVER_SLOT, SPARE_SLOT
    pred = np.full((len(program), 2), -1, np.int32)
    at = 0
    for c in structures:
        rows = slice(at, at + c.n_ops)
        program[rows, :DESTINATION] = c.source
        program[rows, DESTINATION] = c.destination
        program[rows, DURATION] = c.duration
        if c.has_lags:
            program[rows, LAG_A:] = c.lag
        pred[rows] = c.pred
        at += c.n_ops
    return OpTables(
        program=jnp.asarray(program.reshape(-1)),
        pred=jnp.asarray(pred.reshape(-1)),
        n_ops=jnp.int32(max(c.n_ops for c in structures)),
        width=width,
        n_slots=bucket(max(c.n_slots for c in structures), SMALLEST_SLOTS),
        n_classes=bucket(max(c.n_classes for c in structures), SMALLEST_CLASSES),
    )


def _bundle_tables(compiled: CompiledStructure) -> BundleTables:
    n_bundles = compiled.n_bundles
    padded = bucket(n_bundles, SMALLEST_OPS // BUNDLE)
    first = np.searchsorted(compiled.bundle, np.arange(n_bundles))
    cell = compiled.bundle * BUNDLE + np.arange(compiled.n_ops) - first[compiled.bundle]

    def laid_out(column: UInt[np.ndarray, " ops"], fill: int) -> UInt[np.ndarray, "padded_bundles {BUNDLE}"]:
        cells = np.full(padded * BUNDLE, fill, np.uint32)
        cells[cell] = column
        return cells.reshape(padded, BUNDLE)

    columns = [
        laid_out(compiled.source[:, 0], ZERO_SLOT),
        laid_out(compiled.source[:, 1], NEVER_SLOT),
        laid_out(compiled.duration, 0),
    ]
    if compiled.has_lags:
        columns += [laid_out(compiled.lag[:, 0], 0), laid_out(compiled.lag[:, 1], 0)]
    block = np.zeros((padded, 1), np.uint32)
    block[:n_bundles, 0] = compiled.destination[first] // BUNDLE * BUNDLE
    return BundleTables(
        rows=jnp.asarray(np.concatenate([*columns, block], axis=1)),
        n_bundles=jnp.int32(n_bundles),
        has_lags=compiled.has_lags,
        n_slots=bucket(compiled.n_slots, SMALLEST_SLOTS),
    )
