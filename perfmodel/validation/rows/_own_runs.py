"""Reads runs from tables whose columns are arguments of `perfmodel.predict`: model, cluster,
layout, global_batch and so on."""

from typing import TYPE_CHECKING, Any, Final

from perfmodel import catalog
from perfmodel.calibration import Run
from perfmodel.catalog.job_files import JOB_WORDS
from perfmodel.errors import PerfModelError, TableError, UnknownNameError
from perfmodel.ingest.tables import RUN_COLUMNS
from perfmodel.prediction import layout_of
from perfmodel.spec import Job
from perfmodel.units import parse_length
from perfmodel.validation.rows._cells import Row, Unusable
from perfmodel.validation.rows._user_columns import STEP_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

_NEEDED: Final = ("model", "cluster", "layout", "global_batch")
_OPTIONAL: Final = ("framework", "devices", *JOB_WORDS)
_REMARKS: Final = ("name", *RUN_COLUMNS)
"""Columns that do not affect the step, or repeat other columns."""


def has_words_of_predict(table: "pd.DataFrame") -> bool:
    """Whether a table's columns are arguments of `predict`, not those of published runs."""
    if "layout" in table:
        return True
    columns = set(table)
    # Degrees in columns of their own are read as in tables of published runs.
    states_degrees = not columns.isdisjoint({"tp", "pp", "dp"})
    return "cluster" in columns and not {"case_id", "source"} <= columns and not states_degrees


def require_words(table: "pd.DataFrame", name: str) -> None:
    """Refuse a table with missing or unknown columns.

    Raises:
        TableError: names every column that is missing, or the unknown one.
    """
    # Refuse unknown columns as well: a misspelt `micro_batch` would otherwise be ignored and the
    # default predicted.
    missing = [column for column in _NEEDED if column not in table]
    if not any(column in table for column in STEP_COLUMNS):
        missing.append(STEP_COLUMNS[0])
    if missing:
        columns = "columns" if len(missing) > 1 else "column"
        raise TableError(
            f"{name}: {columns} {', '.join(missing)} missing; a run needs {', '.join(_NEEDED)} and {STEP_COLUMNS[0]}"
        )
    known = (*_NEEDED, *STEP_COLUMNS, *_OPTIONAL, *_REMARKS)
    unknown = next((str(column) for column in table if column not in known), None)
    if unknown:
        raise TableError(f"{name}: {UnknownNameError('column', unknown, known)}")


def own_run(row: Row, number: int) -> Run:
    """Read the run of a row; `number` counts rows from 1.

    Raises:
        PerfModelError: a cell that its column cannot have, or a layout that is not possible.
    """
    # A row without a time is not an error but nothing to compare with.
    measured_s = next((row[column] for column in STEP_COLUMNS if row.get(column) is not None), None)
    if measured_s is None or row.get("status") not in (None, "ok"):
        raise Unusable("no step time was measured")

    problem, text = catalog.problem_and_layout(layout=str(row["layout"]), **own_fields(row, number))
    layout, _ = layout_of(problem, text)
    try:
        seconds = float(measured_s)
    except ValueError:
        raise PerfModelError(f"{STEP_COLUMNS[0]} must be seconds, got {measured_s!r}") from None
    return Run(
        name=str(row.get("name") or row.get("case_id") or f"row {number}"),
        model=problem.model,
        cluster=problem.cluster,
        job=problem.job,
        layout=layout,
        measured_s=seconds,
        framework=problem.framework,
    )


def own_fields(row: Row, number: int) -> dict[str, Any]:
    """Arguments of `predict` that a row states, except for the layout.

    Raises:
        PerfModelError: a cell that its column cannot have.
    """
    # Cells that are words of `predict` go the same way as its keywords, with the same checks.
    fields = {
        name: row[name] for name in ("model", "cluster", "framework") if row.get(name) is not None
    }
    stated = {
        name: _value(row[name]) for name in (*JOB_WORDS, "devices") if row.get(name) is not None
    }
    if isinstance(stated.get("seq_len"), str):
        stated["seq_len"] = parse_length(stated["seq_len"])
    # The number of devices is not a field of a job; a layout's data-parallel degree may follow from
    # it.
    if "devices" in stated:
        fields["devices"] = stated.pop("devices")
    return fields | catalog.checked_fields(Job, stated, f"row {number}", JOB_WORDS)


def _value(cell: Any) -> Any:
    """A cell as a job file would have it: whole numbers, truth values, lists of words."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    if isinstance(cell, str) and cell.lower() in ("true", "false"):
        return cell.lower() == "true"
    return cell
