"""Measured kernels and collectives against predictions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.cost import CollectiveModel, EventTimes, KernelModel
from perfmodel.ingest import clean_collectives
from perfmodel.ingest.tables import read_table, table_kind, write_table
from perfmodel.validation._report import ValidationReport, errors

SKIPPED: Final = "skipped: "


def validate_kernels(
    files: Sequence[Path | str],
    calibration: Path | str | None = None,
    out: Path | str | None = None,
    *,
    marked: bool = True,
) -> ValidationReport:
    """Predict every row of measurement tables and compare with what was measured.

    Kernels and collectives may be mixed. Rows that cannot be predicted are counted by reason.

    Args:
        calibration: directory made by `perfmodel fit`; the shipped one for `None` or `"default"`.
        out: file for one prediction per row (csv, csv.gz or parquet): `file`, `row` (0-based),
            `predicted_time_us`, `lo_us`, `hi_us`, `provenance`, `skipped_reason`.
        marked: with the collectives that their table marks as wrong (`check`) or that count a test once more
            (`in_place`); nothing is fitted to them.

    Returns:
        `families`: op family or collective -> device -> `n`, `median_ape`, `mean_ape`, `p90_ape`,
        `bias`, `coverage_90` (fractions), with the device `all`; `all` the same of all rows, `None` where `n` is 0;
        `provenance` and `skipped` counts.

    Raises:
        TableError: for a missing, malformed, NaN, negative or unit-less table.
        CalibrationError: for missing or unreadable weights.
    """
    measured, predicted = [], []
    for file in files:
        table = read_table(file)
        kind = table_kind(table, file)
        if kind == "collective" and not marked:
            table = pd.DataFrame(table[~clean_collectives(table)["doubtful"].to_numpy(bool)]).reset_index(drop=True)
        times = predicted_times(table, kind, calibration)
        family = table["collective"] if kind == "collective" else table["op_family"]
        measured.append(pd.DataFrame({"family": family, "device": table["device"], "time_us": table["time_us"]}))
        predicted.append(_frame(Path(file), times))
    rows, predictions = pd.concat(measured, ignore_index=True), pd.concat(predicted, ignore_index=True)
    if out is not None:
        write_table(out, predictions)
    return ValidationReport(_report(rows, predictions))


def predicted_times(table: pd.DataFrame, kind: str, calibration: Path | str | None) -> EventTimes:
    """Times of a checked table's rows; NaN and `skipped: reason` where they cannot be priced."""
    return (KernelModel if kind == "compute" else CollectiveModel).load(calibration).table_times(table)


def _frame(file: Path, times: EventTimes) -> pd.DataFrame:
    provenance: Any = pd.Series(times.provenance, dtype=object)
    skipped = provenance.str.startswith(SKIPPED)
    columns = {
        "file": str(file),
        "row": np.arange(len(provenance)),
        "predicted_time_us": times.time_s * 1e6,
        "lo_us": times.lo_s * 1e6,
        "hi_us": times.hi_s * 1e6,
        "provenance": provenance.where(~skipped, ""),
        "skipped_reason": provenance.str.removeprefix(SKIPPED).where(skipped, ""),
    }
    return pd.DataFrame(columns)


def _report(rows: pd.DataFrame, predictions: pd.DataFrame) -> dict[str, Any]:
    good = (predictions["skipped_reason"] == "") & np.isfinite(predictions["predicted_time_us"])
    both: Any = pd.concat([rows, predictions], axis=1)
    families: dict[str, dict[str, Any]] = {}
    for family, members in both[good].groupby("family", sort=True):
        devices = {
            str(device): _error_figures(pd.DataFrame(part)) for device, part in members.groupby("device", sort=True)
        }
        families[str(family)] = {"all": _error_figures(pd.DataFrame(members))} | devices
    return {
        "families": families,
        "all": _error_figures(both[good]),
        "provenance": dict(Counter(predictions["provenance"][good].tolist())),
        "skipped": dict(Counter(predictions["skipped_reason"][~good].tolist())),
    }


def _error_figures(part: Any) -> dict[str, Any]:
    figures = errors(part["time_us"], part["predicted_time_us"], part["lo_us"], part["hi_us"])
    return {name: value for name, value in figures.items() if name != "spearman"}
