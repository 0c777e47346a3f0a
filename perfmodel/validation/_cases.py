"""Compares published end-to-end runs with predictions."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.cost.learn import weights_folder
from perfmodel.display import Report, shows_progress
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_table
from perfmodel.prediction import GAUSS_90, Prediction, Site
from perfmodel.prediction.sites import model_kind
from perfmodel.spec import Framework
from perfmodel.spec.framework_facts import MemoryCounter
from perfmodel.units import GB, GIB
from perfmodel.validation._report import ValidationReport, errors, fit_figures
from perfmodel.validation._run_sources import source_of_run
from perfmodel.validation.rows import Case, Row, Unusable, read_tables, rows_of
from perfmodel.validation.unstated import RunPrediction, predict_run

COLUMNS = (
    "case_id",
    "predicted_iter_time_s",
    "lo_s",
    "hi_s",
    "predicted_peak_memory_bytes",
    "fits",
    "skipped_reason",
    "fits_probability",
    "model_flops_per_device",
    "extrapolated_share",
    "host_share",
    "network_share",
    "unstated_share",
    "events_half_width",
    "assumed",
    "open_deviation",
    "completions",
    "device_generation",
    "model_kind",
)
_COUNTED: tuple[tuple[MemoryCounter, str], ...] = (
    ("reserved", "reserved"),
    ("device", "nvidia-smi"),
    ("resting", r"allocated,? after"),
    ("allocated", r"allocated|\btorch\b"),
)
"""Memory counters by words of a table that name them; the first that matches counts."""
_SETTINGS = (
    "recompute",
    "zero_stage",
    "sequence_parallel",
    "flash_attention",
    "micro_batch",
)


@shows_progress("cases")
def validate_cases(
    files: Sequence[Path | str],
    calibration: Path | None = None,
    out: Path | None = None,
    *,
    framework: Framework | str | None = None,
    progress: Report | None = None,
) -> ValidationReport:
    """Predict every row of tables of published runs and compare it with the measurement.

    The settings that a row states are predicted as by `perfmodel.predict`, under the framework in
    its column `framework` or under the argument `framework` instead. Settings that it leaves open
    are integrated over (`predict_run`): degrees, recompute, ZeRO, the network, an unnamed
    framework, and so on. Rows that cannot be predicted are listed with the reason, never dropped.
    Files of other kinds (collective bandwidths, other predictors' results) are named under
    `skipped_files`.

    Returns:
        Per source and in all: `n`, `median_ape`, `mean_ape`, `p90_ape`, `bias`, `spearman`,
        `coverage_90`, `width_90`, and the same of `memory`; `over_sources`: means of these over
        sources, each counting the same; `fits`: how well the probabilities of fitting agree with
        the outcomes (`fit_figures`); `skipped` counts reasons; `assumed` counts rows by the
        settings that no cell of theirs determines, such as the micro-batch.

    Raises:
        TableError: if a file is missing, unreadable or no file is a table of runs.
    """
    runs, ignored = read_tables(files)
    predicted = predict_cases(runs, calibration, progress, framework=framework)
    if out is not None:
        write_table(out, predicted)
    return ValidationReport(cases_report(runs, predicted) | {"skipped_files": ignored})


def predict_cases(
    runs: pd.DataFrame,
    calibration: Path | None = None,
    progress: Report | None = None,
    *,
    framework: Framework | str | None = None,
    site_of: Callable[[str], Site] = lambda _: Site(),
    keep: Callable[[int, Case, Prediction], None] | None = None,
) -> pd.DataFrame:
    """Predict runs; one row of `COLUMNS` per run.

    Args:
        framework: instead of the rows' own.
        site_of: constants of the place for the runs of a source: a report holds runs against
            constants that were fitted without them (`Site.without`).
        keep: called with the place, the case and the prediction of every run that can be predicted.

    Raises:
        CalibrationError: there is no such calibration.
    """
    # A missing calibration is the caller's mistake and must not be reported once for every row.
    weights_folder(calibration)
    chosen = catalog.framework(framework) if isinstance(framework, str) else framework
    rows = rows_of(runs)
    results = []
    for done, row in enumerate(rows):
        keep_run = None if keep is None else partial(keep, done)
        results.append(
            _predict_one(row, calibration, chosen, site_of(source_of_run(row)), keep_run)
        )
        if progress and done % 20 == 0:
            progress("predicting", done, len(rows))
    return pd.DataFrame(results, columns=list(COLUMNS))


def _predict_one(
    row: dict[str, Any],
    calibration: Path | None,
    framework: Framework | None,
    site: Site,
    keep: Callable[[Case, Prediction], None] | None,
) -> dict[str, Any]:
    """Predict one row: its values by `COLUMNS`, or the reason why it cannot be predicted."""
    try:
        run = predict_row(row, calibration, framework, site)
    except Unusable as reason:
        return _unpredicted(row, str(reason))
    except PerfModelError as error:
        return _unpredicted(row, f"cannot be laid out: {error}")

    # Times are those of the mixture of all that the run may be; figures that only one layout has
    # are the likeliest completion's.
    result = run.prediction
    if keep is not None:
        keep(run.case, result)
    counter = counter_of(str(row.get("memory_kind") or ""), run.case.framework)
    unknown_shares = result.uncertainty.unknown_shares
    events_variance = sum(
        sd**2 for name, sd in result.uncertainty.by_source.items() if name.startswith("events")
    )
    return dict.fromkeys(COLUMNS) | {
        "case_id": row["case_id"],
        "predicted_iter_time_s": run.step_time_s,
        "lo_s": run.step_time_lo_s,
        "hi_s": run.step_time_hi_s,
        "predicted_peak_memory_bytes": run.memory_counted_bytes[counter],
        "fits": run.fits,
        "fits_probability": run.fits_probability,
        "model_flops_per_device": result.tflops_per_device * result.step_time_s * 1e12,
        # Quantities that the model cannot know, as shares of the step; the widths of intervals are
        # fitted to these.
        "extrapolated_share": unknown_shares["extrapolated"],
        "host_share": unknown_shares["host"],
        "network_share": unknown_shares["network"],
        "unstated_share": unstated_share(row),
        "events_half_width": GAUSS_90 * events_variance**0.5,
        "assumed": ", ".join(run.assumed) or None,
        "open_deviation": run.open_deviation,
        "completions": len(run.completions),
        "device_generation": run.case.cluster.device.architecture,
        "model_kind": model_kind(run.case.model),
    }


def predict_row(
    row: Row, calibration: Path | None, framework: Framework | None = None, site: Site | None = None
) -> RunPrediction:
    """Predict the run of a row over all that the row leaves open.

    Raises:
        PerfModelError: as `predict_run`.
    """
    return predict_run(
        row, calibration, replace(site or Site(), unstated=unstated_share(row)), framework
    )


def counter_of(memory_kind: str, framework: Framework) -> MemoryCounter:
    """The memory counter behind a measured figure: from its table's words, else the framework's."""
    for counter, pattern in _COUNTED:
        if re.search(pattern, memory_kind):
            return counter
    return framework.memory.memory_counter or "device"


def unstated_share(row: Mapping[str, Any]) -> float:
    """Share of the relevant settings that a run's row leaves empty."""
    # One of tp, pp and dp follows from the other two and the number of devices.
    open_degrees = sum(row.get(name) in (None, "") for name in ("tp", "pp", "dp"))
    open_settings = sum(row.get(name) in (None, "") for name in _SETTINGS)
    open_settings += max(0, open_degrees - 1)
    return min(1.0, open_settings / len(_SETTINGS))


def _unpredicted(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """The values of a row that cannot be predicted: nothing but the reason."""
    return dict.fromkeys(COLUMNS) | {"case_id": row["case_id"], "skipped_reason": reason}


def cases_report(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, Any]:
    """The report of `validate_cases` for predicted runs, without the skipped files."""
    measured_s = measured_times_s(runs)
    measured_bytes = memory_bytes(runs)

    # Every row is predicted or has a reason.
    reasons = [
        None if pd.isna(reason) else str(reason) for reason in predicted["skipped_reason"].tolist()
    ]
    usable = np.array([reason is None for reason in reasons], bool)

    # A run is skipped because it cannot be predicted, or because nothing was measured to compare
    # with.
    skipped = Counter(_group(reason) for reason in reasons if reason is not None)
    status = np.full(len(runs), "ok")
    if "status" in runs:
        status = np.asarray(runs["status"].fillna(""), str)
    not_measured = status[usable & np.isnan(measured_s)]
    skipped += Counter(_not_compared(state) for state in not_measured.tolist())

    time_s = np.asarray(predicted["predicted_iter_time_s"], float)
    lo_s = np.asarray(predicted["lo_s"], float)
    hi_s = np.asarray(predicted["hi_s"], float)
    peak_bytes = np.asarray(predicted["predicted_peak_memory_bytes"], float)

    def figures(chosen: np.ndarray) -> dict[str, Any]:
        timed = chosen & usable & ~np.isnan(measured_s)
        weighed = chosen & usable & ~np.isnan(measured_bytes)
        memory = errors(measured_bytes[weighed], peak_bytes[weighed])
        return errors(measured_s[timed], time_s[timed], lo_s[timed], hi_s[timed]) | {
            "memory": memory
        }

    # Errors by source, then over all rows: one sweep of 2,000 rows would otherwise drown the
    # other sources.
    source = np.asarray(runs["source"], str)
    cells = runs["framework"].tolist() if "framework" in runs else [None] * len(runs)
    frameworks = np.array([cell if isinstance(cell, str) else "" for cell in cells])
    sources = {}
    for name in dict.fromkeys(source.tolist()):
        frameworks_of_source = {*frameworks[source == name].tolist()} - {""}
        sources[name] = {"frameworks": sorted(frameworks_of_source)} | figures(source == name)
    everything = figures(np.ones(len(runs), bool))
    return {
        "over_sources": over_sources(sources),
        "sources": sources,
        "all": everything,
        "fits": fit_figures(runs, predicted["fits"], predicted["fits_probability"]),
        "skipped": dict(skipped.most_common()),
        "assumed": dict(_assumed_choices(predicted).most_common()),
    }


def _assumed_choices(predicted: pd.DataFrame) -> Counter[str]:
    """How many rows assume each choice."""
    # How far a choice moves the time stands behind its name, and differs from row to row.
    assumed: Counter[str] = Counter()
    for assumptions in predicted["assumed"].dropna():
        for assumption in assumptions.split(", "):
            assumed[re.split(r" \(|: ", assumption)[0]] += 1
    return assumed


def over_sources(sources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over the sources with timed runs, with equal weight per source."""
    timed = [figures for figures in sources.values() if figures["n"]]
    means: dict[str, Any] = {"sources": len(timed)}
    for name in ("mean_ape", "median_ape", "bias", "coverage_90", "width_90"):
        source_figures = [figures[name] for figures in timed]
        means[name] = float(np.mean(source_figures)) if timed else None
    return means


def _not_compared(status: str) -> str:
    """Reason why a predicted run is not compared."""
    if status == "ok":
        return "predicted, but no step time was measured"
    return f"predicted, but not compared: the run's status is {status or 'not stated'}"


def measured_times_s(runs: pd.DataFrame) -> np.ndarray:
    """Step time of each successful timed run; NaN for others."""
    ok = np.asarray(runs["status"] == "ok") if "status" in runs else np.ones(len(runs), bool)
    return np.where(ok, _positive(runs["measured_iter_time_s"]), np.nan)


def _positive(column: Any) -> np.ndarray:
    """A column's positive, finite numbers, NaN in place of anything else."""
    values = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def memory_bytes(runs: pd.DataFrame) -> np.ndarray:
    """Measured peak memory; NaN if it is unknown, or larger than the device's memory."""
    if "measured_peak_memory_gb" not in runs:
        return np.full(len(runs), np.nan)

    # Tables mix GB and GiB; a figure above the device's memory is of another device.
    unit_bytes = np.full(len(runs), GB)
    if "memory_unit" in runs:
        unit_bytes = np.where(runs["memory_unit"] == "GiB", GIB, GB)
    measured_bytes = _positive(runs["measured_peak_memory_gb"]) * unit_bytes
    measured_bytes = np.where(measured_bytes > _capacities(runs), np.nan, measured_bytes)
    if "status" not in runs:
        return measured_bytes
    return np.where(
        np.asarray(runs["status"].isin(("suspect", "duplicate"))), np.nan, measured_bytes
    )


def _capacities(runs: pd.DataFrame) -> np.ndarray:
    """Memory of every run's device; infinite if the catalog does not know it."""

    def capacity(name: Any) -> float:
        try:
            return catalog.device(str(name)).memory_bytes
        except PerfModelError:
            return np.inf

    if "device" not in runs:
        return np.full(len(runs), np.inf)
    known = {name: capacity(name) for name in runs["device"].unique().tolist()}
    return np.array([known[name] for name in runs["device"].tolist()])


def _group(reason: str) -> str:
    """Strip remedies and figures from reasons, so that equal reasons can be counted."""
    return re.sub(r"(?<![\w.'-])\d+(?:[.,]\d+)*(?![\w'])", "N", reason.split(";")[0])
