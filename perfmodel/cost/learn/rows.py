"""Kernel rows of one family as columns, from ops or measurement tables, and as inputs of a
regressor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.cost.learn.stack import Figures
from perfmodel.display import shorten_reprs
from perfmodel.ingest.tables import codes_by_appearance, factorise, number, relabel, text
from perfmodel.ops import FAMILIES, Family, KernelKind, KernelOp, KindColumns, Physics
from perfmodel.ops.physics import Machine
from perfmodel.units import DTYPE_BYTES

if TYPE_CHECKING:
    import pandas as pd


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
        """Replace shape columns of all rows, and parts (`dtype`, `op`, `pass_`) of every kind."""
        kinds = [replace(kind, **parts) for kind in self.kinds]
        return Rows(self.family, self.shape | dict(shape), *distinct(kinds, self.kind))


def distinct(
    kinds: Sequence[KernelKind], index: Int64[np.ndarray, "n"]
) -> tuple[tuple[KernelKind, ...], Int64[np.ndarray, "n"]]:
    """The distinct kinds of the rows, and the index of each row's kind."""
    is_named = np.bincount(index, minlength=len(kinds)) > 0
    place: dict[KernelKind, int] = {}
    new_index = np.zeros(len(kinds), np.int64)
    for i in np.flatnonzero(is_named).tolist():
        new_index[i] = place.setdefault(kinds[i], len(place))
    return tuple(place), new_index[index]


def kinds_of(columns: KindColumns) -> tuple[tuple[KernelKind, ...], Int64[np.ndarray, "n"]]:
    """The distinct kinds of columns in order of appearance, and the index of every row's."""
    dtype_code, dtypes = factorise(columns.dtype)
    op_code, ops = factorise(columns.op)
    pass_code, passes = factorise(columns.pass_)

    # One number for each combination: comparing numbers is much faster than comparing tuples of
    # text row by row.
    sizes = [max(len(names), 1) for names in (dtypes, ops, passes)]
    combined = np.ravel_multi_index((dtype_code, op_code, pass_code), sizes)
    index, distinct = codes_by_appearance(combined.tolist())
    combinations = np.transpose(np.unravel_index(distinct, sizes))
    kinds = tuple(
        KernelKind(dtypes[dtype], ops[op], passes[pass_]) for dtype, op, pass_ in combinations
    )
    return kinds, index


def rows_from_ops(ops: Sequence[KernelOp]) -> Rows:
    """Columns of ops that all belong to one family."""
    family = FAMILIES[ops[0].family]
    shape = {}
    for name in family.columns:
        shape[name] = np.asarray([getattr(op, name) for op in ops], np.float64)
    op_names = np.array([op.op for op in ops], object)
    dtypes = np.array([op.dtype for op in ops], object)
    passes = np.array([op.pass_ for op in ops], object)
    return _finish(family, shape, op_names, dtypes, passes, np.full(len(ops), "", object))


def rows_from_table(table: "pd.DataFrame", family: str) -> tuple[Rows, np.ndarray]:
    """Columns of a clean table's rows of one family, and which of them are complete.

    Args:
        table: the result of `perfmodel.ingest.clean_kernels`.

    Returns:
        The rows (incomplete ones hold placeholders of one) and a bool mask [n] of complete ones.
    """
    shape = {}
    complete = np.ones(len(table), bool)
    known = FAMILIES[family]
    for name, stated in known.columns.items():
        # Facts read off text, such as a layout, are always complete; numbers may miss, and only
        # some have a default.
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
    names = (
        text(table, "op"),
        text(table, "dtype"),
        text(table, "pass", "fwd"),
        text(table, "layout"),
    )
    return _finish(known, shape, *names), complete


def dtype_class(dtype: str) -> str:
    """Class of equally fast element types: fp16 and bf16 are `half`, all 8-bit floats `fp8`."""
    if dtype in ("fp16", "bf16"):
        return "half"
    return "fp8" if dtype.startswith("fp8") else dtype


def _element_bytes(dtype_class: str) -> float:
    dtype = "bf16" if dtype_class == "half" else dtype_class
    return float(DTYPE_BYTES.get(dtype, 4))


def _finish(
    family: Family,
    shape: dict[str, np.ndarray],
    ops: np.ndarray,
    dtypes: np.ndarray,
    passes: np.ndarray,
    layout: np.ndarray,
) -> Rows:
    """Add what all families need: kinds, and the columns that follow from names."""
    # The family first completes the shape from layout and pass, because the op may follow from the
    # shape.
    family.complete(shape, ops, passes, layout)
    names = relabel(ops, family.known_op)
    if family.op_by_shape is not None:
        names = np.where(names == "", family.op_by_shape(shape), names).astype(object)
    classes = relabel(dtypes, dtype_class)
    shape["element_bytes"] = relabel(classes, _element_bytes).astype(np.float64)
    return Rows(family.name, shape, *kinds_of(KindColumns(classes, names, passes)))


def in_16_bits(rows: Rows) -> Rows:
    """Return the kernels on elements of 16 bits."""
    return rows.changed({"element_bytes": np.full(len(rows), 2.0)}, dtype="half")


