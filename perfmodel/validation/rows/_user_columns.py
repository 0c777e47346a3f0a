"""Reads a user's own table of runs, whose columns are words of `predict`, like a table of published
runs."""

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from perfmodel.catalog.job_files import JOB_WORDS
from perfmodel.ingest.tables import NEEDED_OF_RUNS, RUN_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS: Final = ("step_time_s", "measured_iter_time_s")
"""Names of the column of a step's measured seconds."""
_UNSTATED: Final = {"device": None, "tp": 1, "pp": 1, "dp": None, "micro_batch": None}
"""Values of needed columns that a table may leave out; empty ones follow from others, or are
integrated over."""
_LAYOUT_DEFAULTS: Final = {"tp": 1, "pp": 1, "micro_batch": 1}
"""Values of keys that the notation of layouts may leave out."""
_PLAIN_LAYOUT: Final = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch")
"""Keys of layouts that are columns under their own name."""
_DISTSIM: Final = re.compile(r"\s*(\d+)M(\d+)P(\d+)D\s*", re.IGNORECASE)


def with_columns_of_runs(table: "pd.DataFrame", name: str) -> "pd.DataFrame":
    """Add the columns that tables of published runs need and a user's table states otherwise.

    A table without model, machine or step time is returned unchanged.

    Args:
        name: name of the table, which becomes the source of rows that name none.
    """
    columns = {str(column) for column in table.columns}
    times = [column for column in STEP_COLUMNS if column in columns]
    if "model" not in columns or not columns & {"device", "cluster"} or not times:
        return table
    if columns >= set(NEEDED_OF_RUNS):
        return table

    names = table["name"] if "name" in columns else [f"row {n + 1}" for n in range(len(table))]
    filled: dict[str, Any] = {
        **_UNSTATED,
        "case_id": names,
        "source": name,
        "measured_iter_time_s": table[times[0]],
    }
    if "devices" in columns:
        filled["n_devices"] = table["devices"]
    for word in JOB_WORDS:
        if word in columns and word not in RUN_COLUMNS:
            filled[f"job.{word}"] = table[word]
    filled = {column: cells for column, cells in filled.items() if column not in columns}
    if "layout" in columns:
        filled |= _layout_columns([str(cell) for cell in table["layout"]])
    return table.drop(columns="layout", errors="ignore").assign(**filled)


def _layout_columns(notations: list[str]) -> dict[str, list[str | int | None]]:
    """Columns of a table of runs that state what layouts in the notation of `Layout.parse` do."""
    rows = [_stated(notation) for notation in notations]
    keys = dict.fromkeys((*_LAYOUT_DEFAULTS, *chain.from_iterable(rows)))
    columns: dict[str, list[str | int | None]] = {}
    for key in keys:
        column = key if key in _PLAIN_LAYOUT else f"layout.{key}"
        default = _LAYOUT_DEFAULTS.get(key)
        columns[column] = [row.get(key, default) for row in rows]
    return columns


def _stated(notation: str) -> dict[str, str | int]:
    """Keys and values that a layout states."""
    degrees = _DISTSIM.fullmatch(notation)
    if degrees:
        return dict(zip(("tp", "pp", "dp"), map(int, degrees.groups()), strict=True))
    parts = (part.partition("=") for part in notation.split(",") if part.strip())
    stated = {key.strip(): value.strip() for key, _, value in parts}
    return {key: int(value) if value.isdecimal() else value for key, value in stated.items()}
