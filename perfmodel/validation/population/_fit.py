"""Fits the hierarchical model of sites to published runs; `perfmodel.prediction` uses it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from perfmodel.display import Report
from perfmodel.prediction.sites import CLASSES, DEGREES, GENERIC, UNKNOWNS, Seen, key
from perfmodel.prediction.sites.constants import keys_share_a_team, reports_a_problem
from perfmodel.prediction.sites.known_runs import half_width, scales
from perfmodel.validation.population._coverage import (
    TEAM,
    LeftOutRuns,
    conformal_scale,
    covered_half_widths,
    fit_coverage,
)
from perfmodel.validation.population._few_runs import (
    Covariances,
    Draw,
    Draws,
    FewRuns,
    draws,
    few_runs,
    mean_error,
)
from perfmodel.validation.population._folds import Folds, folds_of
from perfmodel.validation.population._score import (
    LEVELS,
    SHARED,
    Score,
    SiteRuns,
    State,
    factors,
    own_parts,
    unpack,
)

_ROUNDS: Final = 2
"""Rounds of the fit. After each, scales of sources and weights of runs follow: a third one hardly
moves the score."""
_ITERATIONS: Final = 10
"""Iterations of each round, after which variances change by less than a tenth of their spread over
left-out teams."""
_UNSEEN: Final = 1e-9
"""Weight of runs without information."""
NOISE_INFLATIONS: Final = (1.0, 2.0, 4.0, 8.0)
"""Values of `SitePrior.noise_inflation` that are tried."""


@dataclass(frozen=True, eq=False)
class PopulationFit:
    """The fitted model and its data."""

    parameters: dict[str, dict[str, Any]]
    """Values of `perfmodel.prediction.sites.SitePopulation` by the teams left out ("" for none).

    If teams are left out, variances, frameworks and architectures are estimated from the other
    teams alone, and only entries that the runs of the left-out teams need are stored."""
    score: Score
    state: State
    left_out: Float[np.ndarray, " runs"]
    """Residual of every run when its teams are left out."""
    everywhere: Mapping[str, float]
    """Mean log factor of the median site in the whole record, by the teams left out."""
    few: Mapping[str, Mapping[int, FewRuns]]
    """Errors by source and by the number of its runs that are known."""
    coverage: LeftOutRuns
    """Every run with its teams left out, and with each whole group left out."""

    @property
    def hyperparameters(self) -> dict[str, Float[np.ndarray, " values"]]:
        """Hyperparameters by name, in the units of `SitePrior`."""
        return {name: np.asarray(values) for name, values in unpack(self.state.vector).items()}


def fit_population(runs: SiteRuns, progress: Report | None = None) -> PopulationFit:
    """Fit the model to all runs, and once without each team."""
    import jax

    with jax.enable_x64(True):
        score = Score(runs)
        compiled = jax.jit(jax.value_and_grad(score))
        if progress:
            progress("variances", 0, 1)
        # Reports of problems tell how far off a run can be, not how typical runs are.
        typical = np.array(
            [not reports_a_problem(source) for source in runs.labels["source"].tolist()]
        )
        typical |= not typical.any()

        # The model of all typical runs, and coverage with whole groups left out under it.
        state = _fitted(compiled, score, typical)
        parameters = {"": posterior(runs, score, state, typical, None)}
        left_out_runs = []
        for kind, folds in folds_of(runs.labels).items():
            left_out_runs.append(left_out_of(runs, score, state, kind, folds))
        everywhere: dict[str, float] = {}
        drawn: dict[float, dict[str, Draws]] = {
            noise_inflation: {} for noise_inflation in NOISE_INFLATIONS
        }
        for done, (team, left_out) in enumerate(
            zip(score.teams.names, score.teams.left_out, strict=True)
        ):
            if progress:
                progress("teams left out", done, len(score.teams.names))

            # Once more from nothing without each team. Starting from the common fit would leak the
            # team's own runs.
            chosen = ~left_out & typical
            site_pairs = _pairs_of_team(runs.labels, team)
            without = _fitted(compiled, score, chosen)
            parameters[team] = posterior(runs, score, without, chosen, site_pairs)
            everywhere[team] = float(np.mean(parameters[team]["of"][key("", "")]["mean"]))
            _draw(score, without, team, drawn)
            left_out_runs.append(left_out_of(runs, score, without, TEAM, score.teams, team))
        residual = np.asarray(score.left_out(state).residual)
    coverage = LeftOutRuns.joined(left_out_runs)
    few = _with_teams_left_out(score, coverage, drawn, parameters)
    return PopulationFit(parameters, score, state, residual, everywhere, few, coverage)


def _pairs_of_team(labels: Mapping[str, np.ndarray], team: str) -> set[tuple[str, str]]:
    """Pairs of framework (or none) and architecture that a team's runs have."""
    is_team = labels["group"] == team
    frameworks = labels["framework"][is_team].tolist()
    architectures = labels["architecture"][is_team].tolist()
    pairs = set(zip(frameworks, architectures, strict=True))
    return pairs | {("", architecture) for architecture in ("", *architectures)}


