"""Kernel rows of one family as columns, made from ops or from a measurement table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from perfmodel.ingest.tables import factorise, number, relabel, text
from perfmodel.ops import FAMILIES, Family, KernelKind, KernelOp, KindColumns
from perfmodel.units import DTYPE_BYTES


@dataclass(frozen=True)
class Rows:
    """`n` kernels of one family."""

    family: str
    shape: dict[str, Float64[np.ndarray, "n"]]
    """The family's shape columns (and flags read off the row: transposes, element size)."""
    kinds: tuple[KernelKind, ...]
    """The distinct kinds of the rows."""
    kind: Int64[np.ndarray, "n"]
    """Index into `kinds` of every row."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def columns(self) -> KindColumns:
        """Dtype class, op and pass of every row."""
        return KindColumns.of(self.kinds, self.kind)

    @property
    def dtypes(self) -> np.ndarray:
        """Dtype class of every row (object dtype)."""
        return np.array([kind.dtype for kind in self.kinds], object)[self.kind]

    def by_kind(self, rule: Callable[[KernelKind], Any]) -> np.ndarray:
        """`rule(kind)` of every row [n]."""
        return np.array([rule(kind) for kind in self.kinds])[self.kind]

    def take(self, index: np.ndarray) -> "Rows":
        """The rows at `index`."""
        shape = {name: values[index] for name, values in self.shape.items()}
        return Rows(self.family, shape, *distinct(self.kinds, self.kind[index]))

    def changed(self, shape: Mapping[str, np.ndarray], **parts: str) -> "Rows":
        """With other shape columns, and parts (`dtype`, `op`, `pass_`) of every kind."""
        kinds = [replace(kind, **parts) for kind in self.kinds]
        return Rows(self.family, self.shape | dict(shape), *distinct(kinds, self.kind))


def distinct(
    kinds: Sequence[KernelKind], index: Int64[np.ndarray, "n"]
) -> tuple[tuple[KernelKind, ...], Int64[np.ndarray, "n"]]:
    """Those of `kinds` that `index` names, each once, and their index in turn."""
    named = np.bincount(index, minlength=len(kinds)) > 0
    place: dict[KernelKind, int] = {}
    moved = [place.setdefault(kind, len(place)) if held else 0 for kind, held in zip(kinds, named, strict=True)]
    return tuple(place), np.array(moved, np.int64)[index]


def kinds_of(columns: KindColumns) -> tuple[tuple[KernelKind, ...], Int64[np.ndarray, "n"]]:
    """The distinct kinds of columns in order of appearance, and the index of every row's."""
    codes, words = zip(*map(factorise, columns), strict=True)
    sizes = [max(len(part), 1) for part in words]
    index, seen = pd.factorize(np.ravel_multi_index(codes, sizes))
    parts = zip(*np.unravel_index(seen, sizes), strict=True)
    return tuple(KernelKind(*(of[i] for of, i in zip(words, at, strict=True))) for at in parts), index


def rows_from_ops(ops: Sequence[KernelOp]) -> Rows:
    """Columns of ops that all belong to one family."""
    family = FAMILIES[ops[0].family]
    shape = {name: np.asarray([getattr(op, name) for op in ops], np.float64) for name in family.columns}
    op_names = np.array([op.op for op in ops], object)
    dtypes = np.array([op.dtype for op in ops], object)
    passes = np.array([op.pass_ for op in ops], object)
    return _finish(family, shape, op_names, dtypes, passes, np.full(len(ops), "", object))


def rows_from_table(table: pd.DataFrame, family: str) -> tuple[Rows, np.ndarray]:
    """Columns of a clean table's rows of one family, and which of them are complete.

    Args:
        table: as `perfmodel.ingest.clean_kernels` gives it.

    Returns:
        The rows (incomplete ones hold placeholders of one) and a bool mask [n] of complete ones.
    """
    shape = {}
    complete = np.ones(len(table), bool)
    known = FAMILIES[family]
    for name, stated in known.columns.items():
        column = stated.column or name
        if stated.from_text is not None:
            shape[name] = relabel(text(table, column), stated.from_text).astype(np.float64)
            continue
        values = number(table, column)
        missing = ~np.isfinite(values)
        if stated.default is None:
            complete &= ~missing & (values > 0)
            values[missing | (values <= 0)] = 1.0
        else:
            values[missing] = stated.default
        shape[name] = values
    names = text(table, "op"), text(table, "dtype"), text(table, "pass", "fwd"), text(table, "layout")
    return _finish(known, shape, *names), complete


def dtype_class(dtype: str) -> str:
    """Class of element types that run alike: fp16 and bf16 are `half`, all 8-bit floats `fp8`."""
    if dtype in ("fp16", "bf16"):
        return "half"
    return "fp8" if dtype.startswith("fp8") else dtype


def _element_bytes(dtype_class: str) -> float:
    return float(DTYPE_BYTES.get("bf16" if dtype_class == "half" else dtype_class, 4))


def _finish(
    family: Family,
    shape: dict[str, np.ndarray],
    ops: np.ndarray,
    dtypes: np.ndarray,
    passes: np.ndarray,
    layout: np.ndarray,
) -> Rows:
    """Add what all families need: kinds, and the columns that follow from names."""
    family.complete(shape, ops, passes, layout)
    names = relabel(ops, family.known_op)
    if family.op_by_shape is not None:
        names = np.where(names == "", family.op_by_shape(shape), names).astype(object)
    classes = relabel(dtypes, dtype_class)
    shape["element_bytes"] = relabel(classes, _element_bytes).astype(np.float64)
    return Rows(family.name, shape, *kinds_of(KindColumns(classes, names, passes)))


def in_16_bits(rows: Rows) -> Rows:
    """The same kernels on elements of 16 bits."""
    return rows.changed({"element_bytes": np.full(len(rows), 2.0)}, dtype="half")


def with_half_the_batch(rows: Rows) -> Rows:
    """The same kernels over half of the batch."""
    return rows.changed({"batch": rows.shape["batch"] / 2})
