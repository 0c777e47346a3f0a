"""Compares measured rows and published runs with predictions, for errors and parity plots."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.cost import CollectiveModel, EventTimes, KernelModel
from perfmodel.display import Report, shows_progress
from perfmodel.ingest import clean_collectives
from perfmodel.ingest.tables import COLUMNS, read_table, table_kind, write_table
from perfmodel.measure.tables import NOT_IDENTITY
from perfmodel.validation._cases import predict_cases
from perfmodel.validation._report import ValidationReport, errors
from perfmodel.validation.rows import missing_column, read_rows

_SKIPPED: Final = "skipped: "


def validate_kernels(
    files: Sequence[Path | str],
    calibration: Path | str | None = None,
    out: Path | str | None = None,
    *,
    marked: bool = True,
) -> ValidationReport:
    """Predict every row of measurement tables and compare it with the measurement.

    Kernels and collectives may be mixed. Rows that cannot be predicted are counted by reason.

    Args:
        calibration: directory made by `perfmodel fit`; the shipped one for `None` or `"default"`.
        out: file for one prediction per row (csv, csv.gz or parquet): `file`, `row` (0-based),
            `predicted_time_us`, `lo_us`, `hi_us`, `provenance`, `skipped_reason`.
        marked: include collectives that their table marks as wrong (`check`) or that repeat a test
            (`in_place`); nothing is fitted to them.

    Returns:
        `families`: op family or collective -> device -> `n`, `median_ape`, `mean_ape`, `p90_ape`,
        `bias`, `coverage_90` (fractions), with the device `all`; `all` the same of all rows, `None`
        where `n` is 0; `provenance` and `skipped` counts.

    Raises:
        TableError: for a missing, malformed, NaN, negative or unit-less table.
        CalibrationError: for missing or unreadable weights.
    """
    measured, predicted = [], []
    for file in files:
        table = read_table(file)
        kind = table_kind(table, file)

        # Marked rows were not fitted to, so errors on them do not describe the fit.
        if kind == "collective" and not marked:
            doubtful = clean_collectives(table)["doubtful"].to_numpy(bool)
            table = pd.DataFrame(table[~doubtful]).reset_index(drop=True)
        times = predicted_times(table, kind, calibration)
        family = table["collective"] if kind == "collective" else table["op_family"]
        measured.append(
            pd.DataFrame({"family": family, "device": table["device"], "time_us": table["time_us"]})
        )
        predicted.append(_frame(Path(file), times))
    rows = pd.concat(measured, ignore_index=True)
    predictions = pd.concat(predicted, ignore_index=True)
    if out is not None:
        write_table(out, predictions)
    return ValidationReport(_report(rows, predictions))


def predicted_times(table: pd.DataFrame, kind: str, calibration: Path | str | None) -> EventTimes:
    """Predicted times of a table's rows; NaN and `skipped: reason` where that is impossible."""
    return (
        (KernelModel if kind == "compute" else CollectiveModel).load(calibration).table_times(table)
    )


def _origins(times: EventTimes) -> dict[str, list[str]]:
    """Columns `provenance` and `skipped_reason` of event times; in each row one of them is
    empty."""
    # Cost models say in place of a provenance why they have no time for a row.
    known, reasons = [], []
    for provenance in times.provenance:
        reason = provenance.removeprefix(_SKIPPED) if provenance.startswith(_SKIPPED) else ""
        known.append("" if reason else provenance)
        reasons.append(reason)
    return {"provenance": known, "skipped_reason": reasons}


def _frame(file: Path, times: EventTimes) -> pd.DataFrame:
    """Predicted times of a file's rows, as a table."""
    columns = {
        "file": str(file),
        "row": np.arange(len(times.time_s)),
        "predicted_time_us": times.time_s * 1e6,
        "lo_us": times.lo_s * 1e6,
        "hi_us": times.hi_s * 1e6,
    }
    return pd.DataFrame(columns | _origins(times))


def _report(rows: pd.DataFrame, predictions: pd.DataFrame) -> dict[str, Any]:
    """Return errors of predicted rows by family and device, and counts of the other rows."""
    # Skipped rows have no figures; they are counted by reason.
    good = (predictions["skipped_reason"] == "") & np.isfinite(predictions["predicted_time_us"])
    rows_and_predictions: Any = pd.concat([rows, predictions], axis=1)
    families: dict[str, dict[str, Any]] = {}
    for family, members in rows_and_predictions[good].groupby("family", sort=True):
        devices = {
            str(device): _error_figures(pd.DataFrame(part))
            for device, part in members.groupby("device", sort=True)
        }
        families[str(family)] = {"all": _error_figures(pd.DataFrame(members))} | devices
    return {
        "families": families,
        "all": _error_figures(rows_and_predictions[good]),
        "provenance": dict(Counter(predictions["provenance"][good].tolist())),
        "skipped": dict(Counter(predictions["skipped_reason"][~good].tolist())),
    }


