"""From measurement tables to what a regressor is fitted on: cleaned, grouped, split."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from perfmodel.errors import TableError, UnknownNameError
from perfmodel.learn._inputs import machine_of, one_hot, shape_with_flags
from perfmodel.learn._kinds import KindCode
from perfmodel.learn._machine import Figures
from perfmodel.learn._physics import PHYSICS
from perfmodel.learn._rows import Rows, rows_from_table
from perfmodel.learn._stack import Stack

TF32_SOURCES = frozenset({"sailor_aceso", "xla_perf_tables"})
"""Sources whose fp32 products run in TF32 on NVIDIA Ampere and later (their tables say so)."""
_BEFORE_TF32 = frozenset({"Maxwell", "Pascal", "Volta", "Turing"})


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
        """Dtype class of every row."""
        return np.array([k.partition("/")[0] for k in self.rows.kind], object)


def software_label(table: pd.DataFrame) -> pd.Series:
    """Software of every row, with the variant where one source mixes kernels of several types."""
    software = table["software"] if "software" in table else pd.Series("", index=table.index)
    software = software.fillna("").astype(str).replace("", "unknown")
    if "variant" in table and "source" in table:
        typed = (table["source"] == "xla_perf_tables") & table["variant"].notna()
        software = software.where(~typed, software + " " + table["variant"].fillna("").astype(str))
    return software


def effective_dtype(table: pd.DataFrame, architectures: dict[str, tuple[str, str]]) -> pd.Series:
    """Dtype by which a row ran: `tf32` where a source's fp32 is known to use tensor cores."""
    dtype = table["dtype"].astype(str)
    if "source" not in table:
        return dtype
    tensor = {name: vendor == "NVIDIA" and arch not in _BEFORE_TF32 for name, (vendor, arch) in architectures.items()}
    uses = table["source"].isin(TF32_SOURCES) & table["device"].map(tensor).fillna(False).astype(bool)
    uses &= table["op_family"].isin(["gemm"]) & (dtype == "fp32")
    return dtype.where(~uses, "tf32")


def _trusted(table: pd.DataFrame) -> np.ndarray:
    """Rows that may be fitted: not set apart as suspect, of a stated unit, and not known to be wrong.

    NeuSight's P4 `linear` rows of its train and test splits disagree by 2.8x; the sources say
    nothing about which is right, so the (few) test rows, which break the trend, are dropped.
    """
    variant = table["variant"].fillna("").astype(str) if "variant" in table else pd.Series("", index=table.index)
    bad = variant.str.startswith("suspect") | variant.eq("unit_not_stated")
    if "origin_split" in table and "device" in table and "op" in table:
        bad |= (table["device"] == "P4") & (table["op"] == "linear") & (table["origin_split"] == "test")
    return ~bad.to_numpy()


