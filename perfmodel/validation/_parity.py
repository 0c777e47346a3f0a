"""Rows of measurement tables and of published runs with their predictions: what a parity plot draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.display import Report, shows_progress
from perfmodel.ingest.tables import COLUMNS, read_table, table_kind
from perfmodel.measure import NOT_IDENTITY
from perfmodel.validation._cases import predict_cases
from perfmodel.validation._kernels import SKIPPED, predicted_times
from perfmodel.validation._row_cells import missing_column, read_rows


@shows_progress("parity")
def parity_rows(
    files: Sequence[Path | str],
    calibration: Path | None = None,
    *,
    progress: Report | None = None,
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
    rows = all_rows(files, calibration, progress)
    found = pd.DataFrame(rows[rows[["measured_s", "predicted_s"]].notna().all(axis=1)]).reset_index(drop=True)
    return pd.DataFrame(found[["group", "device", "measured_s", "predicted_s", "lo_s", "hi_s"]])


def all_rows(files: Sequence[Path | str], calibration: Path | None, progress: Report | None = None) -> pd.DataFrame:
    """Every row of the files, those without a prediction too: the columns of `parity_rows`, and `kind` (kernels,
    collectives or runs), `what` (the row in words), `provenance`, `skipped_reason` (empty where it is predicted)."""
    parts = []
    for number, file in enumerate(files):
        if progress is not None:
            progress(Path(file).name, number, len(files))
        parts.append(_rows(Path(file), calibration, progress))
    columns = ("group", "device", "measured_s", "predicted_s", "lo_s", "hi_s")
    nothing = pd.DataFrame({name: pd.Series(dtype=float) for name in columns}).assign(
        kind="", what="", provenance="", skipped_reason=""
    )
    return pd.concat(parts, ignore_index=True) if parts else nothing


def is_runs(file: Path) -> bool:
    """Whether a file is a table of whole runs."""
    return file.name.endswith((".csv", ".csv.gz")) and missing_column(read_rows(file)) is None


def sizes_of(table: pd.DataFrame) -> list[str]:
    """Columns of a table of kernels or collectives that are sizes of what was measured."""
    return [
        name
        for name, column in COLUMNS.items()
        if name in table.columns and not column.text and name not in NOT_IDENTITY and bool(table[name].notna().any())
    ]


def row_labels(table: pd.DataFrame) -> pd.Series:
    """Measured kernels or collectives in words: what each is, its element type, its sizes."""
    columns = table.columns
    words: Any = table["collective" if "collective" in columns else "op" if "op" in columns else "op_family"].astype(
        str
    )
    for name in ("dtype", "pass"):
        if name in columns:
            words = words + " " + table[name].astype(str)
    if "collective" in columns:
        if "bytes" in columns:
            words = words + table["bytes"].map(lambda size: f" {size / 1e6:.4g} MB")
        if "num_ranks" in columns:
            words = words + table["num_ranks"].map(lambda ranks: f" x{ranks:.0f}")
        if "num_nodes" in columns:
            words = words + table["num_nodes"].map(lambda n: f" ({n:.0f} nodes)" if n > 1 else " (intra-node)")
    else:
        for name in sizes_of(table):
            words = words + table[name].map(lambda value, name=name: f" {name}={value:.12g}" if value == value else "")
    return words.str.replace("  ", " ").str.strip()


def _rows(file: Path, calibration: Path | None, progress: Report | None) -> pd.DataFrame:
    if is_runs(file):
        return _runs(read_rows(file), calibration, progress)
    table = read_table(file)
    kind = table_kind(table, file)
    times = predicted_times(table, kind, calibration)
    said = [text.removeprefix(SKIPPED) if text.startswith(SKIPPED) else "" for text in times.provenance]
    columns = {
        "group": table["collective"] if kind == "collective" else table["op_family"],
        "device": table["device"],
        "measured_s": table["time_us"] * 1e-6,
        "predicted_s": times.time_s,
        "lo_s": times.lo_s,
        "hi_s": times.hi_s,
        "kind": "collectives" if kind == "collective" else "kernels",
        "what": row_labels(table),
        "provenance": ["" if why else origin for origin, why in zip(times.provenance, said, strict=True)],
        "skipped_reason": said,
    }
    return pd.DataFrame(columns)


def _runs(runs: pd.DataFrame, calibration: Path | None, progress: Report | None) -> pd.DataFrame:
    predicted = predict_cases(runs, calibration, progress)
    ok = np.asarray(runs["status"] == "ok") if "status" in runs else np.ones(len(runs), bool)
    columns = {
        "group": runs["source"],
        "device": runs["device"],
        "measured_s": np.where(ok, np.asarray(runs["measured_iter_time_s"], float), np.nan),
        "predicted_s": predicted["predicted_iter_time_s"].astype(float),
        "lo_s": predicted["lo_s"].astype(float),
        "hi_s": predicted["hi_s"].astype(float),
        "kind": "runs",
        "what": predicted["case_id"].astype(str),
        "provenance": "",
        "skipped_reason": predicted["skipped_reason"].fillna("").astype(str),
    }
    return pd.DataFrame(columns)
