"""The hierarchical model of sites fitted to published runs (`perfmodel.prediction` has what it says of a site)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from perfmodel.display import Report
from perfmodel.prediction import CLASSES, key, scales
from perfmodel.validation._few_runs import Covariances, Draws, FewRuns, draws, few_runs, mean_error, off_by
from perfmodel.validation._population_score import (
    LEVELS,
    SHARED,
    Score,
    SiteRuns,
    State,
    factors,
    own_parts,
    unpack,
)

INSIDE: Final = 0.9
"""Share of runs inside their intervals."""
_ROUNDS: Final = 2
"""After each, scales of sources and weights of runs follow: a third one hardly moves the score."""
_ITERATIONS: Final = 30
_UNSEEN: Final = 1e-9
"""Weight of runs that tell nothing."""
DOUBTS: Final = (1.0, 2.0, 4.0, 8.0)
"""`Belief.doubt` that are tried."""


@dataclass(frozen=True, eq=False)
class PopulationFit:
    """The model, and what it was fitted to."""

    parameters: dict[str, dict[str, Any]]
    """What `perfmodel.prediction.Population` is made of, by the group left out ("" for none). With a group left out the
    variances, and what is known of frameworks and architectures, are of the others alone; it holds only what the
    group's own runs need."""
    score: Score
    state: State
    left_out: Float[np.ndarray, " runs"]
    """Residual of every run when its group is left out."""
    everywhere: Mapping[str, float]
    """By group, the mean log factor of the median site of everywhere without it."""
    few: Mapping[str, Mapping[int, FewRuns]]
    """By source and number of its own runs that are known."""

    @property
    def hyperparameters(self) -> dict[str, Float[np.ndarray, " values"]]:
        """By name, in the units of `Belief`; of `constant` and `spread` by level."""
        return {name: np.asarray(values) for name, values in unpack(self.state.vector).items()}


def fit_population(runs: SiteRuns, progress: Report | None = None) -> PopulationFit:
    """Fit the model to runs, and to those of all groups of sources but one."""
    import jax

    with jax.enable_x64(True):
        score = Score(runs)
        compiled = jax.jit(jax.value_and_grad(score))
        if progress:
            progress("variances", 0, 1)
        everything = np.ones(len(runs.log), bool)
        state = _fitted(compiled, score, everything)
        found = {"": posterior(runs, score, state, everything, None)}
        everywhere: dict[str, float] = {}
        drawn: dict[float, dict[str, Draws]] = {doubt: {} for doubt in DOUBTS}
        off: dict[str, Float[np.ndarray, " own"]] = {}
        for done, group in enumerate(score.groups.tolist()):
            if progress:
                progress("groups left out", done, len(score.groups))
            kept = runs.words["group"] != group
            own = set(zip(*(runs.words[name][~kept].tolist() for name in SHARED[1:]), strict=True)) | {("", "")}
            own |= {("", architecture) for _, architecture in own}  # where no framework is named
            without = _fitted(compiled, score, kept)
            found[group] = posterior(runs, score, without, kept, own)
            everywhere[group] = float(np.mean(found[group]["of"][key("", "")]["mean"]))
            _draw(score, without, group, off, drawn)
        residual = np.asarray(score.left_out(state)[0])
    groups = {str(runs.words["source"][at]): str(group) for at, group in enumerate(runs.words["group"])}
    few: dict[str, dict[int, FewRuns]] = {}
    for group, told in found.items():
        others = [source for source in off if groups[source] != group]
        held, (doubt, given) = _held([off[source] for source in others]), _given(drawn, others)
        told["common"] |= {"held": held, "doubt": doubt, "held_given": given}
        few |= {source: few_runs(drawn[doubt][source], held, given) for source in off if groups[source] == group}
    return PopulationFit(found, score, state, residual, everywhere, few)


def parameters_text(fit: PopulationFit) -> str:
    """The parameters as JSON, a posterior per line."""
    groups = []
    for group, told in fit.parameters.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in told["of"].items())
        common = json.dumps(told["common"])
        groups.append(f' {json.dumps(group)}: {{"common": {common}, "of": {{\n{rows}}}}}')
    return "{\n" + ",\n".join(groups) + "\n}\n"


def _held(off: Sequence[Float[np.ndarray, " own"]]) -> float:
    """By what half-widths are multiplied so that intervals hold `INSIDE` of the runs of sources left out, of every
    source the same weight (split conformal prediction, Lei et al., JASA 113, 2018, section 2.2, with weights)."""
    every = np.concatenate([np.zeros(0), *off])
    if not len(every):
        return 1.0
    order = np.argsort(every)
    heavy = np.concatenate([np.full(len(of), 1 / len(of)) for of in off])[order]
    at = np.searchsorted(np.cumsum(heavy), INSIDE * heavy.sum())
    return round(float(every[order][min(int(at), len(every) - 1)]), 3)


