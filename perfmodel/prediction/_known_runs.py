"""What some runs of a site say of its others: the one update of the model of sites.

Logs of measured over predicted time of a site's runs are normal given its two scales (`Scales`): their covariance is
that of the factors, and that of what layouts share and of what is a layout's own, each times its scale. Under every
node of the scales the noise of the runs that are known is Student's t, found by reweighting from the side on which runs
that lie far off are outliers (Lange, Little and Taylor, JASA 84, 1989); nodes count as likely as the runs are under
them. Repeats of one run share all but the noise, so that ten of them are not ten witnesses; a site whose runs scatter
is found to, so that its runs say little of one another.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._scatter import Scales

OUTLIERS: Final = 4.0
"""Degrees of freedom of the noise of one run: those that lie far from the others of their site lose weight. Assumed."""
_REWEIGHTED: Final = 50
_ENOUGH: Final = 1e-3
"""Change of the weights that ends the reweighting."""
_SETTLED: Final = 5
"""Rounds from which nodes are left out that are less likely than exp(-`_UNLIKELY`) of the likeliest."""
_UNLIKELY: Final = 20.0


@dataclass(frozen=True, eq=False)
class Parts:
    """Covariances of runs with runs, by what scales them."""

    fixed: Float[np.ndarray, "rows columns"]
    """By factors: of all sites, frameworks, devices and the site."""
    within: Float[np.ndarray, "rows columns"]
    """By settings, events and layouts near one another."""
    repeats: Float[np.ndarray, "rows columns"]
    """By what is a layout's own."""

    def take(self, rows: np.ndarray, columns: np.ndarray) -> "Parts":
        """Of some of the runs."""
        at = np.ix_(rows, columns)
        return Parts(self.fixed[at], self.within[at], self.repeats[at])

    def under(self, scales: Scales) -> Float[np.ndarray, "nodes rows columns"]:
        """Their sum at every node."""
        within, own = (of[:, None, None] for of in (scales.within, scales.own))
        return self.fixed + within * self.within + own * self.repeats


@dataclass(frozen=True, eq=False)
class KnownRuns:
    """What is believed of a site given some of its runs: a mixture of normals over the nodes of its scales."""

    scales: Scales
    """The nodes that are likely given the runs, and how likely."""
    inverse: Float[np.ndarray, "nodes known known"]
    """Precision of the runs as they are measured, those that lie far off with more noise."""
    pull: Float[np.ndarray, "nodes known"]
    """By what a covariance with the runs is multiplied to be a shift."""

    def shift(self, across: Parts) -> Float[np.ndarray, "nodes others"]:
        """By what others' logs of measured over expected time are expected to differ from 0, at every node.

        Args:
            across: of the known runs with them.
        """
        return np.einsum("nko,nk->no", across.under(self.scales), self.pull)

    def covariance(self, prior: Parts, across: Parts) -> Float[np.ndarray, "nodes others others"]:
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
    prior: Parts,
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
        if done >= _SETTLED and (kept := log > log.max() - _UNLIKELY).sum() < len(kept):
            scales, weight = Scales(scales.within[kept], scales.own[kept], scales.weight[kept]), weight[kept]
    likely = np.exp(log - log.max())
    return KnownRuns(Scales(scales.within, scales.own, likely / likely.sum()), inverse, pull)
