"""Fits the constants of unknown sites (`perfmodel.prediction.Site`) to published runs: clocks under
load, and the model of differences between sites."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.catalog.networks import DEVICES_PER_NODE
from perfmodel.cost import has_power_law
from perfmodel.display import Report, shows_progress
from perfmodel.errors import PerfModelError, TableError
from perfmodel.files import CHECKSUMS_FILE, checksum_lines
from perfmodel.ingest.tables import write_json, write_text
from perfmodel.prediction import Site, step_problem, step_times_s
from perfmodel.prediction.sites import NEUTRAL, POPULATION_CARD, POPULATION_FILE
from perfmodel.prediction.sites.constants import (
    MEMORY_FILE,
    SUSTAINED_FILE,
    sustained_from,
    team_key,
)
from perfmodel.validation._cases import memory_bytes, predict_cases
from perfmodel.validation._run_sources import drawn_of_sources, with_submitters
from perfmodel.validation._site_runs import Undo, nothing_in_view, site_runs
from perfmodel.validation.population import (
    MOST,
    PopulationFit,
    fit_population,
    parameters_text,
    population_card,
)
from perfmodel.validation.rows import (
    Case,
    missing_column,
    read_case,
    read_rows,
    read_tables,
    rows_of,
)

Medians = dict[str, dict[str, float]]
"""Medians of log(measured / predicted) over the share of products in the step, by architecture and
source."""
STEP: Final = 0.1
"""Log change of the products' time that is applied to find their share of the step."""
LEAST_SHARE: Final = 0.5
"""Least share of products in the step at which a run is evidence about them."""
MOST_NODES: Final = 64
"""Most nodes of a run; up to this number networks and stragglers take less of a step than
products."""
LEAST_ROWS: Final = 3
MOST_ROWS: Final = 150
"""Most rows of a source from which its products are fitted."""
MOST_PEAKS: Final = 40
"""Most rows of a source from which the spread of its peaks is fitted: a median of these is known to
a sixth of it."""


