"""The posterior of the model of sites, as `perfmodel fit --sites` has it, against a sampler: NUTS
(Hoffman and Gelman, JMLR 15, 2014) of numpyro, which integrates over what the fit puts at one
value: by how much every source scatters, and how far every run lies off."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.prediction.sites import CLASSES, key
from perfmodel.prediction.sites.known_runs import OUTLIERS
from perfmodel.validation.population import (
    DEGREES_OF_FREEDOM,
    LEVEL_DEGREES_OF_FREEDOM,
    LEVELS,
    SHARED,
    PopulationFit,
    Score,
    SiteRuns,
    State,
    factors,
    own_parts,
    posterior,
    unpack,
)
from perfmodel.validation.population._card import _table

SOURCES = (
    "Megatron-LM SC21 Table 1",
    "Zero Bubble Pipeline Parallelism paper",
    "VectorLM reference throughput",
    "SimuMax B200 release v1.2 (real runs)",
    "NeMo framework launcher README",
)
RUNS = 6
"""Of a source, at most."""
WARM, DRAWS, THIN = 300, 1000, 4
_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Compared:
    """Posteriors of factors by class that all sites of a framework and architecture share, a row
    for each."""

    names: tuple[str, ...]
    mean: Float[np.ndarray, "2 pairs classes"]
    """As fitted, as sampled."""
    sd: Float[np.ndarray, "2 pairs classes"]

    @property
    def furthest_mean(self) -> float:
        """Largest distance of the means, in sampled standard deviations."""
        return float((np.abs(self.mean[0] - self.mean[1]) / self.sd[1]).max())

    @property
    def furthest_sd(self) -> float:
        """Largest |log| of the ratio of the standard deviations."""
        return float(np.abs(np.log(self.sd[0] / self.sd[1])).max())


def subset(runs: SiteRuns, sources: Sequence[str], most: int = RUNS) -> SiteRuns:
    """The first runs of some sources."""
    places = [np.flatnonzero(runs.labels["source"] == source)[:most] for source in sources]
    return runs.take(np.concatenate(places))


def compared(runs: SiteRuns, vector: np.ndarray, seed: int = 0) -> Compared:
    """Compare both posteriors under the same variances.

    Args:
        vector: logs of the hyperparameters (`START`).
    """
    import jax

    with jax.enable_x64(True):
        score = Score(runs)
        state = score.start(vector)
        for _ in range(_ROUNDS):
            state = score.scaled(state)
        labels = [runs.labels[name].tolist() for name in SHARED[1:]]
        pairs = sorted({*zip(*labels, strict=True)})
        drawn = [_factors(runs, score, draw, pairs) for draw in _sampled(runs, vector, seed)]
        fitted_mean, fitted_variance = _factors(runs, score, state, pairs)

    # Law of total variance: within a draw, and between the means of draws.
    means = np.array([mean for mean, _ in drawn])
    variances = np.array([variance for _, variance in drawn])
    sampled_mean = means.mean(axis=0)
    sampled_sd = np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    return Compared(
        names=tuple(f"{framework}|{architecture}" for framework, architecture in pairs),
        mean=np.stack([fitted_mean, sampled_mean]),
        sd=np.stack([np.sqrt(fitted_variance), sampled_sd]),
    )


def _factors(
    runs: SiteRuns, score: Score, state: State, pairs: Sequence[tuple[str, str]]
) -> tuple[Float[np.ndarray, "pairs classes"], Float[np.ndarray, "pairs classes"]]:
    """Means and variances of the factors without the site's own part, given how much sources
    scatter."""
    every_run = np.ones(len(runs.log), bool)
    by_pair = posterior(runs, score, state, every_run, {*pairs})["of"]
    posteriors = [by_pair[key(*pair)] for pair in pairs]

    # Covariances are triangles row by row: entry i of the diagonal ends row i.
    diagonal = [i * (i + 3) // 2 for i in range(len(CLASSES))]
    hyper = {name: np.asarray(values) for name, values in unpack(state.vector).items()}
    variance_of_site = sum(
        hyper["constant"][level] ** 2 + (hyper["spread"][level] * hyper["relative"]) ** 2
        for level in range(len(SHARED), len(LEVELS))
    )
    variances = [np.array(of_pair["covariance"])[diagonal] for of_pair in posteriors]
    means = [of_pair["mean"] for of_pair in posteriors]
    return np.array(means), np.array(variances) - variance_of_site


def _sampled(runs: SiteRuns, vector: np.ndarray, seed: int) -> list[State]:
    """Draws of the sources' scatter and of the runs' deviations, given which factors are normal."""
    import jax
    import jax.numpy as jnp
    import numpyro  # pyright: ignore[reportMissingImports]
    from numpyro import distributions as dist  # pyright: ignore[reportMissingImports]
    from numpyro.infer import MCMC, NUTS  # pyright: ignore[reportMissingImports]

    hyper = {name: np.asarray(values) for name, values in unpack(vector).items()}
    arrays = runs.arrays()
    source = np.unique(runs.labels["source"], return_inverse=True)[1]
    shared = jnp.asarray(factors(hyper, arrays, SHARED))
    parts = own_parts(hyper, arrays)
    noise = float(hyper["noise"][0]) ** 2
    level = jnp.asarray(parts.level)
    scatter = jnp.asarray(parts.scatter)

    n_sources = source.max() + 1
    n_runs = len(source)

    def model() -> None:
        """Errors of runs, normal given their source's variances and their own weight."""
        # Scale mixtures: an inverse gamma of half the degrees of freedom makes the normal a
        # Student's t.
        half, rate = DEGREES_OF_FREEDOM / 2, OUTLIERS / 2
        level_half = LEVEL_DEGREES_OF_FREEDOM / 2
        level_prior = dist.InverseGamma(level_half, level_half).expand([n_sources]).to_event(1)
        level_scale = numpyro.sample("level_scale", level_prior)
        scale_prior = dist.InverseGamma(half, half).expand([n_sources]).to_event(1)
        scale = numpyro.sample("scale", scale_prior)
        weight = numpyro.sample("weight", dist.Gamma(rate, rate).expand([n_runs]).to_event(1))
        covariance = (
            shared
            + level_scale[source][:, None] * level
            + scale[source][:, None] * (scatter + jnp.diag(noise / weight))
        )
        numpyro.sample("log", dist.MultivariateNormal(jnp.zeros(n_runs), covariance), obs=runs.log)

    mcmc = MCMC(NUTS(model), num_warmup=WARM, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(seed))
    drawn = {name: np.asarray(values) for name, values in mcmc.get_samples().items()}
    scales = zip(drawn["level_scale"], drawn["scale"], drawn["weight"], strict=True)
    # Draws that follow each other are alike.
    return [State(vector, *draw) for draw in scales][::THIN]


