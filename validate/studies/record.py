"""The whole record of published runs in one structure: errors, bars, other predictors, ranking,
memory, fits."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from studies.bars import BARS, Bar, group_means, playbook
from studies.blind_record import KnownSources, looked_at
from studies.excess import by_devices, pipeline_excess
from studies.pairs import (
    NANOTRON,
    PredictedRun,
    choices,
    next_run,
    pairs_report,
    predicted_run,
    ranking,
)
from studies.reliability import interval_scores, width_deciles

from perfmodel.prediction import Prediction, Site
from perfmodel.validation import (
    Case,
    cases_report,
    drawn_of_sources,
    errors,
    measured_times_s,
    memory_bytes,
    predict_cases,
    source_of_run,
    term_errors,
)
from perfmodel.validation.rows import missing_column, read_rows, read_tables

NAIVE = "one FLOP rate"
REFERENCE_FILE = "predictor_reference.csv"
MOST_GENERIC = 40
"""Most runs of a source that are predicted without their framework as well."""


def published_record(
    files: Sequence[Path | str], progress: Callable[[str, int, int], None] | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Predict all published runs, and collect every figure that the reports show.

    Every run is predicted under its framework, by constants that were fitted without its source.

    Args:
        files: tables of runs; other files among them are named, and a table of other predictors'
            results beside them is read for comparison.

    Returns:
        What `validate_cases` returns, with `groups` (`group_means`), `terms` (`term_errors`),
        `bars` (name -> reached and to reach), `others` (predictor -> source -> figures of ours and
        theirs on the same rows), `ranking`, `pairs` (`pairs_report`, and `next_run`), `intervals`
        (`interval_scores`), `width_deciles`, `excess` (of the sweep of nanotron) and `generic`
        (errors of at most `MOST_GENERIC` runs of a source, whose framework is not told); and the
        runs with `measured_s`, `measured_bytes` and the columns of the predictions.

    Raises:
        TableError: if a file is missing, unreadable or no file is a table of runs.
    """
    runs, ignored = read_tables(files)
    runs_as_predicted: dict[int, PredictedRun] = {}
    cases: dict[int, Case] = {}

    def keep(place: int, case: Case, prediction: Prediction) -> None:
        """Keep of a prediction what pairs of layouts and terms of the physics need of it."""
        cases[place] = case
        site = Site.without(source_of_run(runs.iloc[place].to_dict()))
        runs_as_predicted[place] = predicted_run(case, prediction, site)

    # All runs under their frameworks; of every source some without, as a stranger's would be.
    predicted = predict_cases(runs, None, progress, site_of=Site.without, keep=keep)
    sample = drawn_of_sources(runs, MOST_GENERIC).reset_index(drop=True)
    generic = predict_cases(sample, None, progress, framework="generic", site_of=Site.without)
    measured_s = measured_times_s(runs)
    measured_bytes = memory_bytes(runs)
    peak_bytes = np.asarray(predicted["predicted_peak_memory_bytes"], float)
    times_s = [
        np.asarray(predicted[name], float) for name in ("predicted_iter_time_s", "lo_s", "hi_s")
    ]
    time_s = times_s[0]

    # By predictor, seconds and bytes of every run; one rate for all predicts no memory.
    flops = np.asarray(predicted["model_flops_per_device"], float)
    theirs = {NAIVE: (naive_times_s(runs, measured_s, flops), np.full(len(runs), np.nan))}
    for name, frame in reference_predictions(Path(files[0]).parent, runs["case_id"]).items():
        theirs[name] = frame["time_s"].to_numpy(float), frame["peak_bytes"].to_numpy(float)

    frame = pd.concat([runs, predicted.drop(columns="case_id")], axis=1)
    frame["measured_s"], frame["measured_bytes"] = measured_s, measured_bytes
    groups = choices(runs, measured_s, runs_as_predicted)
    sweep = frame.loc[playbook(frame)]
    record = cases_report(runs, predicted) | {
        "generic": _generic_figures(cases_report(sample, generic)),
        "skipped_files": ignored,
        "looked_at": sources_looked_at(files),
        "groups": group_means(frame),
        "terms": term_errors(runs, cases, time_s, site_of=Site.without, progress=progress),
        "bars": {bar.name: _reached(bar, frame) for bar in BARS if bar.rows(runs).any()},
        "others": {
            name: _beside(runs, measured_s, time_s, times) for name, (times, _) in theirs.items()
        },
        "others_memory": {
            name: _beside(runs, measured_bytes, peak_bytes, their_bytes)
            for name, (_, their_bytes) in theirs.items()
        },
        "ranking": ranking(runs, measured_s, time_s),
        "pairs": pairs_report(groups, (NANOTRON,)) | {"next_run": next_run(groups)},
        "intervals": interval_scores(runs["source"].to_numpy(str), measured_s, *times_s),
        "width_deciles": [asdict(decile) for decile in width_deciles(measured_s, *times_s)],
        "excess": pipeline_excess(sweep) | {"by_devices": by_devices(sweep)},
    }
    return record, frame


