"""From measurement tables to what a regressor is fitted on: cleaned, merged, split."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from perfmodel.errors import TableError, UnknownNameError
from perfmodel.learn._frame import factorise, number, text
from perfmodel.learn._machine import Figures
from perfmodel.learn._rows import Rows, rows_from_table
from perfmodel.learn._stack import Stack

TF32_SOURCES: Final = ("sailor_aceso", "xla_perf_tables")
"""Sources whose fp32 products run in TF32 on NVIDIA Ampere and later (their tables say so)."""
_BEFORE_TF32: Final = ("Maxwell", "Pascal", "Volta", "Turing")
_BETWEEN: Final = "\t"
_NOT_SHAPE: Final = ("element_bytes", "trans_a", "trans_b", "accumulate")


@dataclass(frozen=True)
class Samples:
    """Measured rows of one family, repeats of a shape merged to their median."""

    rows: Rows
    stack: Int64[np.ndarray, "n"]
    """Index into `stacks`."""
    time_s: Float64[np.ndarray, "n"]
    stacks: tuple[Stack, ...]
    shape_key: np.ndarray
    """uint64 [n], equal for equal shapes whatever the device, software or pass."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, index: np.ndarray) -> "Samples":
        """The samples at `index`, with the same stacks."""
        return Samples(self.rows.take(index), self.stack[index], self.time_s[index], self.stacks, self.shape_key[index])

    @property
    def dtypes(self) -> np.ndarray:
        """Dtype class of every row (object dtype)."""
        return self.rows.dtypes


def software_label(table: pd.DataFrame) -> np.ndarray:
    """Software of every row, with the variant where one source mixes kernels of several types."""
    software = text(table, "software", "unknown")
    typed = (text(table, "source") == "xla_perf_tables") & (text(table, "variant") != "")
    return np.where(typed, software + " " + text(table, "variant"), software).astype(object)


def effective_dtype(table: pd.DataFrame, figures: dict[str, Figures]) -> np.ndarray:
    """Dtype by which rows ran: `tf32` where a source's fp32 is known to use tensor cores."""
    dtype = text(table, "dtype")
    tensor = [d for d, f in figures.items() if f.vendor == "NVIDIA" and f.architecture not in _BEFORE_TF32]
    uses = np.isin(text(table, "source"), TF32_SOURCES) & np.isin(text(table, "device"), tensor)
    uses &= (text(table, "op_family") == "gemm") & (dtype == "fp32")
    return np.where(uses, "tf32", dtype).astype(object)


def trusted(table: pd.DataFrame) -> np.ndarray:
    """Rows that may be fitted: a time, not set apart as suspect, of a stated unit, not wrong, of warm caches.

    NeuSight's P4 `linear` rows of its train and test splits disagree by 2.8x; the few test rows,
    which break the trend of the many, are dropped.
    """
    variant = text(table, "variant").astype(str)
    bad = np.char.startswith(variant, "suspect") | (variant == "unit_not_stated")
    bad |= np.char.endswith(variant, "cold")
    bad |= (text(table, "device") == "P4") & (text(table, "op") == "linear") & (text(table, "origin_split") == "test")
    return ~bad & (number(table, "time_us") > 0)


def gather(
    tables: Iterable[pd.DataFrame], family: str, dtypes: tuple[str, ...], figures_of: Callable[[str], Figures]
) -> Samples:
    """Merge tables into the samples of one family (of some dtype classes, if any are named).

    Raises:
        TableError: if no usable row remains, or for a device that `figures_of` does not know.
    """
    parts = [p for t in tables if (p := _part(t, family, dtypes, figures_of)) is not None]
    if not parts:
        raise TableError(f"no usable {family} row in the given tables")
    return _merge(family, pd.concat(parts, ignore_index=True), figures_of)


def _part(
    table: pd.DataFrame, family: str, dtypes: tuple[str, ...], figures_of: Callable[[str], Figures]
) -> pd.DataFrame | None:
    """Usable rows of one table: shape columns, `kind`, and what identifies the stack."""
    mine: Any = table[(text(table, "op_family") == family) & trusted(table)]
    if not len(mine):
        return None
    figures = {device: figures_of(device) for device in factorise(text(mine, "device"))[1]}
    rows, complete = rows_from_table(mine.assign(dtype=effective_dtype(mine, figures)), family)
    if dtypes:
        complete &= np.isin(rows.dtypes, dtypes)
    frame = pd.DataFrame(rows.shape)
    frame["kind"] = rows.kind
    frame["device"] = [figures[d].name for d in text(mine, "device")]
    frame["source"] = text(mine, "source", "measured")
    frame["software"] = software_label(mine)
    frame["time_s"] = number(mine, "time_us") * 1e-6
    kept: Any = frame[complete]
    return kept if len(kept) else None


def _merge(family: str, frame: pd.DataFrame, figures_of: Callable[[str], Figures]) -> Samples:
    names = [c for c in frame.columns if c not in ("kind", "device", "source", "software", "time_s")]
    keys = ["device", "source", "software", "kind", *names]
    merged: Any = frame.groupby(keys, sort=True, as_index=False)["time_s"].median()
    label = text(merged, "device") + _BETWEEN + text(merged, "source") + _BETWEEN + text(merged, "software")
    codes, labels = factorise(label)  # sorted, as the merged rows are
    kind_codes, kinds = factorise(text(merged, "kind"))
    stacks = []
    for index, name in enumerate(labels):
        counts = np.bincount(kind_codes[codes == index], minlength=len(kinds))
        have = {kind: int(count) for kind, count in sorted(zip(kinds, counts, strict=True)) if count}
        device, source, software = name.split(_BETWEEN)
        stacks.append(Stack(figures_of(device), source, software, have))
    rows = Rows(family, {name: number(merged, name) for name in names}, text(merged, "kind"))
    shape_key = _shape_key(merged[[n for n in names if n not in _NOT_SHAPE]])
    return Samples(rows, codes.astype(np.int64), number(merged, "time_s"), tuple(stacks), shape_key)


def _shape_key(shapes: Any) -> np.ndarray:
    pandas: Any = pd
    return pandas.util.hash_pandas_object(shapes, index=False).to_numpy(np.uint64)


def held_out(samples: Samples, share: float) -> np.ndarray:
    """Bool mask of samples whose whole shape (on every device and software) is kept out."""
    return samples.shape_key % np.uint64(10_000) < share * 10_000


def split(samples: Samples, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices to fit on, to stop early by, and to report on; a shape is in one of them only."""
    test = held_out(samples, share)
    check = ~test & ((samples.shape_key // np.uint64(10_000)) % np.uint64(100) < 4)
    if check.sum() < 20:
        check = np.zeros(len(samples), bool)
    order = np.random.default_rng(0).permutation(np.flatnonzero(check))
    return np.flatnonzero(~test & ~check), order, np.flatnonzero(test)


def figures_lookup() -> Callable[[str], Figures]:
    """Figures by catalog name or alias, remembered; raises `TableError` for an unknown device."""
    from perfmodel.catalog import device

    known: dict[str, Figures] = {}

    def lookup(name: str) -> Figures:
        if name not in known:
            try:
                known[name] = Figures.of(device(name))
            except UnknownNameError as error:
                raise TableError(f"the table names a device that is not in the catalog: {error}") from None
        return known[name]

    return lookup
