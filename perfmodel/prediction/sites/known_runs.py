"""Posterior of a site given some of its runs.

Logs of measured over predicted time of a site's runs are normal given its two scales (`Scales`).
Their covariance is that of the site's factors (`_population`) plus two terms by layout
(`LayoutKernel`), each multiplied by its scale: one that nearby layouts share, and one of each
layout alone. Repeats of one run share everything except the noise, so that ten repeats do not count
as ten runs. If the runs of a site scatter, large scales are likely, and each run says little about
the others. The less is known of a run, the wider its interval (`Coverage`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, sqrt
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import shorten_reprs
from perfmodel.normal import normal_cdf, normal_quantile
from perfmodel.spec import Layout

OUTLIERS: Final = 4.0
"""Degrees of freedom of the noise of one run: runs far from the others of their site lose weight.
Assumed."""
_MOST_ROUNDS: Final = 50
"""Most rounds of reweighting."""
_ENOUGH: Final = 1e-3
"""Change of the weights that ends the reweighting."""
_SETTLED: Final = 5
"""After this many rounds, nodes less likely than exp(-`_UNLIKELY`) times the likeliest are left
out."""
_UNLIKELY: Final = 20.0

# --- what layouts have in common
# ---------------------------------------------------------------------
#
# What like layouts of one site have in common that no factor explains is a Gaussian process over
# layouts. Without it the factors would have to explain errors of other origin, and runs that
# resemble one another would count as independent evidence (Kennedy and O'Hagan, J. R. Stat. Soc. B
# 63, 2001).

Coordinates = tuple[float, ...]


def coordinates(parameters: float, seq_len: int, layout: Layout) -> Coordinates:
    """Coordinates of a run among layouts: log2 of tp, pp, dp, cp, ep, micro-batch, sequence and
    parameters."""
    degrees = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.micro_batch)
    return tuple(np.log2([*degrees, seq_len, parameters]).tolist())


@dataclass(frozen=True)
class LayoutKernel:
    """Prior covariance of the log step times of a site's layouts."""

    amplitude: float
    """Standard deviation of the error that similar layouts share."""
    length_scale: float
    """Distance over which the correlation falls to 1/e."""
    nugget: float
    """Standard deviation of the error of a single layout, which its repeats share."""

    def shared(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance shared by layouts."""
        # It falls as exp(-distance / length): continuous, not smooth, as step times over layouts
        # are.
        return self.amplitude**2 * np.exp(-_distances(a, b) / self.length_scale)

    def alone(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance specific to a single layout (nugget)."""
        return self.nugget**2 * (_distances(a, b) == 0)


def _distances(
    a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
) -> Float[np.ndarray, "n m"]:
    """Euclidean distances of layouts."""
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))


# --- how much the runs of a site scatter
# -------------------------------------------------------------
#
# How much more or less one site's runs scatter than those of the typical site is unknown, so
# integrated over. A site scatters in two ways: in what similar layouts share (its settings and
# events), and in what is particular to each layout and run. Each has a scale, log-normal over sites
# (standard deviations `scatter`), the same for all runs of a site: a mixture of normals with heavy
# tails, which a site's own runs narrow. Integrals over the scales are sums over the nodes of Gauss
# and Hermite.

NODES: Final = (3, 5)
"""Quadrature nodes of the two scales. The second scale has more nodes, because further runs keep
narrowing it."""
_MOST_STEPS: Final = 100
"""Most steps of Newton's method; about ten are usual, more if some nodes are far narrower than
others."""


# Besides, a whole site may differ from the record by more than any of its factors allows: a cap on
# power, other clocks, a step time that includes work which the record leaves out. Where its runs
# agree with one another but not with the record, one factor on all of them explains it, which the
# spread of ordinary sites must not hold back. This class has a small probability and a large
# variance. The prior is thus again a mixture of normals: runs close to the record leave this class
# hardly any weight, runs that agree on being far off give it all (contaminated normal priors;
# Berger and Berliner, Ann. Stat. 14, 1986).


class OverallFactor(NamedTuple):
    """A class of sites with a common factor on all of their runs, and the spread of that factor."""

    chance: float
    """Probability of a site to be of this kind, before any of its runs."""
    sd: float
    """Standard deviation of the log of the factor."""


