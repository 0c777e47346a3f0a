"""What each physics term contributes to predictions of runs: errors with it switched off."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float

from perfmodel.display import Report
from perfmodel.prediction import (
    STEP_TERMS,
    Site,
    StepProblem,
    step_problem,
    step_times_s,
    without,
)
from perfmodel.spec import Layout
from perfmodel.validation._cases import measured_times_s
from perfmodel.validation._run_sources import drawn_of_sources, source_of_run
from perfmodel.validation.rows import Case, rows_of

EVERY_TERM: Final = "all of them"
"""Name of the last column, with every term off: kernels and collectives timed alone."""
MOST_ROWS: Final = 40
"""Most rows of a source that are drawn (seed 0)."""


def term_errors(
    runs: pd.DataFrame,
    cases: Mapping[int, Case],
    predicted_s: Float[np.ndarray, " runs"],
    *,
    site_of: Callable[[str], Site] = lambda _: Site(),
    progress: Report | None = None,
) -> dict[str, Any]:
    """Errors with all terms, and with each of `STEP_TERMS` switched off, on the same layouts.

    Constants are not fitted again without a term, so that other terms cannot make up for it. At
    most `MOST_ROWS` timed runs of a source are drawn.

    Args:
        runs: tables of runs.
        cases: likeliest completion of each run, by its place, as `predict_cases` gives it to
            `keep`; runs without one are left out.
        predicted_s: predicted step time of every run, which is the median of all its completions.
        site_of: as `predict_cases` takes it.

    Returns:
        `sources`: by source `n`, `mean_ape`, `bias`, and `without`: by term `mean_ape` and `bias`
        with the term switched off, and `adds`, the mean share of the step that the term adds (0
        where no run has it). `over_sources`: the means of these over sources, each counting the
        same.
    """
    # A random sample of each source: predictions without each term take several times as long as
    # one.
    runs = runs.reset_index(drop=True)
    measured_s = measured_times_s(runs)
    drawn = drawn_of_sources(pd.DataFrame(runs[np.isfinite(measured_s)]), MOST_ROWS)
    by_source: dict[str, list[np.ndarray]] = {}
    for done, (place, row) in enumerate(zip(drawn.index.tolist(), rows_of(drawn), strict=True)):
        if place in cases:
            times_s = _times_s(cases[place], float(predicted_s[place]), site_of(source_of_run(row)))
            by_source.setdefault(str(row["source"]), []).append(times_s / measured_s[place])
        if progress and done % 20 == 0:
            progress("terms", done, len(drawn))
    sources = {name: _figures(np.array(ratios)) for name, ratios in by_source.items()}
    return {"over_sources": _errors_over_sources(list(sources.values())), "sources": sources}


def _times_s(case: Case, predicted_s: float, site: Site) -> np.ndarray:
    """Step time with every term, with each term off in turn, and with all of them off.

    Terms are switched off in the likeliest completion of what the row leaves open, and shorten the
    prediction, which is the median of all completions, in the same proportion.
    """
    problem = step_problem(case.model, case.cluster, case.job, None, case.framework, site)
    names = [term.name for term in STEP_TERMS]

    # A term that is off by default changes nothing when it is switched off. Its step is not timed
    # again (`_without_s`).
    whole_s = _step_s(problem, case.layout)
    switched_off = [*([name] for name in names), names]
    times_s = [
        whole_s,
        *(_without_s(problem, case.layout, terms, whole_s) for terms in switched_off),
    ]
    return np.array(times_s) * (predicted_s / whole_s)


def _without_s(problem: StepProblem, layout: Layout, names: Sequence[str], whole_s: float) -> float:
    reduced = without(problem, names)
    return whole_s if reduced == problem else _step_s(reduced, layout)


def _step_s(problem: StepProblem, layout: Layout) -> float:
    return float(step_times_s(problem, [layout])[0])


def _figures(ratio: np.ndarray) -> dict[str, Any]:
    """Errors from ratios of predicted to measured times (rows: runs, columns: terms)."""
    error = np.abs(ratio - 1).mean(axis=0)
    bias = (ratio - 1).mean(axis=0)
    adds = (1 - ratio / ratio[:, :1]).mean(axis=0)

    # The first column has all terms, each of the others lacks one, and the last lacks all.
    lacking = [*(term.name for term in STEP_TERMS), EVERY_TERM]
    without = {}
    for i, name in enumerate(lacking, start=1):
        without[name] = {
            "mean_ape": float(error[i]),
            "bias": float(bias[i]),
            "adds": float(adds[i]),
        }
    return {
        "n": len(ratio),
        "mean_ape": float(error[0]),
        "bias": float(bias[0]),
        "without": without,
    }


def _errors_over_sources(sources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over sources."""
    if not sources:
        return {"sources": 0}

    def mean(*keys: str) -> float:
        """Mean over sources of the value that the keys lead to."""
        # Walk down the nested dictionary of each source along the keys.
        values = []
        for source in sources:
            value: Any = source
            for key in keys:
                value = value[key]
            values.append(value)
        return float(np.mean(values))

    without_term = {}
    for term, figures in sources[0]["without"].items():
        without_term[term] = {key: mean("without", term, key) for key in figures}
    return {
        "sources": len(sources),
        "mean_ape": mean("mean_ape"),
        "bias": mean("bias"),
        "without": without_term,
    }