def _with_teams_left_out(
    score: Score,
    coverage: LeftOutRuns,
    drawn: Mapping[float, Mapping[str, Draws]],
    parameters: dict[str, dict[str, Any]],
) -> dict[str, dict[int, FewRuns]]:
    """Errors of every source's other runs once some are known.

    The scale that makes intervals cover 90 % is fitted to the runs of other teams and stored in
    every fit's parameters.
    """
    team_of = dict(
        zip(
            score.runs.labels["source"].tolist(),
            score.runs.labels["group"].tolist(),
            strict=True,
        )
    )
    few: dict[str, dict[int, FewRuns]] = {}
    for team, numbers in parameters.items():
        other_teams = [source for source in team_of if not keys_share_a_team(team_of[source], team)]
        known = coverage.take(np.isin(coverage.source, other_teams))

        # Widths of a team's runs are learned from the other teams too, so that the reported
        # coverage is out of sample.
        fitted = fit_coverage(known)
        noise_inflation, coverage_factor = _inflation_and_width(drawn, other_teams)
        numbers["common"] |= {
            "coverage": fitted.to_dict(),
            "doubt": noise_inflation,
            "held_given": coverage_factor,
        }
        for source in (name for name in team_of if team_of[name] == team):
            runs = coverage.take((coverage.source == source) & (coverage.left_out == TEAM))
            few[source] = few_runs(
                drawn[noise_inflation][source], covered_half_widths(fitted, runs), coverage_factor
            )
    return few


def left_out_of(
    runs: SiteRuns,
    score: Score,
    state: State,
    kind: str,
    folds: Folds,
    only: str | None = None,
) -> LeftOutRuns:
    """Predict each run of some folds without its fold.

    A run counts without the framework's facts that were looked up with its error in view
    (`SiteRuns.log_undone`), because with them it would be easier than runs of a framework that was
    never compared.
    """
    residual, shared, parts, noise = score.left_out(state, folds)
    first, second = np.asarray(unpack(state.vector)["scatter"]).tolist()
    nodes = scales((first, second))
    # Predictions add what a run leaves open after the width is fitted
    # (`perfmodel.validation.predict_run`).
    fixed = np.diag(np.asarray(shared)) + np.diag(np.asarray(parts.fixed)) - runs.open_deviation**2
    scattered = nodes.within[:, None] * np.diag(np.asarray(parts.within))
    single = nodes.single[:, None] * (np.diag(np.asarray(parts.repeats)) + float(noise))
    half = half_width(np.maximum(fixed + scattered + single, 0.0), nodes.weight)

    # Swap the run's own log error for that without facts found in view of it; what its site
    # predicts stays.
    error = np.asarray(residual) + runs.log_undone - runs.log
    counted = folds if only is None else folds.only(only)
    chosen = counted.predicted.any(axis=0)
    return LeftOutRuns(
        left_out=np.full(int(chosen.sum()), kind),
        source=runs.labels["source"][chosen],
        error=error[chosen],
        half_width=half[chosen],
        unknown=unknown_of(runs, counted)[chosen],
        open_deviation=runs.open_deviation[chosen],
        looked_at=runs.looked_at[chosen],
    )


def seen_in(labels: Mapping[str, np.ndarray], chosen: Bool[np.ndarray, " runs"]) -> Seen:
    """Frameworks, architectures, years and kinds of models in the chosen runs."""
    return Seen(
        frameworks=frozenset(labels["framework"][chosen].tolist()),
        architectures=frozenset(labels["architecture"][chosen].tolist()),
        years=frozenset(int(year) for year in labels["year"][chosen].tolist()),
        model_kinds=frozenset(labels["model_kind"][chosen].tolist()),
    )