def _error_figures(part: Any) -> dict[str, Any]:
    figures = errors(part["time_us"], part["predicted_time_us"], part["lo_us"], part["hi_us"])
    return {name: value for name, value in figures.items() if name != "spearman"}


@shows_progress("parity")
def parity_rows(
    files: Sequence[Path | str],
    calibration: Path | None = None,
    *,
    progress: Report | None = None,
) -> pd.DataFrame:
    """All rows that were measured and can be predicted.

    Args:
        files: tables of kernels, of collectives or of whole runs (columns of `validate_cases`),
            also mixed.
        calibration: directory made by `perfmodel fit`, instead of the shipped one.

    Returns:
        `group` (op family, collective, or source of runs), `device`, `measured_s`, `predicted_s`,
        and `lo_s`, `hi_s`, the prediction's 90 % interval.

    Raises:
        TableError: a missing or malformed table.
    """
    compared = compared_rows(all_rows(files, calibration, progress))
    return pd.DataFrame(compared[["group", "device", "measured_s", "predicted_s", "lo_s", "hi_s"]])


def compared_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Select from `all_rows` those that were measured and can be predicted."""
    has_both = rows[["measured_s", "predicted_s"]].notna().all(axis=1)
    return pd.DataFrame(rows[has_both]).reset_index(drop=True)


def all_rows(
    files: Sequence[Path | str], calibration: Path | None, progress: Report | None = None
) -> pd.DataFrame:
    """All rows of the files, with or without prediction: the columns of `parity_rows`, and `kind`
    (kernels, collectives or runs), `what` (the row in words), `provenance`, `skipped_reason` (empty
    where it is predicted)."""
    parts = []
    for number, file in enumerate(files):
        if progress is not None:
            progress(Path(file).name, number, len(files))
        parts.append(_rows(Path(file), calibration, progress))
    columns = ("group", "device", "measured_s", "predicted_s", "lo_s", "hi_s")

    # Without files the columns are there all the same, so that callers need no case of their own.
    nothing = pd.DataFrame({name: pd.Series(dtype=float) for name in columns}).assign(
        kind="", what="", provenance="", skipped_reason=""
    )
    return pd.concat(parts, ignore_index=True) if parts else nothing


def is_runs(file: Path) -> bool:
    """Whether a file is a table of whole runs."""
    return file.name.endswith((".csv", ".csv.gz")) and missing_column(read_rows(file)) is None


def sizes_of(table: pd.DataFrame) -> list[str]:
    """The size columns of a table of kernels or collectives."""
    sizes = []
    for name, column in COLUMNS.items():
        is_size = name in table.columns and not column.text and name not in NOT_IDENTITY
        if is_size and bool(table[name].notna().any()):
            sizes.append(name)
    return sizes


def row_labels(table: pd.DataFrame) -> pd.Series:
    """Labels of measured kernels or collectives: name, element type, sizes."""
    columns = table.columns

    # Collectives are told apart by size and ranks, kernels by all their sizes.
    name_column = next(name for name in ("collective", "op", "op_family") if name in columns)
    labels: Any = table[name_column].astype(str)
    for name in ("dtype", "pass"):
        if name in columns:
            labels = labels + " " + table[name].astype(str)
    if "collective" in columns:
        if "bytes" in columns:
            labels = labels + table["bytes"].map(lambda size: f" {size / 1e6:.4g} MB")
        if "num_ranks" in columns:
            labels = labels + table["num_ranks"].map(lambda ranks: f" x{ranks:.0f}")
        if "num_nodes" in columns:
            labels = labels + table["num_nodes"].map(
                lambda n: f" ({n:.0f} nodes)" if n > 1 else " (intra-node)"
            )
    else:
        for name in sizes_of(table):
            # NaN is not a size of this row.
            labels = labels + table[name].map(
                lambda size, name=name: "" if np.isnan(size) else f" {name}={size:.12g}"
            )
    return labels.str.replace("  ", " ").str.strip()


def _rows(file: Path, calibration: Path | None, progress: Report | None) -> pd.DataFrame:
    """Measurements of one file, each with its prediction."""
    if is_runs(file):
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
        "kind": "collectives" if kind == "collective" else "kernels",
        "what": row_labels(table),
    }
    return pd.DataFrame(columns | _origins(times))


def _runs(runs: pd.DataFrame, calibration: Path | None, progress: Report | None) -> pd.DataFrame:
    """Runs of a table, each with its prediction."""
    predicted = predict_cases(runs, calibration, progress)

    # Runs that crashed have a time now and then, which is not that of a step.
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