def _given(drawn: Mapping[float, Mapping[str, Draws]], sources: Sequence[str]) -> tuple[float, float]:
    """Of `DOUBTS` the one with which some runs of sources tell most of their others: least mean relative error plus
    what it is worse by than without runs, where it is; and by what half-widths given runs are then multiplied
    (`_held`). Every source counts the same."""

    def error(doubt: float) -> float:
        of_source = []
        for told in (drawn[doubt][source] for source in sources):
            found = np.array([mean_error(some) for k, some in told.items() if k > 0])
            if len(found):
                of_source.append((found + np.maximum(found - mean_error(told[0]), 0.0)).mean())
        return float(np.mean(of_source)) if of_source else 0.0

    best = min(DOUBTS, key=error)
    known = [[each for k, some in drawn[best][source].items() if k > 0 for each in some] for source in sources]
    return best, _held([np.concatenate([np.abs(left) / half for left, half, _ in some]) for some in known if some])


def _draw(
    score: Score, without: State, group: str, off: dict[str, np.ndarray], drawn: dict[float, dict[str, Draws]]
) -> None:
    """For every source of a group that a state has not seen, what some of its runs say of the others into `drawn`, and
    how far its runs lie off in half-widths into `off`."""
    residual, shared, parts, noise = score.left_out(without)
    of_site, within, repeats = map(np.asarray, parts)
    first, second = np.asarray(unpack(without.vector)["scatter"]).tolist()
    nodes, left = scales((first, second)), np.asarray(residual)
    for source, index, there in zip(score.sources.tolist(), score.members, score.there, strict=True):
        if score.runs.words["group"][index[0]] != group:
            continue
        for doubt in DOUBTS:
            of = Covariances(np.asarray(shared) + of_site, within, repeats, float(noise), doubt)
            drawn[doubt][source] = draws(of, nodes, left, index[there])
        off[source] = off_by(of, nodes, left, index[there])


def _fitted(compiled: Any, score: Score, kept: Bool[np.ndarray, " runs"]) -> State:
    """The state that runs which are kept lead to from nothing known: the others are never seen."""
    counted = np.array([kept[index[0]] for index in score.members], float)

    def unseen(state: State) -> State:
        return replace(state, weight=np.where(kept, state.weight, _UNSEEN))

    state = unseen(score.start())
    for _ in range(_ROUNDS):
        value = partial(compiled, scale=state.scale, weight=state.weight, counted=counted)

        def evaluate(vector: Float[np.ndarray, " hyperparameters"], value: Any = value) -> tuple[float, np.ndarray]:
            of, gradient = value(vector)
            return float(of), np.asarray(gradient, float)

        found = minimize(evaluate, state.vector, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS})
        state = unseen(score.scaled(replace(state, vector=found.x)))
    return state


def posterior(
    runs: SiteRuns, score: Score, state: State, kept: np.ndarray, own: set[tuple[str, str]] | None
) -> dict[str, Any]:
    """Factors of a site of each framework and architecture given the runs that are kept (all pairs where `own` names
    none), with what is the site's own."""
    hyper = {name: np.asarray(values) for name, values in unpack(state.vector).items()}
    known, scale = runs.take(np.flatnonzero(kept)), state.scale[score.of_source][kept]
    arrays = known.arrays()
    mine = sum(own_parts(hyper, arrays)) * scale[:, None]
    total = factors(hyper, arrays, SHARED) + mine
    total += np.diag(hyper["noise"][0] ** 2 * scale / state.weight[kept])
    solved = np.linalg.inv(total)
    words = {name: sorted({*known.words[name].tolist()}) for name in SHARED[1:]}
    pairs = own or {(a, b) for a in (*words["framework"], "") for b in (*words["architecture"], "")}
    prior = [
        hyper["constant"][at] ** 2 + np.diag((hyper["spread"][at] * hyper["relative"]) ** 2)
        for at in range(len(LEVELS))
    ]
    of = {}
    for pair in sorted(pairs):
        told = {"framework": pair[0], "architecture": pair[1]}
        alike = [known.words[name] == told[name] if name in told else np.ones(len(scale), bool) for name in SHARED]
        with_runs = np.sum([prior[at] @ (known.shares * same[:, None]).T for at, same in enumerate(alike)], axis=0)
        covariance = np.sum(prior, axis=0) - with_runs @ solved @ with_runs.T
        of[key(*pair)] = {
            "mean": np.round(with_runs @ solved @ known.log, 4).tolist(),
            "covariance": np.round(covariance[np.tril_indices(len(CLASSES))], 6).tolist(),
        }
    common: dict[str, Any] = {name: round(float(hyper[name][0]), 4) for name in ("events", "near", "length", "layout")}
    common |= {"noise": round(float(hyper["noise"][0]), 4), "degrees": np.round(hyper["degrees"], 4).tolist()}
    common |= {"scatter": np.round(hyper["scatter"], 4).tolist()}
    return {"common": common, "of": of}
