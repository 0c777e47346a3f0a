"""The hierarchical model of sites fitted to published runs (`perfmodel.prediction` has what it says of a site).

log(measured / predicted) of runs is a Gaussian process: factors of classes of events, weighted by their shares of the
step, that all sites have in common, that a framework's and a device's have, and that are a site's own; what a site adds
per unit of `DEGREES` and per half-width of its events; what layouts near one another share; what a layout, and a run,
has of its own. A site's own part is scaled by a factor of that site whose inverse is chi-squared, which makes sites
Student t processes (Shah, Wilson and Ghahramani, AISTATS 2014): one that scatters much widens the others little, and a
site with runs learns its scale from them.

The variances are those under which the runs of every source are likeliest when its group is left out: from the other
sources alone, and given 1, 3 and 8 of its own runs. Every source counts the same. The score is of what users ask, and
is not misled where the model is wrong of one source, as the marginal likelihood is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize

from perfmodel.prediction import CLASSES, DEGREES, key
from perfmodel.validation._student_process import DEGREES_OF_FREEDOM, OUTLIERS, given, log_t

LEVELS: Final[tuple[str, ...]] = ("everywhere", "framework", "architecture", "source", "site")
SHARED: Final = LEVELS[:3]
"""What other sources tell of; the rest is a source's own, and of its frameworks and devices."""
MOST: Final = 20
"""Runs of a source that the score is of."""
GIVEN: Final = (1, 3, 8)
DRAWS: Final = 2
FEW: Final = (0, 1, 2, 3, 5, 8)
"""Runs of a source that the card says the worth of."""
_FEW_DRAWS: Final = 10
_GIVEN_WEIGHT: Final = 0.5
"""Of a score given runs, relative to that of a source left out whole."""
_START: Final = {
    "constant": [0.05] * len(LEVELS), "spread": [0.05] * len(LEVELS), "relative": [1.0] * len(CLASSES),
    "degrees": [0.05] * len(DEGREES), "events": [0.5], "near": [0.05], "length": [2.0], "layout": [0.03],
    "noise": [0.03],
}  # fmt: skip
"""Standard deviations: of factors that a level gives to every class alike, and to each by itself, relative to one
another; then as in `Belief`."""
_LOOSE: Final = {"relative": 0.5, "events": 0.5, "length": 0.5}
"""Standard deviations of the logs of these around the start; 1 of the others. They count as a third of a source."""
_PRIOR_WEIGHT: Final = 0.3
_SPLITS: Final = np.cumsum([len(values) for values in _START.values()])[:-1]
_ROUNDS: Final = 2
_ITERATIONS: Final = 30
_UNSEEN: Final = 1e-9
"""Weight of runs that tell nothing."""
_AGAIN: Final = 3
"""Iterations by which variances are moved where a group is left out."""


@dataclass(frozen=True, eq=False)
class SiteRuns:
    """Runs as the model sees them."""

    log: Float[np.ndarray, " runs"]
    """log(measured / predicted)."""
    shares: Float[np.ndarray, "runs classes"]
    degrees: Float[np.ndarray, "runs degrees"]
    events: Float[np.ndarray, " runs"]
    """Standard deviation of the log step time from the events' own intervals."""
    at: Float[np.ndarray, "runs coordinates"]
    layout: Int[np.ndarray, " runs"]
    """The same number for repeats of one run."""
    words: Mapping[str, np.ndarray]
    """`framework`, `architecture`, `source` and `group` of every run."""

    @cached_property
    def levels(self) -> dict[str, Int[np.ndarray, " runs"]]:
        """By level, numbers that runs with the same factors share."""
        said = self.words
        site = [" ".join(parts) for parts in zip(*(said[n] for n in ("source", *SHARED[1:])), strict=True)]
        names = {name: said[name] for name in ("framework", "architecture", "source")}
        found = {name: np.unique(values, return_inverse=True)[1] for name, values in (names | {"site": site}).items()}
        return {"everywhere": np.zeros(len(self.log), int)} | found

    def take(self, index: Int[np.ndarray, " some"]) -> "SiteRuns":
        """Some of the runs."""
        words = {name: values[index] for name, values in self.words.items()}
        arrays = {name: getattr(self, name)[index] for name in ("log", "shares", "degrees", "events", "at", "layout")}
        return replace(self, **arrays, words=words)

    def arrays(self) -> dict[str, Any]:
        """What covariances are computed from."""
        named = {name: getattr(self, name) for name in ("shares", "degrees", "events", "at", "layout")}
        return named | {"levels": self.levels}