@dataclass(frozen=True)
class KindCode:
    """Vocabulary of dtype classes, ops and passes of one regressor."""

    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    passes: tuple[str, ...]

    @classmethod
    def of(cls, kinds: Sequence[KernelKind]) -> "KindCode":
        """Vocabulary of the given kinds, sorted."""
        dtypes = {kind.dtype for kind in kinds}
        ops = {kind.op for kind in kinds}
        passes = {kind.pass_ for kind in kinds}
        return cls(tuple(sorted(dtypes)), tuple(sorted(ops)), tuple(sorted(passes)))

    @property
    def size(self) -> int:
        return len(self.dtypes) + len(self.ops) + len(self.passes)

    def one_hot(self, kind: KernelKind) -> np.ndarray:
        """Code of one kind [K]; parts outside the vocabulary stay zero."""
        code = np.zeros(self.size)
        offset = 0
        for part, vocabulary in (
            (kind.dtype, self.dtypes),
            (kind.op, self.ops),
            (kind.pass_, self.passes),
        ):
            if part in vocabulary:
                code[offset + vocabulary.index(part)] = 1.0
            offset += len(vocabulary)
        return code


def kind_distance(a: KernelKind, b: KernelKind) -> float:
    """Distance of two kinds: 1 for a different pass, 2 for op, 4 for dtype (forward is the best
    stand-in)."""
    distance = 4.0 * (a.dtype != b.dtype) + 2.0 * (a.op != b.op)
    if a.pass_ != b.pass_:
        if b.pass_ == "fwd":
            distance += 1.0
        else:
            distance += 1.5
    return distance


_ONE_PRODUCT = ("dgrad", "wgrad", "bwd_one_gemm", "fwd")
"""Passes that are one product each."""


def _pass_cost(requested: str, candidate: str) -> float:
    """Cost of letting one pass stand in for another; 0 for the same pass.

    A single gradient is one product, like forward, so they stand in for each other at low cost.
    Both gradients together, or gradients that are also accumulated, do other work. `bwd_one_gemm`,
    a gradient whose source does not say which one it is, was timed on too few shapes to stand in
    for others.
    """
    if requested == candidate:
        return 0.0

    # Higher than the cost of another dtype (4), because such a pass does other work.
    other_work = 6.0
    if requested in _ONE_PRODUCT:
        if candidate == "fwd":
            return 2.5
        if candidate == "bwd_one_gemm":
            return 3.5
        return 3.0 if candidate in _ONE_PRODUCT else other_work
    if "grad_accum" in (requested, candidate):
        return other_work
    return 3.0 if candidate == "fwd" or candidate not in _ONE_PRODUCT else 3.5


def stand_in(kind: KernelKind, known: Sequence[KernelKind]) -> KernelKind:
    """The measured kind closest to `kind`; `kind` itself if measured.

    Ops that share a word (`layer_norm`, `rms_norm`) are alike, unless one is several unfused
    kernels; failing that an element-wise activation stands in. The pass matters more than the op,
    the dtype most.
    """
    if kind in known:
        return kind
    op_parts = set(kind.op.split("_"))

    def cost(candidate: KernelKind) -> tuple[float, KernelKind]:
        """Cost of letting a measured kind stand in, and the kind itself, which decides between
        equal costs; the order of weights files must not."""
        total = _pass_cost(kind.pass_, candidate.pass_)
        if candidate.dtype != kind.dtype:
            total += 4.0
        if candidate.op == kind.op:
            return total, candidate

        candidate_parts = set(candidate.op.split("_"))
        total += 2.0
        if op_parts & candidate_parts:
            total -= 1.0
        if candidate.op == "gelu":
            total -= 0.5
        if ("unfused" in op_parts) != ("unfused" in candidate_parts):
            total += 1.5
        return total, candidate

    return min(known, key=cost)


def shape_with_flags(rows: Rows) -> dict[str, np.ndarray]:
    """The rows' shape columns with the flags that their kinds fix."""
    shape = rows.shape | {"bwd": rows.by_kind(lambda kind: float(kind.pass_ == "bwd"))}
    flags_of_kind = {kind: FAMILIES[rows.family].kind_flags(kind) for kind in rows.kinds}
    flag_names: dict[str, None] = {}
    for flags in flags_of_kind.values():
        flag_names.update(dict.fromkeys(flags))

    # kinds that do not fix a flag (NaN) leave it to the row's own column
    for name in flag_names:
        fixed = rows.by_kind(lambda kind, name=name: flags_of_kind[kind].get(name, np.nan))
        shape[name] = np.where(np.isnan(fixed), shape.get(name, fixed), fixed)
    return shape


def machine_of(figures: Sequence[Figures], index: np.ndarray, dtypes: np.ndarray) -> Machine:
    """Device figures per row: `figures[index[i]]` at dtype class `dtypes[i]`."""
    codes, names = factorise(dtypes)
    peaks = np.zeros((len(figures), len(names)))
    for i, device in enumerate(figures):
        peaks[i] = [device.peak(name) for name in names]
    return Machine(
        peak=peaks[index, codes],
        bandwidth=np.array([device.bandwidth for device in figures], float)[index],
        units=np.array([device.units for device in figures], float)[index],
        l2=np.array([device.l2 for device in figures], float)[index],
        clock=np.array([device.clock for device in figures], float)[index],
    )


def physics_of(
    figures: Sequence[Figures], index: np.ndarray, rows: Rows
) -> tuple[Physics, Machine]:
    """FLOPs, traffic and waves of rows, row i on the device of `figures[index[i]]`; and its figures
    per row."""
    machine = machine_of(figures, index, rows.dtypes)
    return FAMILIES[rows.family].physics(np, shape_with_flags(rows), machine), machine


def one_hot(code: KindCode, rows: Rows) -> np.ndarray:
    """Kind codes of rows [n, K]."""
    return np.stack([code.one_hot(kind) for kind in rows.kinds])[rows.kind]


shorten_reprs(__name__)