def of_fit(fit: PopulationFit) -> str:
    """Section of the model card on the sampled posterior of a fit."""
    comparison = compared(subset(fit.score.runs, SOURCES), fit.state.vector)
    heads = ("framework", "architecture", *CLASSES)
    (fitted, sampled), (fitted_sd, sampled_sd) = comparison.mean, comparison.sd
    rows = []
    for i, name in enumerate(comparison.names):
        cells = []
        for k in range(len(CLASSES)):
            as_fitted = f"{fitted[i, k]:+.3f} ± {fitted_sd[i, k]:.3f}"
            cells.append(f"{as_fitted} / {sampled[i, k]:+.3f} ± {sampled_sd[i, k]:.3f}")
        rows.append((*name.split("|"), *cells))
    return (
        "## Against a sampler\n\nLog factors that sites of a framework and architecture share, mean ± standard "
        f"deviation as fitted / as sampled by NUTS (numpyro, {DRAWS} draws), from at most {RUNS} runs each of "
        f"{'; '.join(SOURCES)}, under the same variances: the fit puts at one value by how much a source scatters and "
        "how far a run lies off, the sampler integrates over them. Means differ by at most "
        f"{comparison.furthest_mean:.2f} standard deviations, standard deviations by "
        f"{100 * comparison.furthest_sd:.1f} %.\n\n"
        f"{_table(heads, rows)}\n"
    )
