"""The likelihood of each source's published runs under the hierarchical model of sites fitted
without its teams.

log(measured / predicted) of runs is a Gaussian process, a sum of these terms: a factor of each
class of events, weighted by its share of the step, on four levels (all sites, the framework, the
device, the site); an amount of the site per unit of `DEGREES` and per half-width of its events; a
term that similar layouts share; a term of the layout; and noise of the run. Beyond its factors a
site scatters by scales of its own (`Scales` of `perfmodel.prediction.sites.known_runs`), which are
integrated over: one that scatters much says little of itself by one run, and its intervals stay
wide.

The variances are those under which the runs of every source are likeliest when its teams are left
out: from the other sources alone, and given 1, 3 and 8 of its own runs. Every source counts the
same. The score measures predictions that users ask for, and unlike the marginal likelihood it is
not misled where the model is wrong about one source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction.sites import CLASSES, DEGREES
from perfmodel.prediction.sites.known_runs import OUTLIERS
from perfmodel.validation.population._folds import Folds, PaddedFolds, team_folds
from perfmodel.validation.population._scatter import LeftOut, OwnParts, scattered_errors

LEVELS: Final[tuple[str, ...]] = (
    "everywhere",
    "framework",
    "architecture",
    "source",
    "site",
)
SHARED: Final = LEVELS[:3]
"""Levels that are learned from other sources; the others are specific to a source, and to its
frameworks and devices."""
MOST: Final = 10
"""Most runs of a source that are fitted; every source has the same weight however many it has."""
GIVEN: Final = (1, 3, 8)
DRAWS: Final = 2
_GIVEN_WEIGHT: Final = 0.5
"""Weight of a score given runs, relative to that of a source left out whole."""
DEGREES_OF_FREEDOM: Final = 5.0
"""Degrees of freedom of the distribution of the scale of the scatter within a source. Assumed,
because the record has too few sources to fit it."""
LEVEL_DEGREES_OF_FREEDOM: Final = 1.0
"""Degrees of freedom of the distribution of the scale of what all runs of a source have in common.
Few sources lie far off as a whole, but these lie very far off. Among 1, 3 and a single scale for
both parts, 1 predicts left-out sources best."""
LEVEL_SCALES: Final = np.exp(np.linspace(np.log(0.25), np.log(64.0), 25))
"""Scales of a site's level that the fit tries."""
START: Final = {
    "constant": [0.05] * len(LEVELS),
    "spread": [0.05] * len(LEVELS),
    "relative": [1.0] * len(CLASSES),
    "degrees": [0.05] * len(DEGREES),
    "events": [0.5],
    "near": [0.05],
    "length": [2.0],
    "layout": [0.03],
    "noise": [0.03],
    "scatter": [0.3, 0.5],
}
"""Start values of standard deviations: of the factor that all classes share at a level and of the
factor of each class, relative to each other; then as in `SitePrior`."""
_LOOSE: Final = {"relative": 0.25, "events": 0.5, "length": 0.5}
"""Standard deviations of the priors of these logs around the start; 1 for the others. The priors
count as a third of a source."""
_PRIOR_WEIGHT: Final = 0.3
_SPLITS: Final = np.cumsum([len(values) for values in START.values()])[:-1]


