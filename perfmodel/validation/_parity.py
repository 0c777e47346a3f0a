"""Rows of measurement tables and of published runs with their predictions: what a parity plot draws."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.display import shows_progress
from perfmodel.ingest.tables import read_table, table_kind
from perfmodel.validation._cases import missing_column, predict_cases, read_rows
from perfmodel.validation._kernels import predicted_times


@shows_progress("parity")
def parity_rows(
    files: Sequence[Path | str],
    calibration: Path | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> pd.DataFrame:
    """Every row that was measured and can be predicted.

    Args:
        files: tables of kernels, of collectives or of whole runs (columns of `validate_cases`), also mixed.
        calibration: directory made by `perfmodel fit`, instead of the shipped one.

    Returns:
        `group` (op family, collective, or source of runs), `device`, `measured_s`, `predicted_s`, and `lo_s`, `hi_s`,
        the prediction's 90 % interval.

    Raises:
        TableError: a missing or malformed table.
    """
    parts = [_rows(Path(file), calibration, progress) for file in files]
    rows = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(rows[rows[["measured_s", "predicted_s"]].notna().all(axis=1)]).reset_index(drop=True)


def _rows(file: Path, calibration: Path | None, progress: Callable[[str, int, int], None] | None) -> pd.DataFrame:
    if file.name.endswith((".csv", ".csv.gz")) and missing_column(read_rows(file)) is None:
        return _runs(read_rows(file), calibration, progress)
    table = read_table(file)
    kind = table_kind(table, file)
    times = predicted_times(table, kind, calibration)
    columns = {
        "group": table["collective"] if kind == "collective" else table["op_family"],
        "device": table["device"],
        "measured_s": table["time_us"] * 1e-6,
        "predicted_s": times.time_s,
        "lo_s": times.lo_s,
        "hi_s": times.hi_s,
    }
    return pd.DataFrame(columns)


def _runs(
    runs: pd.DataFrame, calibration: Path | None, progress: Callable[[str, int, int], None] | None
) -> pd.DataFrame:
    predicted = predict_cases(runs, calibration, progress)
    ok = np.asarray(runs["status"] == "ok") if "status" in runs else np.ones(len(runs), bool)
    columns = {
        "group": runs["source"],
        "device": runs["device"],
        "measured_s": np.where(ok, np.asarray(runs["measured_iter_time_s"], float), np.nan),
        "predicted_s": predicted["predicted_iter_time_s"].astype(float),
        "lo_s": predicted["lo_s"].astype(float),
        "hi_s": predicted["hi_s"].astype(float),
    }
    return pd.DataFrame(columns)