OVERALL_FACTORS: Final = (OverallFactor(0.95, 0.0), OverallFactor(0.05, 0.5))
"""Two classes of sites: those like the record's, and unusual ones, which take 0.44 to 2.3 times as
long in nine of ten cases. The chances are assumed: with them, 2 to 8 runs of a published source
predict its other runs as well as without this class (means over sources differ by at most 0.0002),
and three runs that agree on being 1.5 times off leave a probability of 2 % for a usual site. A
single run does not count, because it would make predictions of the other runs of published sources
worse."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Quadrature nodes over a site's two scales and its overall factor."""

    within: Float[np.ndarray, " nodes"]
    """Multiplies the variance that similar layouts, settings and events share."""
    single: Float[np.ndarray, " nodes"]
    """Multiplies the variance of single layouts and runs."""
    weight: Float[np.ndarray, " nodes"]
    """Probability of each node; all sum to 1."""
    overall: Float[np.ndarray, " nodes"] | float = 0.0
    """Variance of the log factor that all runs of the site have in common."""

    def with_overall_factor(self) -> "Scales":
        """Repeat every node with the variance of each entry of `OVERALL_FACTORS`."""
        kinds = len(OVERALL_FACTORS)
        nodes = len(self.weight)
        chance = np.repeat([kind.chance for kind in OVERALL_FACTORS], nodes)
        variance = np.repeat([kind.sd**2 for kind in OVERALL_FACTORS], nodes)
        return Scales(
            within=np.tile(self.within, kinds),
            single=np.tile(self.single, kinds),
            weight=chance * np.tile(self.weight, kinds),
            overall=variance,
        )

    def take(self, nodes: Bool[np.ndarray, " nodes"]) -> "Scales":
        """The selected nodes."""
        overall = np.broadcast_to(self.overall, self.weight.shape)
        return Scales(self.within[nodes], self.single[nodes], self.weight[nodes], overall[nodes])


class StandardNodes(NamedTuple):
    """Quadrature nodes over the logs of two scales, in standard deviations."""

    within: Float[np.ndarray, " nodes"]
    single: Float[np.ndarray, " nodes"]
    weight: Float[np.ndarray, " nodes"]
    """Weight of each pair of nodes; they sum to 1."""


@lru_cache
def standard_nodes() -> StandardNodes:
    """Gauss-Hermite nodes for all pairs of both scales."""
    within, within_weight = np.polynomial.hermite_e.hermegauss(NODES[0])
    single, single_weight = np.polynomial.hermite_e.hermegauss(NODES[1])
    weight = np.outer(within_weight, single_weight).ravel()
    return StandardNodes(
        np.repeat(within, NODES[1]), np.tile(single, NODES[0]), weight / weight.sum()
    )


def scales(scatter: tuple[float, float]) -> Scales:
    """Return quadrature nodes over the two scales of an unknown site.

    Args:
        scatter: standard deviations over sites of the logs of the two scales.
    """
    # One node is enough where all sites scatter alike.
    if not any(scatter):
        return Scales(np.ones(1), np.ones(1), np.ones(1))
    within, single, weight = standard_nodes()
    return Scales(np.exp(2 * scatter[0] * within), np.exp(2 * scatter[1] * single), weight)


def half_width(
    variance: Float[np.ndarray, "nodes *shape"],
    weight: Float[np.ndarray, " nodes"],
    coverage: float = 0.9,
) -> Float[np.ndarray, "*shape"]:
    """Half-width of the central interval that holds a share of a mixture of normals around 0.

    Args:
        variance: variances of the normals.
        weight: weights of the components, which sum to 1.
        coverage: the share.
    """
    variances = variance.reshape(len(weight), -1)
    per_sd = 1 / np.maximum(np.sqrt(variances), 1e-300)
    share = (1 + coverage) / 2

    # Newton's method never passes the answer from below, because the share that an interval holds
    # is concave in its half-width. From above its first step ends below. The normal of the same
    # variance is close by.
    start = float(normal_quantile(share)) * np.sqrt(weight @ variances)
    half = np.maximum(start + _newton_step(start, share, per_sd, weight), 0.0)
    for _ in range(_MOST_STEPS):
        step = np.maximum(_newton_step(half, share, per_sd, weight), 0.0)
        half = half + step
        rounding = 1e-14 * half
        if (step <= rounding).all():
            break
    return half.reshape(variance.shape[1:])


def _newton_step(
    half: Float[np.ndarray, " n"],
    share: float,
    per_sd: Float[np.ndarray, "nodes n"],
    weight: Float[np.ndarray, " nodes"],
) -> Float[np.ndarray, " n"]:
    """Newton's step from a half-width towards that below which a mixture of normals around 0 has
    this share."""
    # At 40 standard deviations everything is inside; larger deviates would overflow.
    deviates = np.minimum(half * per_sd, 40.0)
    density = weight @ (per_sd * np.exp(-0.5 * deviates**2)) / np.sqrt(2 * np.pi)
    return (share - weight @ normal_cdf(deviates)) / np.maximum(density, 1e-300)