@dataclass(frozen=True, eq=False)
class SiteRuns:
    """Runs as data of the model."""

    log: Float[np.ndarray, " runs"]
    """log(measured / predicted)."""
    log_undone: Float[np.ndarray, " runs"]
    """log(measured / predicted) without the facts of frameworks that were looked up with the run's
    error in view."""
    looked_at: Bool[np.ndarray, " runs"]
    """Whether facts were ever looked up with the errors of the run's source in view."""
    shares: Float[np.ndarray, "runs classes"]
    degrees: Float[np.ndarray, "runs degrees"]
    events: Float[np.ndarray, " runs"]
    """Standard deviation of the log step time from the events' own intervals."""
    at: Float[np.ndarray, "runs coordinates"]
    layout: Int[np.ndarray, " runs"]
    """Number of the layout; repeats of one run have the same."""
    open_deviation: Float[np.ndarray, " runs"]
    """Standard deviation of the log step time over the possible completions of the run
    (`RunPrediction`)."""
    contradictions: Float[np.ndarray, " runs"]
    """Degree of contradiction in each run's description (0 to 1)."""
    labels: Mapping[str, np.ndarray]
    """`framework`, `architecture`, `source`, `group` (its teams, joined by `+`), `year` and
    `model_kind` of every run.
    """

    @cached_property
    def levels(self) -> dict[str, Int[np.ndarray, " runs"]]:
        """Group index of each run by level; runs of a group share its factors."""
        labels = self.labels
        source, framework, architecture = (labels[name] for name in ("source", *SHARED[1:]))
        site = [" ".join(parts) for parts in zip(source, framework, architecture, strict=True)]
        names = {
            "framework": framework,
            "architecture": architecture,
            "source": source,
            "site": site,
        }
        numbers = {
            name: np.unique(values, return_inverse=True)[1] for name, values in names.items()
        }
        return {"everywhere": np.zeros(len(self.log), int)} | numbers

    def take(self, index: Int[np.ndarray, " some"]) -> "SiteRuns":
        """The runs at some positions."""
        labels = {name: values[index] for name, values in self.labels.items()}
        names = (field.name for field in fields(self) if field.name != "labels")
        return replace(self, **{name: getattr(self, name)[index] for name in names}, labels=labels)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays from which covariances are computed."""
        names = ("shares", "degrees", "events", "at", "layout", "open_deviation")
        named = {name: getattr(self, name) for name in names}
        return named | {"levels": self.levels}


def unpack(vector: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    return dict(zip(START, jnp.split(jnp.exp(vector), _SPLITS), strict=True))


def factors(hyper: Mapping[str, Any], runs: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Covariance of runs from the factors of some levels."""
    # Runs of one group of a level share its constant, and its class factors by the product of
    # their shares.
    total = 0.0
    for name in names:
        level = LEVELS.index(name)
        number_of_run = runs["levels"][name]
        scale = (hyper["spread"][level] * hyper["relative"]) ** 2
        level_covariance = (
            hyper["constant"][level] ** 2 + (runs["shares"] * scale) @ runs["shares"].T
        )
        total = total + (number_of_run[:, None] == number_of_run) * level_covariance
    return total


def own_parts(hyper: Mapping[str, Any], runs: Mapping[str, Any]) -> OwnParts:
    """Return the covariances that are specific to a source.

    Arrays are JAX's or NumPy's as `hyper` is; with NumPy's nothing is compiled for one number of
    runs.
    """
    xp = hyper["near"].__array_namespace__()
    source = runs["levels"]["source"]
    site = runs["levels"]["site"]
    same_source = source[:, None] == source
    same_site = site[:, None] == site

    # Layouts near one another err alike: an exponential kernel over doublings of degrees and
    # sizes. The tiny term keeps the square root differentiable at 0.
    distance = xp.sqrt(((runs["at"][:, None] - runs["at"]) ** 2).sum(axis=2) + 1e-12)
    near = hyper["near"] ** 2 * xp.exp(-distance / hyper["length"])

    # A site adds an unknown amount per unit of each degree (what is unstated, extrapolated) and per
    # half-width of its events. It is one amount for all runs there, each of which has its share.
    by_degree = (runs["degrees"] * hyper["degrees"] ** 2) @ runs["degrees"].T
    by_degree += hyper["events"] ** 2 * runs["events"][:, None] * runs["events"]
    same_layout = runs["layout"][:, None] == runs["layout"]
    left_open = xp.eye(len(source)) * runs["open_deviation"] ** 2
    return OwnParts(
        level=factors(hyper, runs, ("source", "site")),
        left_open=left_open,
        within=same_source * near + same_site * by_degree,
        repeats=same_source * (same_layout * hyper["layout"] ** 2),
    )


@dataclass(frozen=True, eq=False)
class State:
    """State of a fit: hyperparameters, scales of sources and weights of runs."""

    vector: Float[np.ndarray, " hyperparameters"]
    """Logarithms of the hyperparameters, in the order of `START`."""
    level_scale: Float[np.ndarray, " sources"]
    """Scale of the variance of each source's common factor."""
    scale: Float[np.ndarray, " sources"]
    """Scale of the variance of how the runs of each source scatter."""
    weight: Float[np.ndarray, " runs"]
    """Weight of each run's precision, low for outliers."""


