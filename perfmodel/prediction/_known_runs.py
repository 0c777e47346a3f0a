"""What some runs of a site say of its others: the one update of the model of sites.

Logs of measured over predicted time of a site's runs are normal given its two scales (`Scales`): their covariance is
that of the factors (`_population`), and that of what layouts share and of what is a layout's own (`LayoutKernel`), each
times its scale. Under every node of the scales the noise of the runs that are known is Student's t, found by
reweighting from the side on which runs that lie far off are outliers (Lange, Little and Taylor, JASA 84, 1989); nodes
count as likely as the runs are under them. Repeats of one run share all but the noise, so that ten of them are not ten
witnesses; a site whose runs scatter is found to, so that its runs say little of one another.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.spec import Layout

OUTLIERS: Final = 4.0
"""Degrees of freedom of the noise of one run: those that lie far from the others of their site lose weight. Assumed."""
_REWEIGHTED: Final = 50
_ENOUGH: Final = 1e-3
"""Change of the weights that ends the reweighting."""
_SETTLED: Final = 5
"""Rounds from which nodes are left out that are less likely than exp(-`_UNLIKELY`) of the likeliest."""
_UNLIKELY: Final = 20.0

# --- what layouts have in common ---------------------------------------------------------------------
#
# What like layouts of one site have in common that no factor explains is a Gaussian process over layouts. Without it
# the factors have to explain what is not theirs, and runs that resemble one another count as so many witnesses (Kennedy
# and O'Hagan, J. R. Stat. Soc. B 63, 2001).

Coordinates = tuple[float, ...]


def coordinates(parameters: float, seq_len: int, layout: Layout) -> Coordinates:
    """Where a run stands: doublings of tp, pp, dp, cp, ep, micro-batch, sequence and parameters."""
    degrees = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.micro_batch)
    return tuple(np.log2([*degrees, seq_len, parameters]).tolist())


@dataclass(frozen=True)
class LayoutKernel:
    """How layouts of one site are alike before any run, in log time."""

    near: float
    """Standard deviation of what layouts near one another share."""
    length: float
    """Distance after which its correlation has fallen to 1/e."""
    own: float
    """Standard deviation of what is one layout's own, the same in its repeats."""

    def shared(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance of what layouts share; with the distance it falls as exp(-distance / length): continuous, not
        smooth, as step times over layouts are."""
        return self.near**2 * np.exp(-_apart(a, b) / self.length)

    def alone(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance of what is a layout's own."""
        return self.own**2 * (_apart(a, b) == 0)


def _apart(a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]) -> Float[np.ndarray, "n m"]:
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))


# --- how much the runs of a site scatter -------------------------------------------------------------
#
# How much more or less one site's runs scatter than those of the typical site is unknown, so integrated over. A site
# scatters in two ways: by what its layouts share with those near them, its settings and its events, and by what is each
# layout's and each run's own. Each has a scale, log-normal over sites (standard deviations `scatter`), the same for all
# runs of a site: a mixture of normals with heavy tails, which a site's own runs narrow. Integrals over the scales are
# sums over the nodes of Gauss and Hermite.

NODES: Final = (3, 5)
"""Of the two scales. The second, of which runs tell more and more, is the wider."""
_MOST_STEPS: Final = 100
"""Of Newton's method; some ten are taken, more where some nodes are far narrower than others."""


#
# Besides, a whole site may differ from the record by more than any of its factors allows: a cap on power, other clocks,
# a step that is timed with what the record leaves out. Where its runs agree with one another but not with the record,
# one factor on all of them explains it, which the spread of ordinary sites must not hold back. It is there with a small
# chance, and then wide: a mixture of normals again, in which runs close to the record leave next to no weight to it,
# and runs far off that agree leave it all (contaminated normal priors; Berger and Berliner, Ann. Stat. 14, 1986).


class OverallFactor(NamedTuple):
    """A kind of sites by how far one factor on all of their runs may take them from the record."""

    chance: float
    """Of a site to be of this kind, before any of its runs."""
    sd: float
    """Standard deviation of the log of the factor."""


