"""The card of the model of sites: common factors, spread, and the influence of each source."""

from collections.abc import Iterable, Mapping, Sequence
from math import expm1
from typing import Any

import numpy as np

from perfmodel.prediction import GAUSS_90
from perfmodel.prediction.sites import CLASSES, DEGREES, UNKNOWNS, Coverage
from perfmodel.validation.population._coverage import TEAM, covered_half_widths
from perfmodel.validation.population._few_runs import FEW, OTHERS, FewRuns
from perfmodel.validation.population._fit import PopulationFit
from perfmodel.validation.population._score import LEVELS


def population_card(fit: PopulationFit) -> str:
    """Return the card as Markdown; `perfmodel fit --sites` writes it next to the parameters."""
    # The card holds figures and what they are for, and is written by the program that fits them.
    # It has a section for each question.
    sections = [
        _purpose(fit),
        "## What events take beyond the physics",
        *_median_sites(fit),
        "## How far apart",
        *_spreads(fit),
        "## How wide intervals are",
        *_coverage(fit),
        "## What each source taught",
        *_lessons(fit),
        "## What a few runs are worth",
        *_worth_of_runs(fit),
    ]
    return "\n\n".join(sections) + "\n"


def _purpose(fit: PopulationFit) -> str:
    """Say what the model is for and what it was fitted to."""
    runs = fit.score.runs
    return (
        f"# The model of sites\n\nMade by `perfmodel fit --sites` from {len(runs.log)} runs of "
        f"{len(fit.score.sources)} published sources, of which the fit draws a limited number each. Standard "
        "deviations of log times are given in per cent of the time. The model predicts the step time of an unknown "
        "site with its interval, and is the prior for a user's own runs. It says nothing about a single source; runs "
        "that share a team are left out together."
    )


def _median_sites(fit: PopulationFit) -> list[str]:
    """Lines on the factors of the median site, as a table."""
    posteriors = fit.parameters[""]["of"]
    return [
        "Factors of the median site: of all sites, of a framework on any architecture, and of an architecture under "
        "any framework. For a framework on an architecture, add the logs of both and subtract the log of all sites. "
        "Last column: half-width of the 90 % interval of one site's factor, averaged over the classes.",
        _table(
            ("median site of", *CLASSES, "site"),
            (_factors(name, posteriors[name]) for name in _not_both(posteriors)),
        ),
    ]


def _spreads(fit: PopulationFit) -> list[str]:
    """Lines on the standard deviations of sites, layouts and runs."""
    hyper = fit.hyperparameters
    common = fit.parameters[""]["common"]
    scatter_of_shared, scatter_of_single = np.exp(hyper["scatter"])
    by_degree = [
        f"{_percent(sd)} per unit of {name}"
        for name, sd in zip(DEGREES, hyper["degrees"], strict=True)
    ]
    facts = [
        f"similar layouts share {_percent(hyper['near'][0])} (correlation 1/e after "
        f"{hyper['length'][0]:.1f} doublings)",
        f"{_percent(hyper['layout'][0])} are specific to a layout, {_percent(hyper['noise'][0])} to a run",
        f"errors of events are multiplied by {hyper['events'][0]:.2f}",
        *by_degree,
        f"between sites, these deviations vary by a factor of {scatter_of_shared:.2f} for similar layouts, settings "
        f"and events, and by a factor of {scatter_of_single:.2f} for single layouts and runs (one standard deviation)",
        f"once runs of the site are known, half-widths are multiplied by {common['held_given']:.2f} (up to their value "
        "without runs), so that 90 % of the runs of left-out teams lie inside, with equal weight for each source",
        f"the noise variance of known runs is multiplied by {common['doubt']:g}, the value with which a few known runs "
        "improve predictions for left-out sources most (predictions that become worse count twice)",
    ]
    return [
        "Standard deviations by level: of the factor that all classes share, and of the factor of each class.",
        _table(
            ("level", "all classes", *CLASSES),
            (_level_spreads(hyper, place) for place in range(len(LEVELS))),
        ),
        f"Standard deviations beyond the factors of a site: {'; '.join(facts)}.",
    ]


