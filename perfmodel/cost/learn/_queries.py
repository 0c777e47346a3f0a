"""What a regressor is asked and what it answers; a measurement table's rows as such questions."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from perfmodel.cost.learn._kinds import machine_of, shape_with_flags
from perfmodel.cost.learn._rows import Rows, rows_from_table
from perfmodel.cost.learn._stack import Figures
from perfmodel.cost.learn._tables import figures_lookup
from perfmodel.errors import PerfModelError
from perfmodel.ingest import clean_kernels
from perfmodel.ingest.tables import factorise, relabel, text
from perfmodel.ops import FAMILIES, Machine, Physics
from perfmodel.units import DTYPE_BYTES

PROVENANCE: Final = ("measured", "learned", "extrapolated", "analytical")
"""Order of trust; codes of `Prediction.provenance` index into it."""


class Query(NamedTuple):
    """What rows are asked for: a device, and optionally whose software."""

    figures: Figures
    source: str | None = None
    software: str | None = None


class Prediction(NamedTuple):
    """Log seconds [n] with 90 % bounds and provenance codes."""

    log_time: Float64[np.ndarray, "n"]
    log_low: Float64[np.ndarray, "n"]
    log_high: Float64[np.ndarray, "n"]
    provenance: Int64[np.ndarray, "n"]

    @classmethod
    def empty(cls, n: int) -> "Prediction":
        """Room for `n` answers."""
        return cls(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))


@dataclass(frozen=True)
class TableQueries:
    """Rows with the query that each belongs to."""

    rows: Rows
    queries: tuple[Query, ...]
    query: Int64[np.ndarray, "n"]
    reasons: np.ndarray
    """`skipped: why` per row, empty where the row can be asked (object dtype)."""
    host_launch: np.ndarray
    """Whether the row's time contains the host's launch, bool[n]."""


def table_rows(table: pd.DataFrame, family: str) -> TableQueries:
    """Questions of a table's rows of one family; unknown devices, dtypes and shapes get a reason."""
    lookup = figures_lookup()
    device_code, devices = factorise(text(table, "device"))
    figures: list[Figures | None] = []
    for name in devices:
        try:
            figures.append(lookup(name))
        except PerfModelError:
            figures.append(None)
    table = clean_kernels(table)
    rows, complete = rows_from_table(table, family)
    reasons = np.full(len(table), "", object)
    reasons[~complete] = "skipped: a shape column is empty"
    known_dtype = relabel(text(table, "dtype"), lambda d: d in DTYPE_BYTES or d.startswith("fp8"))
    reasons[~known_dtype.astype(bool)] = "skipped: unknown dtype"
    flaw = table["flaw"].to_numpy(object)
    reasons[flaw != ""] = "skipped: " + flaw[flaw != ""]
    unknown = np.array([f is None for f in figures])[device_code]
    reasons[unknown] = "skipped: unknown device"
    software_code, labels = factorise(text(table, "source") + "\t" + text(table, "software"))
    joint = device_code * len(labels) + software_code
    unique, query = np.unique(joint, return_inverse=True)
    some = next((f for f in figures if f is not None), None)
    queries = []
    for value in unique:
        origin, _, name = labels[value % len(labels)].partition("\t")
        device = figures[value // len(labels)] or some
        if device is not None:
            queries.append(Query(device, origin or None, name or None))
    return TableQueries(rows, tuple(queries), query, reasons, table["host_launch"].to_numpy(bool))


def kernel_physics(figures: Figures, rows: Rows) -> tuple[Physics, Machine]:
    """FLOPs, traffic and waves of rows on one device, and the device's figures per row."""
    machine = machine_of([figures], np.zeros(len(rows), np.int64), rows.dtypes)
    return FAMILIES[rows.family].physics(np, shape_with_flags(rows), machine), machine