class Score:
    """The likelihood of sources' runs when their teams are left out."""

    def __init__(self, runs: SiteRuns) -> None:
        self.runs = runs
        self.sources, of_source = np.unique(runs.labels["source"], return_inverse=True)
        self.of_source = of_source
        self.members, self.there = _padded(of_source, len(self.sources))
        self.teams = team_folds(runs.labels["group"].tolist())

        # Draw the known runs once: a score that changes from call to call could not be minimised.
        rng = np.random.default_rng(0)
        runs_of_source = self.there.sum(axis=1)
        self.known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for k in GIVEN:
            drawn = []
            for n_runs in runs_of_source:
                drawn.append([rng.permutation(max(n_runs, k))[:k] for _ in range(DRAWS)])
            # A source counts only where runs are left to predict.
            self.known[k] = np.array(drawn), runs_of_source > k

    def start(self, vector: Float[np.ndarray, " hyperparameters"] | None = None) -> State:
        """The initial state of a fit, with every source and run typical.

        Args:
            vector: logarithms of the hyperparameters; None for those of `START`.
        """
        if vector is None:
            vector = np.log(np.concatenate([*START.values()]))
        typical = np.ones(len(self.sources))
        return State(vector, typical, typical, np.ones(len(self.runs.log)))

    def left_out(self, state: State, folds: Folds | None = None) -> LeftOut:
        """Predict each run without its fold (by default that of its teams).

        All folds come from blocks of one inverse (Rasmussen and Williams 2006, section 5.4.2, for
        blocks).
        """
        batches = (folds or self.teams).by_size()
        return self._left_out(state.vector, state.level_scale, state.scale, state.weight, batches)

    @cached_property
    def _left_out(self) -> Callable[..., LeftOut]:
        """`left_out` with the arrays of a state as arguments, compiled."""
        import jax

        return jax.jit(self._by_fold)

    def _by_fold(
        self, vector: Any, level_scale: Any, scale: Any, weight: Any, batches: Sequence[PaddedFolds]
    ) -> LeftOut:
        """Predict every run without its fold from one inverse; see `left_out`."""
        import jax
        import jax.numpy as jnp

        # Covariance of all runs: factors that other sources share, and each source's own parts
        # times its scales. Outliers get more noise (`weight` below 1).
        hyper = unpack(vector)
        runs = jax.tree.map(jnp.asarray, self.runs.arrays())
        parts = own_parts(hyper, runs)
        noise = hyper["noise"][0] ** 2
        scales = jnp.asarray(level_scale)[self.of_source], jnp.asarray(scale)[self.of_source]
        scaled = parts.scaled(*scales, noise / jnp.asarray(weight))
        invert = _inverse()
        inverse = invert(factors(hyper, runs, SHARED) + scaled)
        solved = inverse @ self.runs.log

        def of_fold(after: Any, index: Any, there: Any) -> tuple[Any, Any]:
            # Leave-out predictions from one inverse K^-1 =: A. For a fold F, the residual is
            # A_FF^-1 (A y)_F, and A_FF^-1 is its covariance, from which the runs' own part is
            # taken off. Padding rows are the identity.
            both = there[:, None] & there
            block = (index[:, None], index)
            total = invert(jnp.where(both, inverse[block] + after, jnp.eye(len(index))))
            residual = total @ jnp.where(there, solved[index], 0.0)
            return residual, total - jnp.where(both, scaled[block], 0.0)

        # Scatter the folds back to runs; each run is predicted in one fold.
        flat = jnp.zeros(len(self.runs.log))
        together = jnp.zeros((len(flat), len(flat)))
        for batch in batches:
            members, there, predicted = (jnp.asarray(part) for part in batch)
            # One batch after another. XLA would run the LAPACK calls of several at once, each of
            # which keeps a thread and waits for others to take its matrices: a deadlock. XLA drops
            # an optimisation barrier, but not a sum.
            after_the_last = 0.0 * flat[0]
            residuals, shared = jax.vmap(of_fold, (None, 0, 0))(after_the_last, members, there)
            flat = flat.at[members].add(residuals * predicted)
            rows, columns = members[:, :, None], members[:, None]
            both = predicted[:, :, None] & predicted[:, None]
            together = together.at[rows, columns].add(jnp.where(both, shared, 0.0))
        return LeftOut(residual=flat, shared=together, own_parts=parts, noise=noise)

    def __call__(self, vector: Any, level_scale: Any, scale: Any, weight: Any, counted: Any) -> Any:
        """Negative log score of the weighted sources, plus a weak prior."""
        import jax
        import jax.numpy as jnp

        errors = scattered_errors(
            self.left_out(State(vector, level_scale, scale, weight)), unpack(vector)["scatter"]
        )
        members = jnp.asarray(self.members)
        there = jnp.asarray(self.there)

        # Score each source as a whole unseen site, and after 1, 3 and 8 of its runs.
        score = jax.vmap(errors.score_unseen)(members, there) @ counted
        for drawn, enough in self.known.values():
            score_given = jax.vmap(jax.vmap(errors.score_given, (None, None, None, 0)))
            score += (
                _GIVEN_WEIGHT * score_given(members, there, enough, drawn).mean(axis=1) @ counted
            )

        # A weak log-normal prior holds hyperparameters that few sources tell of near their start.
        first = np.log(np.concatenate([*START.values()]))
        deviations = [np.full(len(values), _LOOSE.get(name, 1.0)) for name, values in START.items()]
        loose = np.concatenate(deviations)
        return -score + _PRIOR_WEIGHT * 0.5 * (((vector - first) / loose) ** 2).sum()

    def scaled(self, state: State) -> State:
        """Estimate the scales of each source from its runs, and a robust weight for each run."""
        left_out = self.left_out(state)
        residual = np.asarray(left_out.residual)
        shared = np.asarray(left_out.shared)
        level = np.asarray(left_out.own_parts.level)
        scatter = np.asarray(left_out.own_parts.scatter) + np.diag(left_out.noise / state.weight)
        level_scale = state.level_scale.copy()
        scale = state.scale.copy()
        weight = np.ones(len(residual))
        for source, there in enumerate(self.there):
            index = self.members[source][there]
            block = np.ix_(index, index)
            error = residual[index]
            shared_block, level_block, scatter_block = shared[block], level[block], scatter[block]

            # The likeliest scale of the level given that of the scatter.
            level_scale[source] = _likeliest_scale(
                error, shared_block + scale[source] * scatter_block, level_block
            )

            # Student's t as a scale mixture of normals (EM): the scale of the scatter given its
            # runs, then the weight of each run given the others.
            around = shared_block + level_scale[source] * level_block
            squares = float(error @ np.linalg.solve(around + scatter_block, error))
            scale[source] = (DEGREES_OF_FREEDOM + squares) / (DEGREES_OF_FREEDOM + len(index))
            inverse = np.linalg.inv(around + scale[source] * scatter_block)
            weight[index] = (OUTLIERS + 1) / (OUTLIERS + (inverse @ error) ** 2 / np.diag(inverse))
        return State(state.vector, level_scale, scale, weight)


