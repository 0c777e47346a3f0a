"""A measurement table's rows as questions to a regressor: what kernel, on what device, whose software."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Int64

from perfmodel.errors import PerfModelError
from perfmodel.learn._frame import factorise, relabel, text
from perfmodel.learn._inputs import machine_of, shape_with_flags
from perfmodel.learn._machine import Figures, Machine
from perfmodel.learn._physics import PHYSICS
from perfmodel.learn._regressor import Query
from perfmodel.learn._rows import Rows, rows_from_table
from perfmodel.learn._tables import effective_dtype, figures_lookup, software_label
from perfmodel.learn._work import Physics
from perfmodel.units import DTYPE_BYTES


@dataclass(frozen=True)
class TableQueries:
    """Rows with the query that each belongs to."""

    rows: Rows
    queries: tuple[Query, ...]
    query: Int64[np.ndarray, "n"]
    reasons: np.ndarray
    """`skipped: why` per row, empty where the row can be asked (object dtype)."""


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
    known = {d: f for d, f in zip(devices, figures, strict=True) if f is not None}
    table = table.assign(dtype=effective_dtype(table, known))
    rows, complete = rows_from_table(table, family)
    reasons = np.full(len(table), "", object)
    reasons[~complete] = "skipped: a shape column is empty"
    known_dtype = relabel(text(table, "dtype"), lambda d: d in DTYPE_BYTES or d.startswith("fp8"))
    reasons[~known_dtype.astype(bool)] = "skipped: unknown dtype"
    variant = text(table, "variant").astype(str)
    reasons[np.char.startswith(variant, "suspect")] = "skipped: marked as suspect"
    reasons[variant == "unit_not_stated"] = "skipped: unit of the time is not stated"
    reasons[np.char.endswith(variant, "cold")] = "skipped: measured with cold caches"
    unknown = np.array([f is None for f in figures])[device_code]
    reasons[unknown] = "skipped: unknown device"
    label = text(table, "source", "measured") + "\t" + software_label(table)
    software_code, labels = factorise(label)
    joint = device_code * len(labels) + software_code
    unique, query = np.unique(joint, return_inverse=True)
    some = next((f for f in figures if f is not None), None)
    queries = []
    for value in unique:
        origin, _, name = labels[value % len(labels)].partition("\t")
        device = figures[value // len(labels)] or some
        if device is not None:
            queries.append(Query(device, origin or None, name or None))
    return TableQueries(rows, tuple(queries), query, reasons)


def kernel_physics(figures: Figures, rows: Rows) -> tuple[Physics, Machine]:
    """FLOPs, traffic and waves of rows on one device, and the device's figures per row."""
    dtypes = np.array([kind.partition("/")[0] for kind in rows.kind], object)
    machine = machine_of([figures], np.zeros(len(rows), np.int64), dtypes)
    return PHYSICS[rows.family](np, shape_with_flags(rows), machine), machine