def unknown_of(runs: SiteRuns, folds: Folds) -> Float[np.ndarray, "runs drivers"]:
    """Unknown factors (`UNKNOWNS`) of each run if its fold is left out; 0 for runs without a
    fold."""
    names = list(UNKNOWNS)
    labels = runs.labels
    unknown = np.zeros((len(runs.log), len(names)))
    for left_out, predicted in zip(folds.left_out, folds.predicted, strict=True):
        # Which facts count as unknown depends on the remaining runs: a framework whose only runs
        # are in the fold is unseen.
        seen = seen_in(labels, ~left_out)
        for run in np.flatnonzero(predicted):
            unknown_of_site = seen.unknown(
                str(labels["framework"][run]),
                str(labels["architecture"][run]),
                int(labels["year"][run]),
                str(labels["model_kind"][run]),
                generic=GENERIC,
            )
            degrees = dict(zip(DEGREES, runs.degrees[run].tolist(), strict=True))
            unknown_of_run = {
                "settings_unstated": degrees["unstated"],
                "extrapolated": degrees["extrapolated"],
                "contradictions": float(runs.contradictions[run]),
            }
            factors = {**unknown_of_site, **unknown_of_run}
            unknown[run] = [factors[name] for name in names]
    return unknown


def parameters_text(fit: PopulationFit) -> str:
    """The parameters as JSON, one posterior per line."""
    fits = []
    for teams, numbers in fit.parameters.items():
        sites = [
            f"  {json.dumps(name)}: {json.dumps(posterior)}"
            for name, posterior in numbers["of"].items()
        ]
        rows = ",\n".join(sites)
        common = json.dumps(numbers["common"])
        seen = json.dumps(numbers["seen"])
        fits.append(
            f' {json.dumps(teams)}: {{"common": {common}, "seen": {seen}, "of": {{\n{rows}}}}}'
        )
    return "{\n" + ",\n".join(fits) + "\n}\n"


def _inflation_and_width(
    drawn: Mapping[float, Mapping[str, Draws]], sources: Sequence[str]
) -> tuple[float, float]:
    """Return the noise inflation of `NOISE_INFLATIONS` with the least error, and the coverage
    factor with it.

    The error is the mean relative error of a source's other runs once some are known, plus what it
    is worse by than without known runs. Every source counts the same (`conformal_scale`).
    """

    def error(noise_inflation: float) -> float:
        source_errors = []
        for source in sources:
            draws_by_known = drawn[noise_inflation][source]
            errors = np.array(
                [mean_error(draws_of_k) for k, draws_of_k in draws_by_known.items() if k > 0]
            )
            if len(errors):
                source_errors.append(
                    (errors + np.maximum(errors - mean_error(draws_by_known[0]), 0.0)).mean()
                )
        return float(np.mean(source_errors)) if source_errors else 0.0

    # Errors over half-widths of all sources' draws, each source with weight 1.
    best = min(NOISE_INFLATIONS, key=error)
    off_by_interval = [np.zeros(0)]
    weight = [np.zeros(0)]
    for source in sources:
        known: list[Draw] = []
        for k, draws_of_k in drawn[best][source].items():
            if k > 0:
                known += draws_of_k
        if known:
            off = np.concatenate([np.abs(draw.residual) / draw.half for draw in known])
            off_by_interval.append(off)
            weight.append(np.full(len(off), 1 / len(off)))
    return best, conformal_scale(np.concatenate(off_by_interval), np.concatenate(weight))


def _draw(score: Score, without: State, team: str, drawn: dict[float, dict[str, Draws]]) -> None:
    """Add to `drawn` draws of known runs, for each unseen source of a team."""
    left_out = score.left_out(without)
    residuals = np.asarray(left_out.residual)
    fixed = np.asarray(left_out.shared) + np.asarray(left_out.own_parts.fixed)
    within = np.asarray(left_out.own_parts.within)
    repeats = np.asarray(left_out.own_parts.repeats)
    first, second = np.asarray(unpack(without.vector)["scatter"]).tolist()
    nodes = scales((first, second))
    for source, index, there in zip(
        score.sources.tolist(), score.members, score.there, strict=True
    ):
        if score.runs.labels["group"][index[0]] != team:
            continue
        for noise_inflation in NOISE_INFLATIONS:
            covariances = Covariances(
                fixed, within, repeats, float(left_out.noise), noise_inflation
            )
            drawn[noise_inflation][source] = draws(covariances, nodes, residuals, index[there])