def _lessons(fit: PopulationFit) -> list[str]:
    """Lines on how far off each source is, and what it changes in the model."""
    return [
        "`off`: median of log(measured / predicted) by physics alone. `left out`: the same with the model of the other "
        "teams. `level` and `scatter`: variance of what the source's runs have in common, and of their differences, "
        "relative to the typical source. `far off`: outliers, which count less than half. `moves`: change of the "
        "median site of the whole record by the source and the other sources of its teams.",
        _table(
            ("source", "runs", "off", "left out", "level", "scatter", "far off", "moves"),
            _sources(fit),
        ),
    ]


def _worth_of_runs(fit: PopulationFit) -> list[str]:
    """Lines on how far known runs of a site help to predict its others."""
    return [
        "Each source is left out together with its teams, and then some of its runs become known. The table gives the "
        "mean error of its other runs and, in brackets, the share of them inside their 90 % interval and the ratio of "
        "the interval's ends. Column `physics` uses no model of sites. The last two columns are limits: the error if "
        "all other runs of the source are known, and if a single factor corrects the median of its runs.",
        _table(
            ("source", "physics", *(f"{k} runs" for k in FEW), "all others", "one factor"),
            _rows_of_few_runs(fit),
        ),
    ]


def _coverage(fit: PopulationFit) -> list[str]:
    """Lines on the width of intervals, and on their coverage with whole groups left out."""
    coverage = Coverage(**fit.parameters[""]["common"]["coverage"])
    runs = fit.coverage
    half = covered_half_widths(coverage, runs)
    inside = (np.abs(runs.error) <= half).astype(float)
    weight = runs.weight
    rows = []
    for left_out in dict.fromkeys([TEAM, *runs.left_out.tolist()]):
        chosen = runs.left_out == left_out
        rows.append(
            (
                left_out.replace("_", " "),
                str(int(chosen.sum())),
                f"{100 * np.average(inside[chosen], weights=weight[chosen]):.0f} %",
                f"{np.exp(2 * np.median(half[chosen])):.2f}",
                _percent(float(np.median(np.abs(runs.error[chosen])))),
            )
        )

    # Errors of whole groups left out show whether intervals hold for kinds of runs that were never
    # seen.
    driver_texts = [f"{_percent(half)} ({UNKNOWNS[name]})" for name, half in coverage.added.items()]
    drivers = "; ".join(driver_texts) or "nothing, because missing facts do not widen the interval"
    return [
        f"Half-widths are exp({coverage.base:.2f}) h^{coverage.power:.2f}, where h is the half-width of the model. "
        f"Missing facts widen them; their half-widths are added in quadrature: {drivers}. "
        "Fitted to every run with its team left out, and with its whole framework, device generation, year and kind of "
        "model left out. Facts of frameworks that were looked up with a source's results in view are undone for this "
        "fit; sources for which some of these facts cannot be undone count half. All other sources count equally.",
        _table(("left out", "runs", "inside 90 %", "ends apart", "median error"), rows),
    ]


def _not_both(names: Iterable[str]) -> list[str]:
    """Sort posteriors: of all runs, then of one framework, then of one architecture."""
    alone = (name for name in names if name.startswith("|") or name.endswith("|"))
    return sorted(alone, key=lambda name: (name != "|", name.startswith("|"), name))


def _level_spreads(hyper: Mapping[str, Any], place: int) -> tuple[str, ...]:
    """Name of a level, and its standard deviations: of all classes together and of each."""
    spreads = hyper["spread"][place] * hyper["relative"]
    return LEVELS[place], _percent(hyper["constant"][place]), *map(_percent, spreads)


