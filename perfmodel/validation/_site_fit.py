"""What published runs say of sites that nobody knows: how much longer products take under sustained load, and how wide
90 % intervals must be (`perfmodel.prediction.Site`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.optimize import minimize

from perfmodel.cost import has_power_law
from perfmodel.display import shows_progress
from perfmodel.errors import PerfModelError, TableError
from perfmodel.ingest.tables import write_json
from perfmodel.prediction import (
    MEMORY_FILE,
    SUSTAINED_FILE,
    TERMS,
    UNKNOWN_FILE,
    Site,
    source_group,
    step_problem,
    step_times_s,
    sustained_from,
)
from perfmodel.validation._case_rows import read_case
from perfmodel.validation._cases import (
    measured_times_s,
    memory_bytes,
    missing_column,
    predict_cases,
    read_rows,
    read_tables,
)

Progress = Callable[[str, int, int], None]
Medians = dict[str, dict[str, float]]
"""By architecture and source, the median of log(measured / predicted) over the share of products in the step."""
STEP: Final = 0.1
"""Log change of the time of products by which their share of a step is told."""
LEAST_SHARE: Final = 0.5
"""Of the step in products, from which a run says something of them."""
MOST_NODES: Final = 64
"""Up to here networks and stragglers take less of a step than products."""
DEVICES_PER_NODE: Final = 8
"""Where a table does not say."""
LEAST_ROWS: Final = 3
MOST_ROWS: Final = 150
"""Of a source that are drawn (seed 0)."""
_SHARES: Final = {"extrapolated": "extrapolated_share", "host": "host_share", "network": "network_share",
           "unstated": "unstated_share"}  # fmt: skip
BEYOND: Final = 0.05
"""Share of runs beyond either end."""
STEEPEST: Final = 1.0
"""Largest log half-width per share: no part of a step is known worse than within a factor e, lest one site's broken
network widen every prediction."""
PENALTY: Final = 1e-3
"""Of slopes, so that what no source needs is 0."""
_STARTS: Final = (
    (0.1,) * len(TERMS),
    (0.3,) * (len(TERMS) - 1) + (0.0,),
    (0.2, 0.0, 0.5, 0.5, 0.3),
    (0.1, 0.1, 0.9, 0.9, 0.5),
)


@shows_progress("runs")
def fit_sites(
    files: Sequence[Path], out: Path, *, unstated: Sequence[str] = (), progress: Progress | None = None
) -> dict[str, Any]:
    """Fit the constants of an unknown site to tables of published runs, and write their files into a folder.

    First the time of products under load, then, with predictions that take it, the half-widths; the runs of a source
    are held against constants that were fitted without its group. The package's own files are in
    `perfmodel/prediction`.

    Args:
        files: tables of runs (columns of `validate cases`); files of other kinds are named in the answer.
        unstated: beginnings of names of sources whose tables leave recompute or the kernels to recipes, or whose
            device was never measured: they say nothing of products.

    Returns:
        `sustained`: medians by architecture and source; `unknown`: half-widths by the group left out ("" for none);
        `memory`: spreads of peaks by source; `skipped_files`.

    Raises:
        TableError: a file is missing or unreadable, or no file is a table of runs.
    """
    runs, ignored = read_tables(files)
    timed = pd.DataFrame(runs[(runs["status"] == "ok") & runs["measured_iter_time_s"].notna()]).reset_index(drop=True)
    if timed.empty:
        raise TableError(f"{files[0]}: no row with status ok and measured_iter_time_s; give tables of measured runs")
    medians = fit_sustained(pd.concat([drawn_runs(file) for file in files]), unstated=unstated, progress=progress)
    predicted = predict_cases(
        timed, progress=progress, site_of=lambda source: Site(sustained=sustained_from(medians, source))
    )
    half_widths = fit_unknown(timed, predicted)
    memory = fit_memory(timed, predicted)
    write_json(Path(out) / MEMORY_FILE, memory)
    write_json(Path(out) / SUSTAINED_FILE, medians)
    write_json(Path(out) / UNKNOWN_FILE, half_widths)
    return {"sustained": medians, "unknown": half_widths, "memory": memory, "skipped_files": ignored}


def drawn_runs(file: Path) -> pd.DataFrame:
    """Timed runs of a table on few nodes, at most `MOST_ROWS` of a source; none of a file that is no table of runs."""
    table: Any = read_rows(Path(file))
    if missing_column(table):
        return pd.DataFrame()
    table = table[(table["status"] == "ok") & table["measured_iter_time_s"].notna()]
    table = table[table["n_devices"] <= MOST_NODES * table["devices_per_node"].fillna(DEVICES_PER_NODE)]
    return table.groupby("source").sample(frac=1, random_state=0).groupby("source").head(MOST_ROWS)


def fit_sustained(runs: pd.DataFrame, *, unstated: Sequence[str] = (), progress: Progress | None = None) -> Medians:
    """Medians of the sources that have `LEAST_ROWS` runs of an architecture which say something of products."""
    found: Medians = {}
    for source, rows in runs.groupby("source"):
        if str(source).startswith(tuple(unstated)):
            continue
        said: dict[str, list[float]] = {}
        for done, row in enumerate(rows.astype(object).where(rows.notna(), None).to_dict("records")):
            if evidence := _of_products(row):
                said.setdefault(evidence[0], []).append(evidence[1])
            if progress:
                progress(f"products of {source}", done, len(rows))
        for architecture, logs in said.items():
            if len(logs) >= LEAST_ROWS:
                found.setdefault(architecture, {})[str(source)] = round(float(np.median(logs)), 4)
    return {architecture: found[architecture] for architecture in sorted(found)}


def _of_products(row: dict[str, Any]) -> tuple[str, float] | None:
    """Architecture and log of measured over predicted per share of products; None where a run says nothing of them, or
    where physics does (`perfmodel.cost.sustained_seconds`)."""
    try:
        case = read_case(row)
    except PerfModelError:
        return None
    if has_power_law(case.cluster.device):
        return None
    name = case.cluster.device.architecture
    sites = (Site(sustained=((name, log),)) for log in (0.0, STEP))
    models = (step_problem(case.model, case.cluster, case.job, None, case.framework, site) for site in sites)
    alone_s, slower_s = (float(step_times_s(model, [case.layout])[0]) for model in models)
    share = float(np.log(slower_s / alone_s)) / STEP
    if share < LEAST_SHARE:
        return None
    return name, float(np.log(float(row["measured_iter_time_s"]) / alone_s)) / share


def fit_unknown(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """By left-out group of sources ("" for none), `faster` and `slower` of `Unknown`.

    Args:
        runs: tables of runs.
        predicted: what `predict_cases` returns for them.
    """
    log = np.log(measured_times_s(runs) / np.asarray(predicted["predicted_iter_time_s"], float))
    timed = np.isfinite(log)
    shares = [np.asarray(predicted[_SHARES[name]], float)[timed] for name in TERMS[1:]]
    at = np.stack([np.ones(int(timed.sum())), *shares], axis=1)
    events = np.asarray(predicted["events_half_width"], float)[timed]
    source = np.asarray(runs["source"], str)[timed]
    group = np.array([source_group(name) for name in source])
    names, of_row, rows = np.unique(source, return_inverse=True, return_counts=True)
    weight = 1 / rows[of_row] / len(names)
    found: dict[str, dict[str, Any]] = {}
    for left_out in ("", *np.unique(group).tolist()):
        kept = group != left_out
        part = events[kept], at[kept], weight[kept]
        found[left_out] = {"faster": _side(-log[timed][kept], *part), "slower": _side(log[timed][kept], *part)}
    return found


def fit_memory(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """By source with measured peaks, median and median absolute deviation of log(measured / predicted).

    Args:
        runs: tables of runs.
        predicted: what `predict_cases` returns for them.
    """
    log = np.log(memory_bytes(runs) / np.asarray(predicted["predicted_peak_memory_bytes"], float))
    source = np.asarray(runs["source"], str)
    found = {}
    for name in dict.fromkeys(source[np.isfinite(log)].tolist()):
        own = log[np.isfinite(log) & (source == name)]
        at = float(np.median(own))
        found[name] = (round(at, 4), round(float(np.median(np.abs(own - at))), 4))
    return found


def _side(
    log: Float[np.ndarray, " runs"],
    events: Float[np.ndarray, " runs"],
    at: Float[np.ndarray, "runs terms"],
    weight: Float[np.ndarray, " runs"],
) -> list[float]:
    """The terms whose half-width, joined with that of the events, leaves `BEYOND` of the runs beyond it: least
    quantile loss (Koenker and Bassett 1978), each source with the same weight."""

    def loss(terms: Float[np.ndarray, " terms"]) -> float:
        beyond = log - np.hypot(events, at @ np.clip(np.abs(terms), 0, STEEPEST))
        quantile = weight @ np.where(beyond > 0, (1 - BEYOND) * beyond, -BEYOND * beyond)
        return float(quantile + PENALTY * np.abs(terms[1:]).sum())

    options = {"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-8}
    best = min((minimize(loss, start, method="Nelder-Mead", options=options) for start in _STARTS), key=lambda r: r.fun)
    return np.round(np.clip(np.abs(best.x), 0, STEEPEST), 3).tolist()