@shows_progress("runs")
def fit_sites(
    files: Sequence[Path],
    out: Path,
    *,
    unstated: Sequence[str] = (),
    undo: Undo = nothing_in_view,
    looked_at: Callable[[str], bool] = lambda _: False,
    more: Callable[[PopulationFit], str] | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Fit the constants of an unknown site to published runs, and write them into a folder.

    The time of products under load is fitted first. Predictions with it then give the hierarchical
    model of sites (`fit_population`). The runs of a source are compared with constants that were
    fitted without its teams. The package's own files are in `perfmodel/prediction`.

    Args:
        files: tables of runs (columns of `validate cases`); files of other kinds are named in the
            answer.
        unstated: prefixes of names of sources that do not constrain the time of products, because
            their tables leave recompute or kernels to recipes, or their device was never measured.
        undo: a framework without the facts that were looked up with a source's results in view;
            intervals are fitted to errors without them.
        looked_at: whether facts of any kind were ever looked up with a source's results in view.
            Such sources count half for the width of intervals, since not all of these facts can be
            undone.
        more: a further section of the card.

    Returns:
        `sustained`: medians by architecture and source; `population`: the
            model of sites by the teams left out ("" for none); `memory`: spreads of peaks by
            source; `skipped_files`.

    Raises:
        TableError: a file is missing or unreadable, or no file is a table of runs.
    """
    runs, ignored = read_tables(files)
    runs = with_submitters(runs)
    timed = pd.DataFrame(runs[_is_timed(runs)]).reset_index(drop=True)
    if timed.empty:
        raise TableError(
            f"{files[0]}: no row has measured_iter_time_s and a status that is ok or empty; give tables of measured runs"
        )

    # First the slowdown of products under sustained load, which the predictions below already
    # contain.
    drawn = pd.concat([drawn_runs(file) for file in files])
    medians = fit_sustained(drawn, unstated=unstated, progress=progress)

    # A source is predicted with constants fitted to all other teams.
    def clocked(source: str) -> Site:
        return Site(
            sustained=sustained_from(medians, source), population=NEUTRAL, left_out=team_key(source)
        )

    # Then the model of sites, from the errors of step times, and the spread of memory, from those
    # of peaks.
    known = site_runs(
        drawn_of_sources(timed, MOST), clocked, progress, undo=undo, looked_at=looked_at
    )
    fitted = fit_population(known, progress)
    with_memory = drawn_of_sources(
        pd.DataFrame(timed[np.isfinite(memory_bytes(timed))]), MOST_PEAKS
    )
    memory = fit_memory(with_memory, predict_cases(with_memory, progress=progress, site_of=clocked))

    # Checksums are those of the JSON files that lie there by then.
    folder = Path(out)
    write_json(folder / MEMORY_FILE, memory)
    write_json(folder / SUSTAINED_FILE, medians)
    write_text(folder / POPULATION_FILE, parameters_text(fitted))
    write_text(folder / CHECKSUMS_FILE, checksum_lines(folder))
    card = population_card(fitted)
    write_text(folder / POPULATION_CARD, f"{card}\n{more(fitted)}" if more else card)
    return {
        "sustained": medians,
        "population": fitted.parameters,
        "memory": memory,
        "skipped_files": ignored,
    }


def _is_timed(runs: pd.DataFrame) -> Any:
    """Whether each run ended well and has a time; a run whose status is empty ended well."""
    has_time = runs["measured_iter_time_s"].notna()
    if "status" not in runs:
        return has_time
    return has_time & (runs["status"].isna() | runs["status"].isin(("", "ok")))


def drawn_runs(file: Path) -> pd.DataFrame:
    """Timed runs of a table on few nodes, at most `MOST_ROWS` per source; empty if the file is not
    a table of runs."""
    table: Any = read_rows(Path(file))
    if missing_column(table):
        return pd.DataFrame()
    table = table[_is_timed(table)]

    # On many nodes networks and stragglers take more of the step than products do.
    table = table[
        table["n_devices"] <= MOST_NODES * table["devices_per_node"].fillna(DEVICES_PER_NODE)
    ]
    return drawn_of_sources(with_submitters(pd.DataFrame(table)), MOST_ROWS)


def fit_sustained(
    runs: pd.DataFrame, *, unstated: Sequence[str] = (), progress: Report | None = None
) -> Medians:
    """Medians of each source with `LEAST_ROWS` or more informative runs of an architecture."""
    by_architecture: Medians = {}
    for source, medians in _medians(
        runs, lambda _, case, s: _product_slowdown(case, s), unstated, "products", progress
    ):
        for architecture, median in medians.items():
            by_architecture.setdefault(architecture, {})[source] = round(median, 4)
    return {architecture: by_architecture[architecture] for architecture in sorted(by_architecture)}


def _medians(
    runs: pd.DataFrame,
    evidence_of: Callable[[str, Case, float], tuple[str, float] | None],
    unstated: Sequence[str],
    subject: str,
    progress: Report | None,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Medians of each source's runs by kind of evidence, for kinds with at least `LEAST_ROWS` runs.

    Args:
        evidence_of: kind and value of the evidence of a run of a source, from its case and measured
            time.
        subject: name of the evidence, for the progress bar.
    """
    for source, rows in runs.groupby("source"):
        if str(source).startswith(tuple(unstated)):
            continue
        evidence_by_kind: dict[str, list[float]] = {}
        for done, row in enumerate(rows_of(rows)):
            # A run that cannot be read or predicted is not evidence; the tables' own checks report
            # it.
            try:
                evidence = evidence_of(
                    str(source), read_case(row), float(row["measured_iter_time_s"])
                )
            except PerfModelError:
                evidence = None
            if evidence:
                evidence_by_kind.setdefault(evidence[0], []).append(evidence[1])
            if progress:
                progress(f"{subject} of {source}", done, len(rows))
        medians = {}
        for kind, values in evidence_by_kind.items():
            if len(values) >= LEAST_ROWS:
                medians[kind] = float(np.median(values))
        yield str(source), medians


def _product_slowdown(case: Case, measured_s: float) -> tuple[str, float] | None:
    """Architecture and log(measured / predicted) per share of products; None if the run is no
    evidence about them, or if physics determines them (`perfmodel.cost.sustained_seconds`)."""
    if has_power_law(case.cluster.device):
        return None
    name = case.cluster.device.architecture

    # Predict the run twice, with products as timed alone and a tenth (in the log) slower. How
    # much the step follows is the share of products in it, and error over share is the slowdown
    # that products alone would need.
    sites = (Site(sustained=((name, log),), population=NEUTRAL) for log in (0.0, STEP))
    alone_s, slower_s = (_step_s(case, site) for site in sites)
    share = float(np.log(slower_s / alone_s)) / STEP
    return (name, float(np.log(measured_s / alone_s)) / share) if share >= LEAST_SHARE else None


def _step_s(case: Case, site: Site) -> float:
    problem = step_problem(case.model, case.cluster, case.job, None, case.framework, site)
    return float(step_times_s(problem, [case.layout])[0])


def fit_memory(runs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return median and MAD of log(measured / predicted) peak memory, by source.

    Args:
        runs: tables of runs.
        predicted: result of `predict_cases` for them.
    """
    log = np.log(memory_bytes(runs) / np.asarray(predicted["predicted_peak_memory_bytes"], float))
    source = np.asarray(runs["source"], str)
    spreads = {}
    for name in dict.fromkeys(source[np.isfinite(log)].tolist()):
        source_log = log[np.isfinite(log) & (source == name)]

        # Median and median absolute deviation, so that a few wrong peaks do no harm.
        median = float(np.median(source_log))
        spreads[name] = (
            round(median, 4),
            round(float(np.median(np.abs(source_log - median))), 4),
        )
    return spreads
