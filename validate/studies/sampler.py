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
    """Factors by class that all sites of a framework and architecture share, a row for each."""

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
    """Both posteriors under the same variances.

    Args:
        vector: logs of the hyperparameters (`START`).
    """
    import jax

    with jax.enable_x64(True):
        score = Score(runs)
        state = score.start(vector)
        for _ in range(_ROUNDS):
            state = score.scaled(state)
        pairs = sorted({*zip(*(runs.labels[name].tolist() for name in SHARED[1:]), strict=True)})
        drawn = [_factors(runs, score, one, pairs) for one in _sampled(runs, vector, seed)]
        fitted = _factors(runs, score, state, pairs)
    means, variances = (np.array([one[at] for one in drawn]) for at in (0, 1))
    sampled = means.mean(axis=0), np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    names = tuple(f"{a}|{b}" for a, b in pairs)
    return Compared(
        names, np.stack([fitted[0], sampled[0]]), np.stack([np.sqrt(fitted[1]), sampled[1]])
    )


def _factors(
    runs: SiteRuns, score: Score, state: State, pairs: Sequence[tuple[str, str]]
) -> tuple[Float[np.ndarray, "pairs classes"], Float[np.ndarray, "pairs classes"]]:
    """Means and variances of what is not a site's own of its factors, given how much sources
    scatter."""
    of = posterior(runs, score, state, np.ones(len(runs.log), bool), {*pairs})["of"]
    at = [i * (i + 3) // 2 for i in range(len(CLASSES))]
    told = [of[key(*pair)] for pair in pairs]
    hyper = {name: np.asarray(values) for name, values in unpack(state.vector).items()}
    of_site = sum(
        hyper["constant"][at] ** 2 + (hyper["spread"][at] * hyper["relative"]) ** 2
        for at in range(len(SHARED), len(LEVELS))
    )
    variance = np.array([np.array(one["covariance"])[at] for one in told]) - of_site
    return np.array([one["mean"] for one in told]), variance


def _sampled(runs: SiteRuns, vector: np.ndarray, seed: int) -> list[State]:
    """Draws of by how much sources scatter, and of how far runs lie off: given them, factors are
    normal."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import MCMC, NUTS

    hyper, arrays = (
        {name: np.asarray(values) for name, values in unpack(vector).items()},
        runs.arrays(),
    )
    of = np.unique(runs.labels["source"], return_inverse=True)[1]
    shared = jnp.asarray(factors(hyper, arrays, SHARED))
    parts, noise = own_parts(hyper, arrays), float(hyper["noise"][0]) ** 2
    level, scatter = jnp.asarray(parts.level), jnp.asarray(parts.scatter)

    def model() -> None:
        half, rate = DEGREES_OF_FREEDOM / 2, OUTLIERS / 2
        of_level = LEVEL_DEGREES_OF_FREEDOM / 2
        level_scale = numpyro.sample(
            "level_scale", dist.InverseGamma(of_level, of_level).expand([of.max() + 1]).to_event(1)
        )
        scale = numpyro.sample(
            "scale", dist.InverseGamma(half, half).expand([of.max() + 1]).to_event(1)
        )
        weight = numpyro.sample("weight", dist.Gamma(rate, rate).expand([len(of)]).to_event(1))
        covariance = (
            shared
            + level_scale[of][:, None] * level
            + scale[of][:, None] * (scatter + jnp.diag(noise / weight))
        )
        numpyro.sample("log", dist.MultivariateNormal(jnp.zeros(len(of)), covariance), obs=runs.log)

    mcmc = MCMC(NUTS(model), num_warmup=WARM, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(seed))
    drawn = {name: np.asarray(values) for name, values in mcmc.get_samples().items()}
    scales = drawn["level_scale"], drawn["scale"], drawn["weight"]
    return [State(vector, *one) for one in zip(*scales, strict=True)][::THIN]


def of_fit(fit: PopulationFit) -> str:
    """Section of the model card."""
    found = compared(subset(fit.score.runs, SOURCES), fit.state.vector)
    heads = ("framework", "architecture", *CLASSES)
    rows = [
        (
            *name.split("|"),
            *(f"{a:+.3f} ± {b:.3f} / {c:+.3f} ± {d:.3f}" for a, b, c, d in zip(*of, strict=True)),
        )
        for at, name in enumerate(found.names)
        for of in [(found.mean[0][at], found.sd[0][at], found.mean[1][at], found.sd[1][at])]
    ]
    return (
        "## Against a sampler\n\nLog factors that sites of a framework and architecture share, mean ± standard "
        f"deviation as fitted / as sampled by NUTS (numpyro, {DRAWS} draws), from at most {RUNS} runs each of "
        f"{'; '.join(SOURCES)}, under the same variances: the fit puts at one value by how much a source scatters and "
        "how far a run lies off, the sampler integrates over them. Means differ by at most "
        f"{found.furthest_mean:.2f} standard deviations, standard deviations by {100 * found.furthest_sd:.1f} %.\n\n"
        f"{_table(heads, rows)}\n"
    )