def sources_looked_at(files: Sequence[Path | str]) -> dict[str, str]:
    """Text on whether anybody ever looked at a source's errors (`looked_at`), by source."""
    # A source is of the first collection that has it.
    known = KnownSources.read()
    answers = {}
    for file in map(Path, files):
        table = read_rows(file)
        if missing_column(table) is None:
            for source in table["source"].unique().tolist():
                answers.setdefault(source, looked_at(source, file.parent.name, known))
    return answers


def _generic_figures(report: dict[str, Any]) -> dict[str, Any]:
    """Errors of runs predicted as `generic`, over sources and by source."""
    sources = {}
    for name, figures in report["sources"].items():
        memory = figures["memory"]
        sources[name] = {
            "n": figures["n"],
            "mean_ape": figures["mean_ape"],
            "bias": figures["bias"],
            "memory": {"n": memory["n"], "mean_ape": memory["mean_ape"], "bias": memory["bias"]},
        }
    return {"over_sources": report["over_sources"], "sources": sources}


def _reached(bar: Bar, frame: pd.DataFrame) -> dict[str, Any]:
    """The error that a bar asks for, and the error of its runs."""
    # A bar is of named runs, not of a source.
    chosen = frame[bar.rows(frame)]

    def error(measured: str, predicted: str) -> dict[str, Any]:
        """The bar's statistic of one quantity, over runs that were measured and are predicted."""
        y = np.asarray(chosen[measured], float)
        p = np.asarray(chosen[predicted], float)
        good = np.isfinite(y) & np.isfinite(p)
        figures = errors(y[good], p[good])
        return {
            "n": figures["n"],
            "error": figures[f"{bar.statistic}_ape"],
            "bias": figures["bias"],
        }

    result: dict[str, Any] = {
        "statistic": bar.statistic,
        "elsewhere": bar.elsewhere,
        "missing": bar.missing,
    }
    if bar.time is not None:
        time = error("measured_s", "predicted_iter_time_s")
        result["time"] = time | {"to_reach": bar.time}
    if bar.memory is not None:
        memory = error("measured_bytes", "predicted_peak_memory_bytes")
        result["memory"] = memory | {"to_reach": bar.memory}
    return result


def _beside(
    runs: pd.DataFrame, measured: np.ndarray, ours: np.ndarray, theirs: np.ndarray
) -> dict[str, dict[str, float | int]]:
    """Mean errors of `ours` and `theirs` and their number `n`, by source, on rows that both
    predict."""
    by_source = {}
    # Only rows that both predict are fair to compare: each may leave out the ones that are hard.
    both = np.isfinite(measured) & np.isfinite(ours) & np.isfinite(theirs)
    for source, indices in runs.reset_index(drop=True).groupby("source").indices.items():
        members = np.asarray(indices)
        rows = members[both[members]]
        if len(rows):
            by_source[str(source)] = {
                "n": len(rows),
                "ours": float(np.abs(ours[rows] / measured[rows] - 1).mean()),
                "theirs": float(np.abs(theirs[rows] / measured[rows] - 1).mean()),
            }
    return by_source


def naive_times_s(
    runs: pd.DataFrame, measured_s: Float[np.ndarray, " n"], flops: Float[np.ndarray, " n"]
) -> np.ndarray:
    """Step time at the median rate of model FLOPs per device over the other runs of the same
    source, device and dtype.

    Leave-one-out; NaN where a run has no others.
    """
    rate = flops / measured_s
    times_s = np.full(len(runs), np.nan)
    keys = [
        runs[name].astype(str).to_numpy() for name in ("source", "device", "dtype") if name in runs
    ]
    for indices in runs.reset_index(drop=True).groupby(keys).indices.values():
        members = np.asarray(indices)
        known = members[np.isfinite(rate[members])]
        for i in known:
            # A run's own rate would predict it without error.
            rest = known[known != i]
            if len(rest):
                times_s[i] = flops[i] / np.median(rate[rest])
    return times_s


def reference_predictions(folder: Path, case_ids: Any) -> dict[str, pd.DataFrame]:
    """Predictions of reference predictors (`time_s` and `peak_bytes` per case, NaN where there is
    none); empty without their table."""
    path = folder / REFERENCE_FILE
    if not path.is_file():
        return {}
    table = pd.read_csv(path)
    # Tables of other tools state GiB or GB.
    unit = np.where(table["memory_unit"] == "GiB", 2.0**30, 1e9)
    cells = {
        "case_id": table["case_id"],
        "predictor": table["predictor"],
        "time_s": table["predicted_iter_time_s"],
    }
    frame = pd.DataFrame(cells | {"peak_bytes": table["predicted_memory"] * unit})
    columns = ["time_s", "peak_bytes"]
    return {
        str(name): pd.DataFrame(part.set_index("case_id")[columns].reindex(case_ids))
        for name, part in frame.groupby("predictor")
    }