OVERALL_FACTORS: Final = (OverallFactor(0.95, 0.0), OverallFactor(0.05, 0.5))
"""Sites as the record has them, and others, which take 0.44 to 2.3 times as long in nine of ten. Assumed: a chance at
which 2 to 8 runs of a published source predict its others as well as without (means over sources differ by 0.0002 at
most), and three runs 1.5 times off that agree leave 2 % of it. One run alone agrees with none: it would make the others
of published sources worse."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Nodes of the two scales, and of the overall factor."""

    within: Float[np.ndarray, " nodes"]
    """By what the variance of what layouts share is multiplied, and that of settings and events."""
    own: Float[np.ndarray, " nodes"]
    """By what that of layouts and runs by themselves is."""
    weight: Float[np.ndarray, " nodes"]
    overall: Float[np.ndarray, " nodes"] | float = 0.0
    """Variance of a factor that moves all runs of the site alike."""

    def with_overall_factor(self) -> "Scales":
        """Every node for each of `OVERALL_FACTORS`."""
        kinds, nodes = len(OVERALL_FACTORS), len(self.weight)
        chance = np.repeat([kind.chance for kind in OVERALL_FACTORS], nodes)
        variance = np.repeat([kind.sd**2 for kind in OVERALL_FACTORS], nodes)
        return Scales(
            within=np.tile(self.within, kinds),
            own=np.tile(self.own, kinds),
            weight=chance * np.tile(self.weight, kinds),
            overall=variance,
        )

    def take(self, nodes: Bool[np.ndarray, " nodes"]) -> "Scales":
        """Some of the nodes."""
        overall = np.broadcast_to(self.overall, self.weight.shape)
        return Scales(self.within[nodes], self.own[nodes], self.weight[nodes], overall[nodes])


@lru_cache
def standard_nodes() -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Both logs of scales in standard deviations, and weights, of every pair of nodes."""
    (a, of_a), (b, of_b) = (np.polynomial.hermite_e.hermegauss(n) for n in NODES)
    weight = np.outer(of_a, of_b).ravel()
    return np.repeat(a, NODES[1]), np.tile(b, NODES[0]), weight / weight.sum()


def scales(scatter: tuple[float, float]) -> Scales:
    """Of a site of which nothing is known; one node where all scatter alike."""
    if not any(scatter):
        return Scales(np.ones(1), np.ones(1), np.ones(1))
    within, own, weight = standard_nodes()
    return Scales(np.exp(2 * scatter[0] * within), np.exp(2 * scatter[1] * own), weight)


def half_width(
    variance: Float[np.ndarray, "nodes *shape"], weight: Float[np.ndarray, " nodes"], inside: float = 0.9
) -> Float[np.ndarray, "*shape"]:
    """Of the central interval that holds a share of a mixture of normals around 0.

    By Newton's method from below, which never passes the answer: what an interval holds is concave in its half-width.
    """
    from scipy.special import ndtr

    per_sd = 1 / np.maximum(np.sqrt(variance), 1e-300).reshape(len(weight), -1)
    half, share = np.zeros(per_sd.shape[1]), (1 + inside) / 2
    for _ in range(_MOST_STEPS):
        deviates = np.minimum(half * per_sd, 40.0)  # where all is inside
        density = weight @ (per_sd * np.exp(-0.5 * deviates**2)) / np.sqrt(2 * np.pi)
        step = np.maximum(share - weight @ ndtr(deviates), 0.0) / np.maximum(density, 1e-300)
        half = half + step
        if (step <= 1e-14 * half).all():
            break
    return half.reshape(variance.shape[1:])


# --- the update -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CovarianceTerms:
    """Covariances of runs with runs, by what scales them."""

    fixed: Float[np.ndarray, "rows columns"]
    """By factors: of all sites, frameworks, devices and the site."""
    within: Float[np.ndarray, "rows columns"]
    """By settings, events and layouts near one another."""
    repeats: Float[np.ndarray, "rows columns"]
    """By what is a layout's own."""
    overall: float = field(default=0.0, kw_only=True)
    """1 where rows and columns are times of steps of one site, which its overall factor moves alike."""

    def take(self, rows: np.ndarray, columns: np.ndarray) -> "CovarianceTerms":
        """Of some of the runs."""
        at = np.ix_(rows, columns)
        return CovarianceTerms(self.fixed[at], self.within[at], self.repeats[at], overall=self.overall)

    def under(self, scales: Scales) -> Float[np.ndarray, "nodes rows columns"]:
        """Their sum at every node."""
        within, own = (of[:, None, None] for of in (scales.within, scales.own))
        overall = self.overall * np.broadcast_to(scales.overall, scales.weight.shape)[:, None, None]
        return self.fixed + overall + within * self.within + own * self.repeats