# --- the update
# -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CovarianceTerms:
    """Covariances between runs, in the terms that a site's scales multiply."""

    fixed: Float[np.ndarray, "rows columns"]
    """Covariance from factors: of all sites, of frameworks, of devices and of the site."""
    within: Float[np.ndarray, "rows columns"]
    """Covariance from similar settings, events and layouts."""
    repeats: Float[np.ndarray, "rows columns"]
    """Variance that only repeats of one layout share."""
    overall: float = field(default=0.0, kw_only=True)
    """1 if rows and columns are step times of one site, which share its overall factor; else 0."""

    def take(self, rows: np.ndarray, columns: np.ndarray) -> "CovarianceTerms":
        """Covariances of some of the runs."""
        chosen = np.ix_(rows, columns)
        return CovarianceTerms(
            self.fixed[chosen], self.within[chosen], self.repeats[chosen], overall=self.overall
        )

    def under(self, scales: Scales) -> Float[np.ndarray, "nodes rows columns"]:
        """Covariance of the runs at every node."""
        within, single = scales.within[:, None, None], scales.single[:, None, None]
        overall = self.overall * np.broadcast_to(scales.overall, scales.weight.shape)[:, None, None]
        return self.fixed + overall + within * self.within + single * self.repeats


@dataclass(frozen=True, eq=False)
class KnownRuns:
    """Posterior of a site given some of its runs: a mixture of normals over the nodes of its
    scales."""

    scales: Scales
    """The nodes that are likely given the runs, and how likely."""
    inverse: Float[np.ndarray, "nodes known known"]
    """Precision matrix K^-1 of the measured runs, with more noise for outliers."""
    pull: Float[np.ndarray, "nodes known"]
    """alpha = K^-1 y: a covariance with the runs times alpha is the shift that they cause."""

    def shift(self, across: CovarianceTerms) -> Float[np.ndarray, "nodes others"]:
        """Expected log ratio of measured to predicted time for other runs, at every node.

        Args:
            across: covariance of the known runs with them.
        """
        return np.einsum("nko,nk->no", across.under(self.scales), self.pull)

    def covariance(
        self, prior: CovarianceTerms, across: CovarianceTerms
    ) -> Float[np.ndarray, "nodes others others"]:
        """Covariance of other runs, without the noise of one run.

        Args:
            prior: covariance of the others before any run.
            across: covariance of the known runs with them.
        """
        # Nodes expect little different shifts, beside their spreads: the differences count as
        # variance.
        shift = self.shift(across)
        with_runs = across.under(self.scales)
        deviation = shift - self.scales.weight @ shift
        between_nodes = np.einsum("n,ni,nj->ij", self.scales.weight, deviation, deviation)
        explained = with_runs.transpose(0, 2, 1) @ self.inverse @ with_runs
        return prior.under(self.scales) - explained + between_nodes


def widened(
    half: Float[np.ndarray, "*others"], coverage_factor: float, before: Float[np.ndarray, "*others"]
) -> Float[np.ndarray, "*others"]:
    """Multiply half-widths given runs by a coverage factor, but not beyond `before`."""
    return np.minimum(coverage_factor * half, np.maximum(half, before))


def known_runs(
    prior: CovarianceTerms,
    noise: Float[np.ndarray, " known"],
    error: Float[np.ndarray, " known"],
    scales: Scales,
) -> KnownRuns:
    """The posterior given runs.

    Args:
        prior: covariance of the runs, without their noise.
        noise: variance of their noise at the typical site, for runs that are not outliers.
        error: logs of measured over expected time.
        scales: nodes of the scales before the runs.
    """
    # The noise is Student's t: normal with a variance over a weight that is gamma distributed.
    # Starting from normal noise, a run that lies far off gets a smaller weight in every round
    # (Lange, Little and Taylor, JASA 84, 1989).
    weight = np.ones((len(scales.weight), len(error)))
    for done in range(_MOST_ROUNDS):
        noise_of_node = scales.single[:, None] * noise
        inverse = np.linalg.inv(
            prior.under(scales) + (noise_of_node / weight)[:, :, None] * np.eye(len(error))
        )
        pull = inverse @ error

        # A node is as likely as the runs are under it, times the prior of the weights.
        log_likelihood = (
            -0.5 * pull @ error + 0.5 * np.linalg.slogdet(inverse)[1] + np.log(scales.weight)
        )
        log_likelihood += OUTLIERS / 2 * (np.log(weight) - weight + 1).sum(axis=1)
        next_weight = (OUTLIERS + 1) / (OUTLIERS + pull**2 * noise_of_node / weight**2)
        if np.abs(next_weight - weight).max(initial=0.0) < _ENOUGH:
            break
        weight = next_weight

        # Unlikely nodes are dropped to save time, but not in the last round, whose posterior is of
        # all nodes that it began with.
        may_drop = _SETTLED <= done < _MOST_ROUNDS - 1
        is_likely = log_likelihood > log_likelihood.max() - _UNLIKELY
        if may_drop and not is_likely.all():
            scales = scales.take(is_likely)
            weight = weight[is_likely]
    likelihood = np.exp(log_likelihood - log_likelihood.max())
    return KnownRuns(replace(scales, weight=likelihood / likelihood.sum()), inverse, pull)