def _fitted(compiled: Any, score: Score, chosen: Bool[np.ndarray, " runs"]) -> State:
    """The state fitted to the chosen runs alone."""
    counted = np.array([chosen[index[0]] for index in score.members], float)

    def unseen(state: State) -> State:
        return replace(state, weight=np.where(chosen, state.weight, _UNSEEN))

    # Alternate: hyperparameters for given scales and weights, then scales and weights for these
    # hyperparameters.
    state = unseen(score.start())
    for _ in range(_ROUNDS):
        value = partial(
            compiled,
            level_scale=state.level_scale,
            scale=state.scale,
            weight=state.weight,
            counted=counted,
        )

        def evaluate(
            vector: Float[np.ndarray, " hyperparameters"], value: Any = value
        ) -> tuple[float, np.ndarray]:
            negative_score, gradient = value(vector)
            return float(negative_score), np.asarray(gradient, float)

        solution = minimize(
            evaluate,
            state.vector,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _ITERATIONS},
        )
        state = unseen(score.scaled(replace(state, vector=solution.x)))
    return state


def posterior(
    runs: SiteRuns,
    score: Score,
    state: State,
    chosen: np.ndarray,
    site_pairs: set[tuple[str, str]] | None,
) -> dict[str, Any]:
    """Posterior factors of a site, for each framework and architecture, given the chosen runs.

    Pairs of framework and architecture are those of `site_pairs`, or all if there is none.
    """
    hyper = {name: np.asarray(values) for name, values in unpack(state.vector).items()}

    # Condition on the chosen runs only: K of the known runs, with own parts scaled and outliers
    # noisy.
    known = runs.take(np.flatnonzero(chosen))
    level_scale = state.level_scale[score.of_source][chosen]
    scale = state.scale[score.of_source][chosen]
    arrays = known.arrays()
    noise = hyper["noise"][0] ** 2 / state.weight[chosen]
    total = factors(hyper, arrays, SHARED) + own_parts(hyper, arrays).scaled(
        level_scale, scale, noise
    )
    solved = np.linalg.inv(total)
    names_by_level = {name: sorted({*known.labels[name].tolist()}) for name in SHARED[1:]}
    all_frameworks = (*names_by_level["framework"], "")
    all_architectures = (*names_by_level["architecture"], "")
    pairs = site_pairs or set(product(all_frameworks, all_architectures))

    # Prior covariance of a site's class factors, by level.
    prior = []
    for level in range(len(LEVELS)):
        class_deviations = hyper["spread"][level] * hyper["relative"]
        prior.append(hyper["constant"][level] ** 2 + np.diag(class_deviations**2))
    posteriors = {}
    for pair in sorted(pairs):
        framework, architecture = pair
        # A run shares the factors of a level with the pair if it has the same label there; all
        # share the first.
        shares_level = (
            np.ones(len(scale), bool),
            known.labels["framework"] == framework,
            known.labels["architecture"] == architecture,
        )
        covariances = []
        for level, same in enumerate(shares_level):
            covariances.append(prior[level] @ (known.shares * same[:, None]).T)

        # Gaussian conditioning: mean C K^-1 y and covariance P - C K^-1 C^T, with C the
        # covariance between the pair's factors and the runs.
        with_runs = np.sum(covariances, axis=0)
        covariance = np.sum(prior, axis=0) - with_runs @ solved @ with_runs.T
        posteriors[key(*pair)] = {
            "mean": np.round(with_runs @ solved @ known.log, 4).tolist(),
            "covariance": np.round(covariance[np.tril_indices(len(CLASSES))], 6).tolist(),
        }
    common: dict[str, Any] = {
        name: round(float(hyper[name][0]), 4) for name in ("events", "near", "length", "layout")
    }
    common |= {
        "noise": round(float(hyper["noise"][0]), 4),
        "degrees": np.round(hyper["degrees"], 4).tolist(),
    }
    common |= {"scatter": np.round(hyper["scatter"], 4).tolist()}
    return {
        "common": common,
        "seen": seen_in(runs.labels, chosen).to_dict(),
        "of": posteriors,
    }