@dataclass(frozen=True, eq=False)
class KnownRuns:
    """What is believed of a site given some of its runs: a mixture of normals over the nodes of its scales."""

    scales: Scales
    """The nodes that are likely given the runs, and how likely."""
    inverse: Float[np.ndarray, "nodes known known"]
    """Precision of the runs as they are measured, those that lie far off with more noise."""
    pull: Float[np.ndarray, "nodes known"]
    """By what a covariance with the runs is multiplied to be a shift."""

    def shift(self, across: CovarianceTerms) -> Float[np.ndarray, "nodes others"]:
        """By what others' logs of measured over expected time are expected to differ from 0, at every node.

        Args:
            across: of the known runs with them.
        """
        return np.einsum("nko,nk->no", across.under(self.scales), self.pull)

    def covariance(self, prior: CovarianceTerms, across: CovarianceTerms) -> Float[np.ndarray, "nodes others others"]:
        """Of others, the noise of one run left out. What the nodes expect differs little beside their spreads: it
        counts as variance."""
        shift, with_runs = self.shift(across), across.under(self.scales)
        apart = shift - self.scales.weight @ shift
        between = np.einsum("n,ni,nj->ij", self.scales.weight, apart, apart)
        return prior.under(self.scales) - with_runs.transpose(0, 2, 1) @ self.inverse @ with_runs + between


def widened(
    half: Float[np.ndarray, "*others"], held: float, before: Float[np.ndarray, "*others"]
) -> Float[np.ndarray, "*others"]:
    """Half-widths given runs, multiplied by `held`, which of itself makes none wider than `before` any run."""
    return np.minimum(held * half, np.maximum(half, before))


def known_runs(
    prior: CovarianceTerms,
    noise: Float[np.ndarray, " known"],
    error: Float[np.ndarray, " known"],
    scales: Scales,
) -> KnownRuns:
    """The posterior given runs.

    Args:
        prior: of the runs, without their noise.
        noise: its variance at the typical site, for runs that are no outliers.
        error: logs of measured over expected time.
        scales: before the runs.
    """
    weight = np.ones((len(scales.weight), len(error)))
    for done in range(_REWEIGHTED):
        of_node = scales.own[:, None] * noise
        inverse = np.linalg.inv(prior.under(scales) + (of_node / weight)[:, :, None] * np.eye(len(error)))
        pull = inverse @ error
        # a weight is gamma of its degrees of freedom: its prior counts for the node
        log = -0.5 * pull @ error + 0.5 * np.linalg.slogdet(inverse)[1] + np.log(scales.weight)
        log += OUTLIERS / 2 * (np.log(weight) - weight + 1).sum(axis=1)
        moved = (OUTLIERS + 1) / (OUTLIERS + pull**2 * of_node / weight**2)
        if np.abs(moved - weight).max(initial=0.0) < _ENOUGH:
            break
        weight = moved
        # not in the last round, whose posterior is of all nodes that it began with
        may_drop = _SETTLED <= done < _REWEIGHTED - 1
        if may_drop and (kept := log > log.max() - _UNLIKELY).sum() < len(kept):
            scales, weight = scales.take(kept), weight[kept]
    likely = np.exp(log - log.max())
    return KnownRuns(replace(scales, weight=likely / likely.sum()), inverse, pull)
