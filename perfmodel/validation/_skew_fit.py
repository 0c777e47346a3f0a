"""What published runs say of how far apart ranks reach their collectives (`perfmodel.prediction.Site`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site, step_problem, step_times_s
from perfmodel.validation._case_rows import read_case

STEP_S: Final = 50e-6
"""Spread by which the time of a step that waits is told."""
LEAST_SHARE: Final = 0.01
"""Of the step that must wait at that spread, for a run to say something of it."""
LEAST_ROWS: Final = 3


def fit_skew(
    runs: pd.DataFrame,
    *,
    unstated: tuple[str, ...],
    site_of: Callable[[str], Site],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, float]:
    """By source the median spread in seconds of the runs that wait for collectives.

    Args:
        runs: timed runs.
        unstated: as in `fit_sites`.
        site_of: constants of the place for the runs of a source, fitted without it.
    """
    found: dict[str, float] = {}
    for source, rows in runs.groupby("source"):
        if str(source).startswith(unstated):
            continue
        site, said = replace(site_of(str(source)), skew_s=0.0), list[float]()
        for done, row in enumerate(rows.astype(object).where(rows.notna(), None).to_dict("records")):
            said += _of_collectives(row, site)
            if progress:
                progress(f"collectives of {source}", done, len(rows))
        if len(said) >= LEAST_ROWS:
            found[str(source)] = round(float(np.median(said)), 7)
    return dict(sorted(found.items()))


def _of_collectives(row: dict[str, Any], site: Site) -> list[float]:
    """The spread that makes a run take what was measured; none where it hardly waits."""
    try:
        case = read_case(row)
    except PerfModelError:
        return []
    sites = site, replace(site, skew_s=STEP_S)
    models = (step_problem(case.model, case.cluster, case.job, None, case.framework, one) for one in sites)
    alone_s, longer_s = (float(step_times_s(model, [case.layout])[0]) for model in models)
    if longer_s < alone_s * (1 + LEAST_SHARE):
        return []
    return [STEP_S * (float(row["measured_iter_time_s"]) - alone_s) / (longer_s - alone_s)]