def _unpack(vector: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    return dict(zip(_START, jnp.split(jnp.exp(vector), _SPLITS), strict=True))


def _factors(hyper: Mapping[str, Any], runs: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Covariance of runs by the factors of some levels."""
    total = 0.0
    for name in names:
        at, own = LEVELS.index(name), runs["levels"][name]
        scale = (hyper["spread"][at] * hyper["relative"]) ** 2
        of_level = hyper["constant"][at] ** 2 + (runs["shares"] * scale) @ runs["shares"].T
        total = total + (own[:, None] == own) * of_level
    return total


def _own(hyper: Mapping[str, Any], runs: Mapping[str, Any]) -> Any:
    """Covariance of runs by what is their source's own, noise left out."""
    import jax.numpy as jnp

    source, site = (runs["levels"][name] for name in ("source", "site"))
    apart = jnp.sqrt(((runs["at"][:, None] - runs["at"]) ** 2).sum(axis=2) + 1e-12)
    near = hyper["near"] ** 2 * jnp.exp(-apart / hyper["length"])
    of_site = (runs["degrees"] * hyper["degrees"] ** 2) @ runs["degrees"].T
    of_site += hyper["events"] ** 2 * runs["events"][:, None] * runs["events"]
    same_source = source[:, None] == source
    repeats = (runs["layout"][:, None] == runs["layout"]) * hyper["layout"] ** 2
    found = same_source * (near + repeats) + (site[:, None] == site) * of_site
    return found + _factors(hyper, runs, ("source", "site"))


@dataclass(frozen=True, eq=False)
class State:
    """Where a fit stands."""

    vector: Float[np.ndarray, " hyperparameters"]
    """Logs of `_START`'s."""
    scale: Float[np.ndarray, " sources"]
    """Of the variance of each source's own part."""
    weight: Float[np.ndarray, " runs"]
    """Of each run's precision, low for outliers."""


class Score:
    """How likely the runs of sources are when their groups are left out."""

    def __init__(self, runs: SiteRuns) -> None:
        self.runs = runs
        self.sources, of_source = np.unique(runs.words["source"], return_inverse=True)
        self.groups, of_group = np.unique(runs.words["group"], return_inverse=True)
        self.of_source, self.of_group = of_source, of_group
        self.members, self.there = _padded(of_source, len(self.sources))
        self.group_members, self.group_there = _padded(of_group, len(self.groups))
        rng, self.given = np.random.default_rng(0), {}
        for k in GIVEN:
            drawn = [[rng.permutation(max(n, k))[:k] for _ in range(DRAWS)] for n in self.there.sum(axis=1)]
            self.given[k] = np.array(drawn), self.there.sum(axis=1) > k

    def start(self) -> State:
        """Nothing known."""
        vector = np.log(np.concatenate([*_START.values()]))
        return State(vector, np.ones(len(self.sources)), np.ones(len(self.runs.log)))

    def left_out(self, state: State) -> tuple[Any, Any, Any, Any]:
        """Every run's residual when its group is left out, and by group the covariance of that by what is shared; the
        covariance of all by what is their own; the variance of noise. Blocks of one inverse (Rasmussen and Williams
        2006, section 5.4.2, for blocks)."""
        import jax
        import jax.numpy as jnp

        hyper, runs = _unpack(state.vector), jax.tree.map(jnp.asarray, self.runs.arrays())
        own, noise = _own(hyper, runs), hyper["noise"][0] ** 2
        scale = jnp.asarray(state.scale)[self.of_source]
        scaled = own * scale[:, None] + jnp.diag(noise / jnp.asarray(state.weight) * scale)
        inverse = jnp.linalg.inv(_factors(hyper, runs, SHARED) + scaled)
        solved = inverse @ self.runs.log

        def of_group(index: Any, there: Any) -> tuple[Any, Any]:
            both = there[:, None] & there
            total = jnp.linalg.inv(jnp.where(both, inverse[index][:, index], jnp.eye(len(index))))
            residual = total @ jnp.where(there, solved[index], 0.0)
            return residual, total - jnp.where(both, scaled[index][:, index], 0.0)

        residuals, shared = jax.vmap(of_group)(self.group_members, self.group_there)
        flat = jnp.zeros(len(self.runs.log)).at[self.group_members.ravel()].add((residuals * self.group_there).ravel())
        together = jnp.zeros((len(flat), len(flat)))
        for at, there in enumerate(self.group_there):
            index = self.group_members[at][there]
            together = together.at[np.ix_(index, index)].set(shared[at][: len(index), : len(index)])
        return flat, together, own, noise

    def __call__(self, vector: Any, scale: Any, weight: Any, counted: Any) -> Any:
        """Negative log score of the sources that count, with the weak prior of the hyperparameters."""
        import jax
        import jax.numpy as jnp

        residual, shared, own, noise = self.left_out(State(vector, scale, weight))
        total = shared + own

        def whole(index: Any, there: Any) -> Any:
            log = log_t(residual[index], jnp.diag(total)[index] + noise, DEGREES_OF_FREEDOM)
            return jnp.where(there, log, 0.0).sum() / there.sum()

        def rest(index: Any, there: Any, enough: Any, drawn: Any) -> Any:
            of, error = total[index][:, index], residual[index]
            known = of[drawn][:, drawn] + noise * jnp.eye(len(drawn))
            gain = jnp.linalg.solve(known, of[drawn])
            degrees = DEGREES_OF_FREEDOM + len(drawn)
            wider = (DEGREES_OF_FREEDOM + error[drawn] @ jnp.linalg.solve(known, error[drawn])) / degrees
            variance = (jnp.diag(of) - (of[drawn] * gain).sum(axis=0) + noise) * wider
            others = there.at[drawn].set(False)
            log = jnp.where(others, log_t(error - error[drawn] @ gain, variance, degrees), 0.0)
            return jnp.where(enough, log.sum() / jnp.maximum(others.sum(), 1), 0.0)

        members, there = jnp.asarray(self.members), jnp.asarray(self.there)
        found = jax.vmap(whole)(members, there) @ counted
        for drawn, enough in self.given.values():
            each = jax.vmap(jax.vmap(rest, (None, None, None, 0)))(members, there, enough, drawn)
            found += _GIVEN_WEIGHT * each.mean(axis=1) @ counted
        first = np.log(np.concatenate([*_START.values()]))
        loose = np.concatenate([np.full(len(values), _LOOSE.get(name, 1.0)) for name, values in _START.items()])
        return -found + _PRIOR_WEIGHT * 0.5 * (((vector - first) / loose) ** 2).sum()

    def scaled(self, state: State) -> State:
        """Scales of sources given their runs, and weights of runs by how far each lies from the others."""
        residual, shared, own, noise = (np.asarray(part) for part in self.left_out(state))
        scale, weight = np.ones(len(self.sources)), np.ones(len(residual))
        for at, there in enumerate(self.there):
            index = self.members[at][there]
            here, error = np.ix_(index, index), residual[index]
            mine = own[here] + np.diag(noise / state.weight[index])
            squares = float(error @ np.linalg.solve(shared[here] + mine, error))
            scale[at] = (DEGREES_OF_FREEDOM + squares) / (DEGREES_OF_FREEDOM + len(index))
            inverse = np.linalg.inv(shared[here] + scale[at] * mine)
            weight[index] = (OUTLIERS + 1) / (OUTLIERS + (inverse @ error) ** 2 / np.diag(inverse))
        return State(state.vector, scale, weight)


def _padded(codes: Int[np.ndarray, " runs"], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs of every code in rows of one length, and which of them are there."""
    own = [np.flatnonzero(codes == at) for at in range(count)]
    index = np.zeros((count, max(map(len, own))), int)
    for row, members in zip(index, own, strict=True):
        row[: len(members)] = members
    return index, np.arange(index.shape[1]) < np.array([len(members) for members in own])[:, None]


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
    few: Mapping[str, Mapping[int, tuple[float, float]]]
    """By source and number of its own runs that are known, what `few_runs` says."""

    @property
    def hyperparameters(self) -> dict[str, Float[np.ndarray, " values"]]:
        """By name, in the units of `Belief`; of `constant` and `spread` by level."""
        return {name: np.asarray(values) for name, values in _unpack(self.state.vector).items()}


def fit_population(runs: SiteRuns, progress: Callable[[str, int, int], None] | None = None) -> PopulationFit:
    """Fit the model to runs, and to those of all groups of sources but one."""
    import jax

    with jax.enable_x64(True):
        score = Score(runs)
        compiled = jax.jit(jax.value_and_grad(score))
        state = score.start()
        for done in range(_ROUNDS):
            if progress:
                progress("variances", done, _ROUNDS)
            state = score.scaled(_improved(compiled, state, np.ones(len(score.sources)), _ITERATIONS))
        found = {"": posterior(runs, score, state, np.ones(len(runs.log), bool), None)}
        everywhere: dict[str, float] = {}
        few: dict[str, dict[int, tuple[float, float]]] = {}
        for done, group in enumerate(score.groups.tolist()):
            if progress:
                progress("groups left out", done, len(score.groups))
            kept = runs.words["group"] != group
            counted = np.array([kept[index[0]] for index in score.members], float)
            own = set(zip(*(runs.words[name][~kept].tolist() for name in SHARED[1:]), strict=True)) | {("", "")}
            own |= {("", architecture) for _, architecture in own}  # where no framework is named
            unseen = replace(state, weight=np.where(kept, state.weight, _UNSEEN))
            without = _improved(compiled, unseen, counted, _AGAIN)
            found[group] = posterior(runs, score, without, kept, own)
            everywhere[group] = float(np.mean(found[group]["of"][key("", "")]["mean"]))
            few |= few_runs(score, without, group)
        residual = np.asarray(score.left_out(state)[0])
    return PopulationFit(found, score, state, residual, everywhere, few)


def few_runs(score: Score, without: State, group: str) -> dict[str, dict[int, tuple[float, float]]]:
    """By source of a group that a state has not seen and the number of its runs that are given (`FEW`), the mean
    relative error of the other runs and the share of them inside their 90 % interval; means over random draws."""
    residual, shared, own, noise = (np.asarray(part) for part in score.left_out(without))
    total, rng, found = shared + own, np.random.default_rng(0), {}
    for at, source in enumerate(score.sources.tolist()):
        index = score.members[at][score.there[at]]
        if score.runs.words["group"][index[0]] != group:
            continue
        found[source] = {}
        for k in FEW:
            if len(index) <= k:
                continue
            told = [
                given(
                    total, residual, float(noise), index[(order := rng.permutation(len(index)))[:k]], index[order[k:]]
                )
                for _ in range(_FEW_DRAWS if k else 1)
            ]
            found[source][k] = (float(np.mean([one[0] for one in told])), float(np.mean([one[1] for one in told])))
    return found


def _improved(compiled: Any, state: State, counted: Float[np.ndarray, " sources"], iterations: int) -> State:
    value = partial(compiled, scale=state.scale, weight=state.weight, counted=counted)

    def evaluate(vector: Float[np.ndarray, " hyperparameters"]) -> tuple[float, np.ndarray]:
        of, gradient = value(vector)
        return float(of), np.asarray(gradient, float)

    found = minimize(evaluate, state.vector, jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return State(found.x, state.scale, state.weight)


def posterior(
    runs: SiteRuns, score: Score, state: State, kept: np.ndarray, own: set[tuple[str, str]] | None
) -> dict[str, Any]:
    """Factors of a site of each framework and architecture given the runs that are kept (all pairs where `own` names
    none), with what is the site's own."""
    hyper = {name: np.asarray(values) for name, values in _unpack(state.vector).items()}
    known, scale = runs.take(np.flatnonzero(kept)), state.scale[score.of_source][kept]
    arrays = known.arrays()
    mine = np.asarray(_own(hyper, arrays)) * scale[:, None]
    total = np.asarray(_factors(hyper, arrays, SHARED)) + mine
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
    return {"common": common | {"degrees_of_freedom": DEGREES_OF_FREEDOM}, "of": of}
