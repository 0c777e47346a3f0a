"""Published end-to-end runs against predictions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.display import shows_progress
from perfmodel.errors import PerfModelError, TableError
from perfmodel.io import require_whole_rows, write_table
from perfmodel.prediction import GAUSS_90, explain, step_model
from perfmodel.units import GB, GIB
from perfmodel.validation._case_rows import Unusable, read_case
from perfmodel.validation._conventions import framework_of
from perfmodel.validation._memory_seen import seen_bytes
from perfmodel.validation._metrics import errors
from perfmodel.validation._report import ValidationReport

COLUMNS = (
    "case_id", "predicted_iter_time_s", "lo_s", "hi_s", "predicted_peak_memory_bytes", "fits", "skipped_reason",
    "model_flops_per_device", "extrapolated_share", "host_share", "network_share", "unstated_share",
    "events_half_width",
)  # fmt: skip
_SETTINGS = ("recompute", "zero_stage", "sequence_parallel", "flash_attention", "micro_batch")
_NEEDED = ("case_id", "source", "device", "tp", "pp", "dp", "micro_batch", "measured_iter_time_s")


@shows_progress("cases")
def validate_cases(
    files: Sequence[Path | str],
    calibration: Path | None = None,
    out: Path | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> ValidationReport:
    """Predict every row of published-run tables and compare with what was measured.

    Rows that cannot be predicted are listed with the reason, never dropped. Files of other kinds
    (collective bandwidths, other predictors' results) are named under `skipped_files`.

    Returns:
        Per source and in all: `n`, `median_ape`, `mean_ape`, `p90_ape`, `spearman`, `coverage_90`, and
        the same of `memory`; `skipped` counts reasons.

    Raises:
        TableError: if a file is missing, unreadable or no file is a table of runs.
    """
    runs, ignored = read_tables(files)
    predicted = predict_cases(runs, calibration, progress)
    if out is not None:
        write_table(out, predicted)
    return ValidationReport(cases_report(runs, predicted) | {"skipped_files": ignored})


def read_tables(files: Sequence[Path | str]) -> tuple[pd.DataFrame, dict[str, str]]:
    """All rows of the tables of runs among some files, and why other files are none.

    Raises:
        TableError: if a file is missing, unreadable or no file is a table of runs.
    """
    tables, ignored = [], {}
    for file in files:
        table = read_rows(Path(file))
        missing = missing_column(table)
        if missing:
            ignored[str(file)] = f"not a table of runs (no column {missing})"
        else:
            tables.append(table)
    if not tables:
        raise TableError(f"{files[0]}: {next(iter(ignored.values()))}" if files else "no file given")
    return pd.concat(tables, ignore_index=True), ignored


def missing_column(table: pd.DataFrame) -> str | None:
    """The first column that a table of runs needs and this one lacks."""
    return next((name for name in _NEEDED if name not in table), None)


def read_rows(path: Path) -> pd.DataFrame:
    """Any csv file.

    Raises:
        TableError: a file that is missing or no table.
    """
    if not path.is_file():
        raise TableError(f"{path}: no such file")
    try:
        if path.suffix == ".csv":
            require_whole_rows(path)
        return pd.read_csv(path, low_memory=False)
    except TableError:
        raise
    except (ValueError, pd.errors.ParserError, OSError) as error:
        raise TableError(f"{path}: not a readable table ({str(error).splitlines()[0]})") from None


def predict_cases(
    runs: pd.DataFrame,
    calibration: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> pd.DataFrame:
    """A row of `COLUMNS` per run."""
    rows = runs.astype(object).where(runs.notna(), None).to_dict("records")
    results = []
    for done, row in enumerate(rows):
        results.append(_predict_one(row, calibration))
        if progress and done % 20 == 0:
            progress("predicting", done, len(rows))
    return pd.DataFrame(results, columns=list(COLUMNS))


def _predict_one(row: dict[str, Any], calibration: Path | None) -> tuple[Any, ...]:
    try:
        case = read_case(row)
        framework = replace(framework_of(row["source"], case.cluster.device), unstated=unstated_share(row))
        fixed = step_model(case.model, case.cluster, case.job, calibration, framework)
        result = explain(fixed, case.layout)
    except Unusable as reason:
        return _unpredicted(row, str(reason))
    except PerfModelError as error:
        return _unpredicted(row, f"cannot be laid out: {error}")
    return (
        row["case_id"],
        result.step_time_s,
        result.step_time_lo_s,
        result.step_time_hi_s,
        seen_bytes(result, case, framework, row["source"], str(row.get("memory_kind") or "")),
        result.fits,
        None,
        result.tflops_per_device * result.step_time_s * 1e12,
        *(result.unknown_shares[name] for name in ("extrapolated", "host", "network")),
        framework.unstated,
        GAUSS_90 * sum(sd**2 for name, sd in result.error_sources.items() if name.startswith("events")) ** 0.5,
    )


def unstated_share(row: dict[str, Any]) -> float:
    """Share of the settings that decide a run which its row leaves empty."""
    return sum(row.get(name) in (None, "") for name in _SETTINGS) / len(_SETTINGS)


def _unpredicted(row: dict[str, Any], reason: str) -> tuple[Any, ...]:
    told = {"case_id": row["case_id"], "skipped_reason": reason}
    return tuple(told.get(name) for name in COLUMNS)


def cases_report(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, Any]:
    measured_s = measured_times_s(runs)
    measured_bytes = memory_bytes(runs)
    reasons = [None if pd.isna(reason) else str(reason) for reason in predicted["skipped_reason"].tolist()]
    usable = np.array([reason is None for reason in reasons])
    skipped = Counter(_group(reason) for reason in reasons if reason is not None)
    if (missing := int((usable & np.isnan(measured_s)).sum())) > 0:
        skipped["predicted, but no step time was measured"] = missing
    names = ("predicted_iter_time_s", "lo_s", "hi_s", "predicted_peak_memory_bytes")
    time_s, lo_s, hi_s, peak_bytes = (np.asarray(predicted[name], float) for name in names)

    def figures(chosen: np.ndarray) -> dict[str, Any]:
        t, w = chosen & usable & ~np.isnan(measured_s), chosen & usable & ~np.isnan(measured_bytes)
        memory = errors(measured_bytes[w], peak_bytes[w])
        return errors(measured_s[t], time_s[t], lo_s[t], hi_s[t]) | {"memory": memory}

    source = np.asarray(runs["source"], str)
    sources = {name: figures(source == name) for name in dict.fromkeys(source.tolist())}
    everything = figures(np.ones(len(runs), bool))
    return {"sources": sources, "all": everything, "skipped": dict(skipped.most_common())}


def measured_times_s(runs: pd.DataFrame) -> np.ndarray:
    """Step time of every run that ended well and was timed, NaN of others."""
    ok = np.asarray(runs["status"] == "ok") if "status" in runs else np.ones(len(runs), bool)
    return np.where(ok, np.asarray(runs["measured_iter_time_s"], float), np.nan)


def memory_bytes(runs: pd.DataFrame) -> np.ndarray:
    """Measured peak memory, NaN where none was."""
    if "measured_peak_memory_gb" not in runs:
        return np.full(len(runs), np.nan)
    gib = np.asarray(runs["memory_unit"] == "GiB") if "memory_unit" in runs else np.zeros(len(runs), bool)
    return np.asarray(runs["measured_peak_memory_gb"], float) * np.where(gib, GIB, GB)


def _group(reason: str) -> str:
    """Reasons without their figures, so that they can be counted."""
    return "cannot be laid out: " + reason.split(": ", 2)[-1].split(";")[0] if ": " in reason else reason