# --- how little is known of a run
# ----------------------------------------------------------------------
#
# Widens the interval of a run according to how little is known about it.
#
# `SitePopulation` says how far runs lie from their predictions where frameworks, devices and
# settings are like those of the published record. The less is known of a run, the larger its error.
# The reasons are independent, so their squares add. From the half-width that the population gives,
# in log time, the interval's is the root of
#
#     (exp(base) * half-width ** power) ** 2 + sum over drivers of added ** 2 * saturated(how much
# the run has of it),
#
# fitted to runs whose whole framework, device generation, year or kind of model was left out of
# everything (`perfmodel.validation`), and scaled so that intervals hold nine tenths of the runs of
# teams left out (split conformal prediction, Lei et al., JASA 113, 2018, with a scale that depends
# on the run: their section 5.2).


UNKNOWNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "framework_unnamed": "no framework is named (0 or 1)",
        "framework_unseen": "the record has no run of the named framework (0 or 1)",
        "device_unseen": "the record has no run on this generation of devices (0 or 1)",
        "year_unseen": "the record has no run of this year's software (0 or 1)",
        "model_unseen": "the record has no run of this kind of model (0 or 1)",
        "settings_unstated": "share of the run's settings that had to be assumed",
        "extrapolated": "share of the critical path that is timed beyond what was measured",
        "contradictions": "how far statements about the run contradict each other (0 to 1)",
    }
)
"""Drivers of an interval's width, with a description of each."""


NOTHING_UNKNOWN: Final[Mapping[str, float]] = MappingProxyType({})


HALF_SATURATED: Final = 0.25
"""Share of a driver at which it has about half of its full effect. Chosen with published runs in
view: their errors grow with the first fifth of the critical path that nobody measured, and hardly
beyond; 0.1 to 0.5 do as well."""


@dataclass(frozen=True)
class Coverage:
    """Model of the half-width that covers 90 % of runs, given what is known about them."""

    base: float = 0.0
    """Log of the factor on half-widths for a run with all facts known."""
    power: float = 1.0
    """Exponent of the half-width of the model of sites; below 1 if these half-widths vary more
    between runs than errors do."""
    added: Mapping[str, float] = field(default_factory=dict)
    """Half-width that each driver in `UNKNOWNS` adds in quadrature at its full value, so that less
    knowledge never narrows an interval."""

    def half_width(self, of_model: float, unknown: Mapping[str, float] = NOTHING_UNKNOWN) -> float:
        """Half-width of the interval of a log step time.

        Args:
            of_model: the half-width that the model of sites gives.
            unknown: amount of each driver in the run; drivers that are left out count 0.
        """
        known = exp(self.base) * of_model**self.power
        squares = [
            self.added.get(name, 0.0) ** 2 * saturated(value) for name, value in unknown.items()
        ]
        beyond = sum(squares)
        # Without any driver it is the first part to the last digit.
        return sqrt(known**2 + beyond) if beyond else known

    def scaled(self, log_factor: float) -> "Coverage":
        """Coverage whose half-widths are exp(`log_factor`) times these."""
        added = {name: exp(log_factor) * value for name, value in self.added.items()}
        return replace(self, base=self.base + log_factor, added=added)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `population.json`."""
        return {"base": self.base, "power": self.power, "added": dict(self.added)}


def saturated(share: Any) -> Any:
    """Effect of a driver's share on the square of a half-width, relative to its full effect: 0 for
    0, 1 for 1, and concave in between.

    Args:
        share: a number or an array.
    """
    return share * (1 + HALF_SATURATED) / (share + HALF_SATURATED)


shorten_reprs(__name__)
