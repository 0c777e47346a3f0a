"""A table of runs as what end-to-end calibration takes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.calibration import Run
from perfmodel.errors import PerfModelError, TableError
from perfmodel.prediction import check_layout
from perfmodel.validation._case_rows import read_case
from perfmodel.validation._cases import missing_column, read_rows
from perfmodel.validation._row_cells import Row, Unusable, rows_of


def read_runs(file: Path | str | pd.DataFrame) -> tuple[list[Run], dict[str, int]]:
    """Timed runs of a table, and why other rows are none (reason -> rows).

    Args:
        file: csv with the columns of `data/published/README.md`, or such a frame.

    Raises:
        TableError: if the file is missing, unreadable, no table of runs, or no row can be used.
    """
    table, name = (file, "table of runs") if isinstance(file, pd.DataFrame) else (read_rows(Path(file)), str(file))
    if (missing := missing_column(table)) is not None:
        raise TableError(f"{name}: not a table of runs (no column {missing}); see the columns of validate cases")
    runs, skipped = [], Counter()
    for row in rows_of(table):
        try:
            runs.append(_run(row))
        except PerfModelError as reason:
            skipped[str(reason)] += 1
    if not runs:
        reason, _ = skipped.most_common(1)[0] if skipped else ("it is empty", 0)
        raise TableError(f"{name}: no row can be used; mostly because: {reason}")
    return runs, dict(skipped.most_common())


def _run(row: Row) -> Run:
    measured = row["measured_iter_time_s"]
    if measured is None or row.get("status") not in (None, "ok"):
        raise Unusable("no step time was measured")
    case = read_case(row)
    check_layout(case.model, case.cluster, case.job, case.layout)
    try:
        measured_s = float(measured)
    except ValueError:
        measured_s = np.nan
    return Run(
        name=case.case_id,
        model=case.model,
        cluster=case.cluster,
        job=case.job,
        layout=case.layout,
        measured_s=measured_s,
        framework=case.framework,
    )
