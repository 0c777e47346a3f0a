"""Published runs as data for the model of sites."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.display import Report
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site, explain, step_problem
from perfmodel.prediction.composition import layout_coordinates
from perfmodel.prediction.sites import CLASSES, DEGREES, model_kind
from perfmodel.prediction.sites.constants import team_key
from perfmodel.prediction.sites.known_runs import Coordinates
from perfmodel.spec import Framework
from perfmodel.validation._cases import unstated_share
from perfmodel.validation.population import SiteRuns
from perfmodel.validation.rows import rows_of
from perfmodel.validation.unstated import RunPrediction, predict_run

Undo = Callable[[str, Framework], Framework | None]
"""Function that removes from a framework the facts looked up with the results of a source in view;
it returns None if there are none."""


def nothing_in_view(_source: str, _framework: Framework) -> None:
    """An `Undo` for records without such facts."""


@dataclass(frozen=True, kw_only=True)
class SiteRun:
    """One measured run and its error against the prediction."""

    log: float
    """log(measured / predicted)."""
    log_undone: float
    """log(measured / predicted) without the facts that were looked up with the run's error in
    view."""
    looked_at: bool
    """Whether facts were ever looked up with the errors of the run's source in view."""
    shares: list[float]
    """Shares of the step, by class."""
    degrees: list[float]
    """Amounts of `DEGREES`: settings that are not stated, times that are extrapolated, the
    bubble."""
    events: float
    """Standard deviation of the log step time from the events' own intervals."""
    at: Coordinates
    """Coordinates of the layout; runs with near coordinates are correlated."""
    open_deviation: float
    """Standard deviation of the log step time over the possible completions of the run."""
    contradicts: float
    """Degree to which statements about the run contradict each other."""
    repeated: str
    """Name that repeats of one run share."""
    labels: dict[str, str]
    """Labels of the run, as in `SiteRuns.labels`."""


def site_runs(
    runs: pd.DataFrame,
    sites: Callable[[str], Site],
    progress: Report | None = None,
    *,
    undo: Undo = nothing_in_view,
    looked_at: Callable[[str], bool] = lambda _: False,
) -> SiteRuns:
    """Predict runs by physics alone: median step over open settings, breakdown of the likeliest.

    Args:
        runs: timed rows; those that cannot be predicted are left out.
        sites: constants for the runs of a source, without any of `SitePopulation`.
        undo: a framework without the facts that were looked up with a source's results in view.
        looked_at: whether facts of any kind were ever looked up with a source's results in view.
    """
    predicted: list[SiteRun] = []
    for done, row in enumerate(rows_of(runs)):
        if progress:
            progress("runs of sites", done, len(runs))
        source = str(row["source"])
        site = replace(sites(source), unstated=unstated_share(row))
        try:
            # These sites have no model of the population, which is what is fitted to the errors
            # of physics alone.
            run = predict_run(row, None, site)
        except PerfModelError:
            continue
        predicted.append(
            _site_run(row, run, site, undo(source, run.case.framework), looked_at(source))
        )

    # Repeats of one run get one number, so that the fit can separate the effect of a layout from
    # noise between runs.
    _, layout = np.unique(np.array([run.repeated for run in predicted]), return_inverse=True)
    labels = {}
    for name in predicted[0].labels:
        labels[name] = np.array([run.labels[name] for run in predicted])
    return SiteRuns(
        log=np.array([run.log for run in predicted]),
        log_undone=np.array([run.log_undone for run in predicted]),
        looked_at=np.array([run.looked_at for run in predicted]),
        shares=np.array([run.shares for run in predicted]),
        degrees=np.array([run.degrees for run in predicted]),
        events=np.array([run.events for run in predicted]),
        at=np.array([run.at for run in predicted]),
        layout=layout,
        open_deviation=np.array([run.open_deviation for run in predicted]),
        contradictions=np.array([run.contradicts for run in predicted]),
        labels=labels,
    )


def _site_run(
    row: dict[str, Any],
    run: RunPrediction,
    site: Site,
    undone: Framework | None,
    looked_at: bool,
) -> SiteRun:
    """Convert one predicted run to data for the model of sites."""
    case, prediction = run.case, run.prediction
    problem = step_problem(case.model, case.cluster, case.job, None, case.framework, site)
    at = layout_coordinates(problem.setting, case.layout)
    source = str(row["source"])
    measured_s = float(row["measured_iter_time_s"])
    # Facts change the likeliest completion, and the median of all in the same proportion.
    undone_s = run.step_time_s
    if undone is not None:
        without = step_problem(case.model, case.cluster, case.job, None, undone, site)
        undone_s *= explain(without, case.layout).step_time_s / prediction.step_time_s
    degrees = {
        "unstated": site.unstated,
        "extrapolated": prediction.uncertainty.unknown_shares["extrapolated"],
        "bubble": prediction.bubble_fraction,
    }

    # Events' own errors are independent of one another, so that their squares add.
    event_sds = [
        sd for name, sd in prediction.uncertainty.by_source.items() if name.startswith("events")
    ]
    return SiteRun(
        log=float(np.log(measured_s / run.step_time_s)),
        log_undone=float(np.log(measured_s / undone_s)),
        looked_at=looked_at,
        shares=[prediction.uncertainty.class_shares[name] for name in CLASSES],
        degrees=[degrees[name] for name in DEGREES],
        events=sum(sd**2 for sd in event_sds) ** 0.5,
        at=at,
        open_deviation=run.open_deviation,
        contradicts=run.contradicts,
        repeated=repr((source, case.model.name, case.job, at, case.layout.schedule)),
        labels={
            "framework": case.framework.name,
            "architecture": case.cluster.device.architecture,
            "source": source,
            "group": team_key(source),
            "year": str(_year(row)),
            "model_kind": model_kind(case.model),
        },
    )


def _year(row: dict[str, Any]) -> int:
    """Year of a run; 0 where its row does not state it."""
    year = row.get("year")
    return 0 if year in (None, "") else int(float(str(year)))
