"""Which runs, or which profile, tell most of which layout is fastest: the regret expected now, and once they are there.

Log step times are jointly normal about the predictions: x = mean + loads w with w standard normal, the sources of error
that layouts share and what is each layout's own; a run shows one of them, beside the noise between one run and another,
which repeats would average out and no choice depends on. Whoever has seen it takes the layout of the least posterior
mean. Seen from before, that mean is normal too, about the present one, and its covariance is what the measurement takes
off that of x; so no measurement is ever expected to do harm (the knowledge gradient: Frazier, Powell and Dayanik,
INFORMS Journal on Computing 21, 2009, for correlated beliefs). One run tells of its layout and of its site at once, and
not which of both: what tells two layouts apart is often a run of each, so that pairs are weighed too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from scipy.linalg import cholesky, solve_triangular

from perfmodel.calibration import LEAST_SHARE, NAMED_SD
from perfmodel.planning.layouts._robust import TINY, standard_normal
from perfmodel.prediction import (
    CLASSES,
    KERNEL_FACTORS,
    Belief,
    Prediction,
    StepProblem,
    class_of,
    log_covariance,
    shared_errors,
)

TOLD: Final = tuple(name for name in CLASSES if name != "other")
"""Classes of events whose seconds a profile shows; the rest follows from them and the step."""
KINDS: Final = ("run", "profile", "two runs")
"""Of measurements; of those that save alike, the first comes first: it takes no profiler, and a machine once."""
_ALIKE: Final = 0.01
"""Share of the present regret within which savings are alike."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What one measurement shows: slopes w + noise."""

    kind: str
    """One of `KINDS`."""
    places: tuple[int, ...]
    """Of the layouts that are run."""
    slopes: Float[np.ndarray, "observations sources"]
    noise: Float[np.ndarray, " observations"]
    """Standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one measurement is worth for the choice."""

    kind: str
    """One of `KINDS`."""
    places: tuple[int, ...]
    """Of the layouts that are run, among those that are chosen from."""
    regret: float
    """Expected log of the step time chosen after it over the least: how much longer steps take than they need."""
    moves: float
    """Probability that another layout is chosen after it than now."""
    instead: int | None
    """Which one most likely; None for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Telling:
    """Measurements that could be made before one of some layouts is chosen."""

    layouts: tuple[Prediction, ...]
    regret: float
    """Expected if the layout of the least predicted step is chosen now, as `Worth.regret`."""
    best: Float[np.ndarray, " layouts"]
    """Probability of each layout to be the fastest."""
    worth: tuple[Worth, ...]
    """The one that saves most per run first; of those that save alike by `KINDS`, then the better layout."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; regrets in seconds per step."""
        step_s = min((p.step_time_s for p in self.layouts), default=0.0)
        rows = [
            {
                "measure": one.kind,
                "ranks": [place + 1 for place in one.places],
                "layouts": [str(self.layouts[place].layout) for place in one.places],
                "regret_now_s": self.regret * step_s,
                "regret_after_s": one.regret * step_s,
                "saved_s": (self.regret - one.regret) * step_s,
                "choice_moves": one.moves,
                "mostly_to_rank": None if one.instead is None else one.instead + 1,
                "mostly_to": None if one.instead is None else str(self.layouts[one.instead].layout),
            }
            for one in self.worth
        ]
        ranked = [
            {"layout": str(p.layout), "step_time_s": p.step_time_s, "probability_best": best}
            for p, best in zip(self.layouts, self.best.tolist(), strict=True)
        ]
        return {"regret_now_s": self.regret * step_s, "measurements": rows, "layouts": ranked}