def _factors(name: str, posterior: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of a median site: its name, a factor per class, their uncertainty."""
    size = len(CLASSES)

    # Covariances are stored as lower triangles, row by row, in which the diagonal stands at 0, 2,
    # 5, 9, ...
    diagonal = [i * (i + 3) // 2 for i in range(size)]
    half = GAUSS_90 * float(np.sqrt(np.array(posterior["covariance"])[diagonal]).mean())
    return (
        name.strip("|") or "all",
        *(_signed(log) for log in posterior["mean"]),
        f"±{_percent(half)}",
    )


def _sources(fit: PopulationFit) -> Iterable[tuple[str, ...]]:
    """Yield each source's errors, scatter, far-off runs and effect on the median site."""
    runs = fit.score.runs

    # `moves` is the mean factor of the median site with the source less that without its teams.
    everything = np.mean(fit.parameters[""]["of"]["|"]["mean"])
    for place, source in enumerate(fit.score.sources.tolist()):
        runs_of_source = np.flatnonzero(runs.labels["source"] == source)
        without = fit.everywhere[str(runs.labels["group"][runs_of_source[0]])]
        yield (
            source,
            str(len(runs_of_source)),
            _signed(np.median(runs.log[runs_of_source])),
            _signed(np.median(fit.left_out[runs_of_source])),
            f"{fit.state.level_scale[place]:.1f}",
            f"{fit.state.scale[place]:.1f}",
            str(int((fit.state.weight[runs_of_source] < 0.5).sum())),
            _signed(float(everything - without)),
        )


def _rows_of_few_runs(fit: PopulationFit) -> Iterable[tuple[str, ...]]:
    """Yield rows of errors by the number of known runs: the mean over sources, then each source."""
    log = fit.score.runs.log
    source = fit.score.runs.labels["source"]
    physics = {name: float(np.abs(np.expm1(-log[source == name])).mean()) for name in fit.few}

    # With a single factor per source known (the median of its runs), its other errors remain: no
    # update by runs can do much better.
    residuals = {name: fit.left_out[source == name] for name in fit.few}
    error_of_one_factor = {}
    for name, log_errors in residuals.items():
        error_of_one_factor[name] = float(
            np.abs(np.expm1(np.median(log_errors) - log_errors)).mean()
        )
    columns = (*FEW, OTHERS)

    def cell(worth: FewRuns | None) -> str:
        if worth is None:
            return "-"
        return f"{100 * worth.error:.1f} % ({100 * worth.inside:.0f} %, {worth.width:.2f})"

    means = []
    for k in columns:
        worths = [by_count[k] for by_count in fit.few.values() if k in by_count]
        means.append(cell(_mean_worth(worths)))

    # A source with one run has no other runs whose errors could be averaged.
    several = [
        error_of_one_factor[name] for name, by_count in fit.few.items() if OTHERS in by_count
    ]
    yield (
        "mean over sources",
        f"{100 * np.mean([*physics.values()]):.1f} %",
        *means,
        f"{100 * np.mean(several):.1f} %",
    )
    for name, by_count in fit.few.items():
        one_factor = f"{100 * error_of_one_factor[name]:.1f} %" if OTHERS in by_count else "-"
        yield (
            name,
            f"{100 * physics[name]:.1f} %",
            *(cell(by_count.get(k)) for k in columns),
            one_factor,
        )


def _mean_worth(worths: Sequence[FewRuns]) -> FewRuns | None:
    """Means over sources; None without a source."""
    if not worths:
        return None
    return FewRuns(
        error=float(np.mean([worth.error for worth in worths])),
        inside=float(np.mean([worth.inside for worth in worths])),
        width=float(np.mean([worth.width for worth in worths])),
    )


def _percent(log: float) -> str:
    return f"{100 * expm1(float(log)):.1f} %"


def _signed(log: float) -> str:
    return f"{100 * expm1(float(log)):+.1f} %"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
