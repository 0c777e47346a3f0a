"""What the rows of a table of runs leave open, for whoever fits to them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.display import Report
from perfmodel.errors import PerfModelError
from perfmodel.validation._cases import predict_row
from perfmodel.validation.rows import RowWithRun, own_fields, rows_with_runs
from perfmodel.validation.unstated import RunPrediction, described_job, predict_run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunAssumptions:
    """Assumptions about one run of a table."""

    run: str
    """Name of the run, as in the fit."""
    assumed: tuple[str, ...]
    """What the row leaves open, the largest effect on the step time first: the column `assumed` of
    `validate cases`."""
    open_deviation: float
    """Standard deviation of the log step time over all that the row may mean."""


def run_assumptions(
    file: "Path | str | pd.DataFrame",
    calibration: Path | None = None,
    progress: Report | None = None,
) -> list[RunAssumptions]:
    """Assumptions about each run of a table, those first whose step time depends most on them.

    Runs whose rows leave nothing open are left out.

    Args:
        file: as for `read_runs`.
        calibration: directory made by `perfmodel fit`.

    Raises:
        TableError: as `read_runs`.
    """
    rows, _ = rows_with_runs(file)
    assumptions = []
    for done, row in enumerate(rows):
        try:
            predicted = _mixture(row, calibration)
        except PerfModelError:
            # Runs on nodes of several kinds can be fitted to, but not described as published runs
            # are.
            continue
        if predicted.assumed:
            assumptions.append(
                RunAssumptions(row.run.name, predicted.assumed, predicted.open_deviation)
            )
        if progress:
            progress("assumptions", done, len(rows))
    return sorted(assumptions, key=lambda of_run: -of_run.open_deviation)


def _mixture(row: RowWithRun, calibration: Path | None) -> RunPrediction:
    """The prediction of a row over all that it may mean."""
    if not row.in_words:
        return predict_row(row.row, calibration)
    return predict_run(
        described_job(layout=str(row.row["layout"]), **own_fields(row.row, row.number)),
        calibration,
    )