def telling(problem: StepProblem, predictions: Sequence[Prediction]) -> Telling:
    """What a run of each of some layouts, a run beside one of the first, and a profile would tell of which is fastest.

    Args:
        problem: that the predictions are of. With parameters fitted to runs already, further runs alone are weighed:
            `fit_profile` starts from the tables again.
        predictions: that are chosen from, as a search ranks them.
    """
    mean = np.log([p.step_time_s for p in predictions])
    names, shared, own = shared_errors(predictions)
    rest = log_covariance(problem, predictions) - shared @ shared.T - np.diag(own**2)
    loads = np.hstack([shared, _root(rest)])
    first, places = int(mean.argmin()), range(len(mean))
    seen = [Evidence("run", (i,), loads[[i]], own[[i]]) for i in places]
    pairs = [Evidence("two runs", (first, i), loads[[first, i]], own[[first, i]]) for i in places if i != first]
    if problem.adjustment is None or problem.adjustment.offsets is None:
        belief = problem.site.belief(problem.framework, problem.cluster.device)
        seen += [_profile(run, names, belief) for run in seen]
    return weighed(mean, loads, [*seen, *pairs], tuple(predictions))


def _profile(run: Evidence, names: Sequence[str], belief: Belief) -> Evidence:
    """Of the layout of a run: the seconds of each class of its events, and the step that they are part of."""
    slopes, place = run.slopes[0], {name: i for i, name in enumerate(names)}
    site = [place[f"site: {name}"] for name in CLASSES]
    share = dict(zip(CLASSES, np.linalg.solve(belief.root.T, slopes[site]).tolist(), strict=True))
    tier = max("intra_node", "inter_node", key=share.__getitem__)
    rows, noise = [run.slopes], [run.noise]
    for i, name in enumerate(CLASSES):
        if name not in TOLD or share[name] < LEAST_SHARE:
            continue
        row = np.zeros(len(slopes))
        row[site] = share[name] * belief.root[i]
        for source, at in place.items():
            kind, _, family = source.partition(": ")
            if kind == "events" and name == (class_of(family) if family in KERNEL_FACTORS else tier):
                row[at] = slopes[at]
        rows.append(row[None])
        noise.append(np.array([NAMED_SD * share[name]]))
    return Evidence("profile", run.places, np.vstack(rows), np.concatenate(noise))


def weighed(
    mean: Float[np.ndarray, " layouts"],
    loads: Float[np.ndarray, "layouts sources"],
    seen: Sequence[Evidence],
    layouts: tuple[Prediction, ...] = (),
) -> Telling:
    """What each of some measurements is worth for the choice between layouts of log step times mean + loads w."""
    truth_least, best = least(mean, _root(loads @ loads.T))
    now, first = float(mean.min()), int(mean.argmin())
    found = []
    for one in seen:
        expected, chosen = least(mean, informed(loads, one))
        moves = 1.0 - float(chosen[first])
        chosen[first] = 0.0
        instead = int(chosen.argmax()) if moves > 0 else None
        regret = max(min(expected, now) - truth_least, 0.0)
        found.append(Worth(kind=one.kind, places=one.places, regret=regret, moves=moves, instead=instead))
    regret = max(now - truth_least, 0.0)
    alike = max(_ALIKE * regret, TINY)
    found.sort(
        key=lambda one: (-round((regret - one.regret) / len(one.places) / alike), KINDS.index(one.kind), one.places)
    )
    return Telling(layouts=layouts, regret=regret, best=best, worth=tuple(found))


def informed(loads: Float[np.ndarray, "layouts sources"], seen: Evidence) -> Float[np.ndarray, "layouts observations"]:
    """Root of the covariance that the layouts' posterior means will have about the present ones."""
    covariance = seen.slopes @ seen.slopes.T + np.diag(seen.noise**2 + TINY)
    return solve_triangular(cholesky(covariance, lower=True), seen.slopes @ loads.T, lower=True).T


def least(
    mean: Float[np.ndarray, " layouts"], root: Float[np.ndarray, "layouts sources"]
) -> tuple[float, Float[np.ndarray, " layouts"]]:
    """Expectation of the least of mean + root w with w standard normal, and how likely each is it.

    The draws are mirrored, so that what all layouts share cancels, and the least is never expected above that of
    `mean`.
    """
    drawn = standard_normal(root.shape[1]) @ root.T
    drawn = mean + np.concatenate([drawn, -drawn])
    return float(drawn.min(axis=1).mean()), np.bincount(drawn.argmin(axis=1), minlength=len(mean)) / len(drawn)


def _root(covariance: Float[np.ndarray, "layouts layouts"]) -> Float[np.ndarray, "layouts rank"]:
    """Square root, of as few columns as it has."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0.0)))[:, values > TINY]