def gather(
    tables: Iterable[pd.DataFrame], family: str, dtypes: tuple[str, ...], figures_of: Callable[[str], Figures]
) -> Samples:
    """Merge tables into the samples of one family.

    Raises:
        TableError: if no usable row remains.
        UnknownNameError: for a device that `figures_of` does not know.
    """
    parts: list[tuple[Rows, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for table in tables:
        table = table[(table["op_family"] == family).to_numpy() & usable_rows(table)]
        if len(table):
            known = {d: figures_of(d) for d in table["device"].unique()}
            table = table.assign(
                dtype=effective_dtype(table, {d: (f.vendor, f.architecture) for d, f in known.items()})
            )
            rows, complete = rows_from_table(table, family)
            names = table["device"].map({d: f.name for d, f in known.items()}).to_numpy(object)
            source = (table["source"] if "source" in table else pd.Series("measured", index=table.index)).fillna("")
            keep = complete & (table["time_us"].to_numpy(np.float64) > 0)
            if dtypes:
                keep &= np.isin(np.array([k.partition("/")[0] for k in rows.kind], object), list(dtypes))
            index = np.flatnonzero(keep)
            parts.append((
                rows.take(index), names[index], source.to_numpy(object)[index],
                software_label(table).to_numpy(object)[index], table["time_us"].to_numpy(np.float64)[index] * 1e-6,
            ))  # fmt: skip
    parts = [p for p in parts if len(p[0])]
    if not parts:
        raise TableError(f"no usable {family} row in the given tables")
    return _merge(family, parts, figures_of)


def usable_rows(table: pd.DataFrame) -> np.ndarray:
    """Trusted rows with a number in the time column."""
    return _trusted(table) & (pd.to_numeric(table["time_us"], errors="coerce") > 0).to_numpy()


def _merge(family: str, parts: list, figures_of: Callable[[str], Figures]) -> Samples:
    shape = {k: np.concatenate([p[0].shape[k] for p in parts]) for k in parts[0][0].shape}
    frame = pd.DataFrame(shape)
    frame["kind"] = np.concatenate([p[0].kind for p in parts])
    for column, index in (("device", 1), ("source", 2), ("software", 3), ("time_s", 4)):
        frame[column] = np.concatenate([p[index] for p in parts])
    keys = [c for c in frame.columns if c != "time_s"]
    frame = frame.groupby(keys, sort=True, as_index=False)["time_s"].median()
    label = frame["device"] + "|" + frame["source"] + "|" + frame["software"]
    codes, labels = pd.factorize(label, sort=True)
    stacks = []
    for label in labels:
        device, source, software = label.split("|", 2)
        mine = frame["kind"][codes == len(stacks)]
        stacks.append(Stack(figures_of(device), source, software, {k: int(v) for k, v in mine.value_counts().items()}))
    rows = Rows(family, {k: frame[k].to_numpy(np.float64) for k in shape}, frame["kind"].to_numpy(object))
    key_columns = [k for k in shape if k not in ("element_bytes", "trans_a", "trans_b", "accumulate")]
    shape_key = pd.util.hash_pandas_object(frame[key_columns], index=False).to_numpy()
    return Samples(rows, codes.astype(np.int64), frame["time_s"].to_numpy(np.float64), tuple(stacks), shape_key)


def held_out(samples: Samples, share: float) -> np.ndarray:
    """Bool mask of samples whose whole shape (on every device and software) is kept out."""
    return samples.shape_key % 10_000 < share * 10_000


def split(samples: Samples, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices to fit on, to stop early by, and to report on; a shape is in one of them only."""
    test = held_out(samples, share)
    check = ~test & ((samples.shape_key // np.uint64(10_000)) % np.uint64(100) < 4)
    if check.sum() < 20:
        check = np.zeros(len(samples), bool)
    order = np.random.default_rng(0).permutation(np.flatnonzero(check))
    return np.flatnonzero(~test & ~check), order, np.flatnonzero(test)


def digest(paths: Iterable[Path | str]) -> dict[str, str]:
    """SHA-256 of every table file by `folder/name`, for the weights file's record."""
    return {"/".join(Path(p).parts[-2:]): hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in paths}


def figures_lookup() -> Callable[[str], Figures]:
    """Figures by catalog name or alias, remembered."""
    from perfmodel.catalog import device

    known: dict[str, Figures] = {}

    def lookup(name: str) -> Figures:
        if name not in known:
            try:
                known[name] = Figures.of(device(name))
            except UnknownNameError as error:
                raise TableError(f"table names device {name!r}: {error}; add it to a device file") from None
        return known[name]

    return lookup


NOT_KERNELS: Final = ("collective", "moe_alltoall", "suspect_", "composite", "layers", "forward_layers", "e2e", "rnn")
"""File name prefixes of shared tables that hold no kernels, or rows not to be fitted."""
UNLICENSED: Final = ("alps_gh200",)
"""Folders whose source states no licence: for validation only."""


def kernel_table_paths(folder: Path) -> list[Path]:
    """Licensed kernel tables under a folder of measurement tables, sorted."""
    found = sorted(folder.glob("*/*.csv.gz"))
    kernels = [p for p in found if p.parent.name not in UNLICENSED and not p.name.startswith(NOT_KERNELS)]
    return [p for p in kernels if p.name != "edges.csv.gz" and p.parent.name != "published"]


def kernel_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The licensed kernel tables under a folder by `source/file`.

    Raises:
        TableError: if the folder holds none.
    """
    from perfmodel.io import read_table

    paths = kernel_table_paths(Path(folder))
    if not paths:
        raise TableError(f"{folder}: no measurement tables found; set PERFMODEL_DATA to the folder that has them")
    return {"/".join(p.parts[-2:]): read_table(p) for p in paths}


def tree_features(samples: Samples, *, with_software: bool) -> Float64[np.ndarray, "n F"]:
    """Inputs of the tree baseline: log shapes, FLOPs and bytes, device figures, kind (and stack)."""
    machine = machine_of([s.figures for s in samples.stacks], samples.stack, samples.dtypes)
    physics = PHYSICS[samples.rows.family](np, shape_with_flags(samples.rows), machine)
    columns = [np.log2(1.0 + v) for v in samples.rows.shape.values()]
    columns += [np.log2(physics.flops), np.log2(physics.bytes), *(np.log2(figure) for figure in machine)]
    kinds = sorted(set(samples.rows.kind.tolist()))
    code = one_hot(KindCode.of(kinds), samples.rows.kind)
    extra = [samples.stack.astype(np.float64)] if with_software else []
    return np.column_stack([*columns, code, *extra])
