"""Kernel rows of one family as columns, made from ops or from a measurement table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64

from perfmodel.ingest.tables import number, relabel, text
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, Family, KernelOp, product_layout
from perfmodel.units import DTYPE_BYTES


@dataclass(frozen=True)
class Rows:
    """`n` kernels of one family."""

    family: str
    shape: dict[str, Float64[np.ndarray, "n"]]
    """The family's shape columns (and flags read off the row: transposes, element size)."""
    kind: np.ndarray
    """`dtype/op/pass` label of every row (object dtype): what a regressor treats as a category."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def dtypes(self) -> np.ndarray:
        """Dtype class of every row (object dtype)."""
        return relabel(self.kind, lambda kind: kind.partition("/")[0])

    def take(self, index: np.ndarray) -> "Rows":
        """The rows at `index`."""
        return Rows(self.family, {k: v[index] for k, v in self.shape.items()}, self.kind[index])


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
    """Add what all families need: the kind label and the columns that follow from names."""
    family.complete(shape, ops, passes, layout)
    names = relabel(ops, family.known_op)
    if family.op_by_shape is not None:
        names = np.where(names == "", family.op_by_shape(shape), names).astype(object)
    classes = relabel(dtypes, dtype_class)
    shape["element_bytes"] = relabel(classes, _element_bytes).astype(np.float64)
    kind = classes + "/" + names + "/" + passes
    return Rows(family.name, shape, kind.astype(object))


def as_measured(rows: Rows, kinds: np.ndarray, work: np.ndarray) -> Rows:
    """Rows as those of the kinds by which they are answered, doing the work of others.

    Operands of a product lie as the measured op and pass have them (where only forward was timed, `NN` was not),
    forward products add to nothing, and scores are masked as in the measured op.
    """
    shape = rows.shape
    ops, passes = (relabel(kinds, lambda kind, at=at: kind.split("/")[at]) for at in (1, 2))
    if rows.family == "gemm":
        as_asked = relabel(rows.kind, _without_dtype) == relabel(kinds, _without_dtype)
        measured = product_layout(ops, passes)
        shape = shape | {name: np.where(as_asked, shape[name], flag) for name, flag in measured.items()}
        adds = relabel(work, lambda kind: kind.rpartition("/")[2] != "fwd").astype(bool)
        shape["accumulate"] = np.where(adds | as_asked, shape["accumulate"], 0.0)
    if rows.family == "attention":
        moved = (relabel(work, _without_dtype) != relabel(rows.kind, _without_dtype)) & np.isin(ops, ATTENTION_MASKS)
        shape = shape | {"causal": np.where(moved, (ops == "causal").astype(np.float64), shape["causal"])}
    return Rows(rows.family, shape, work)


def _without_dtype(kind: str) -> str:
    return kind.partition("/")[2]