def _likeliest_scale(
    error: Float[np.ndarray, " runs"],
    covariance: Float[np.ndarray, "runs runs"],
    level: Float[np.ndarray, "runs runs"],
) -> float:
    """The scale of a source's level with the highest posterior density of its logarithm.

    The level is Student's t with `LEVEL_DEGREES_OF_FREEDOM`: its scale is inverse gamma. A source
    that lies far off as a whole then says little of the factors that it shares with others, however
    many runs it has.

    Args:
        error: errors of the source's runs without its teams.
        covariance: covariance of the runs without their level.
        level: covariance from the level at scale 1.
    """
    log_posterior = []
    for scale in LEVEL_SCALES:
        total = covariance + scale * level
        log_likelihood = -0.5 * (
            error @ np.linalg.solve(total, error) + np.linalg.slogdet(total)[1]
        )
        log_posterior.append(
            log_likelihood - LEVEL_DEGREES_OF_FREEDOM / 2 * (np.log(scale) + 1 / scale)
        )
    return float(LEVEL_SCALES[int(np.argmax(log_posterior))])


@lru_cache
def _inverse() -> Callable[[Any], Any]:
    """The inverse of a matrix, with the derivative dA^-1 = -A^-1 dA A^-1.

    JAX differentiates the solution of linear equations, which solves them again for every column;
    two products take a third of that.
    """
    import jax
    import jax.numpy as jnp

    inverse = jax.custom_jvp(jnp.linalg.inv)

    @inverse.defjvp
    def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        of_matrix = jnp.linalg.inv(primals[0])
        return of_matrix, -of_matrix @ tangents[0] @ of_matrix

    return inverse


def _padded(codes: Int[np.ndarray, " runs"], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the runs of every code, padded to one length, with a mask of valid entries."""
    members_of_code = [np.flatnonzero(codes == at) for at in range(count)]
    lengths = np.array([len(members) for members in members_of_code])
    index = np.zeros((count, max(lengths)), int)
    for row, members in zip(index, members_of_code, strict=True):
        row[: len(members)] = members
    return index, np.arange(index.shape[1]) < lengths[:, None]
