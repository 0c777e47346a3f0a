"""What some runs of a site say of its others, under the model of sites."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction import Scales, half_width

OUTLIERS: Final = 4.0
"""Degrees of freedom of the noise of one run: those that lie far from the others of their source lose weight."""
FEW: Final = (0, 1, 2, 3, 5, 8)
"""Runs of a source that the card says the worth of."""
_DRAWS: Final = 10
_REWEIGHTED: Final = 6


@dataclass(frozen=True, kw_only=True)
class FewRuns:
    """Of the other runs of a source when some are known; means over random draws."""

    error: float
    """Mean relative error."""
    inside: float
    """Share of them inside their 90 % interval."""
    width: float
    """Median of the interval's upper end over its lower."""


@dataclass(frozen=True, eq=False)
class Covariances:
    """Of runs' residuals, by part."""

    fixed: Float[np.ndarray, "runs runs"]
    """By factors: of all sites, frameworks, devices and the site."""
    within: Float[np.ndarray, "runs runs"]
    """By settings, events and layouts near one another."""
    repeats: Float[np.ndarray, "runs runs"]
    noise: float
    """Variance of one run's own."""


def given(
    of: Covariances,
    scales: Scales,
    residual: Float[np.ndarray, " runs"],
    known: Int[np.ndarray, " known"],
    others: Int[np.ndarray, " others"],
) -> tuple[Float[np.ndarray, " others"], Float[np.ndarray, " others"]]:
    """What is left of the residuals of some runs after others of their source, and the half-widths of their 90 %
    intervals.

    For every node of the scales the known runs' noise is Student's t (reweighted, from the side on which runs that lie
    far off are outliers); nodes count as likely as the known runs are under them.
    """

    def part(rows: np.ndarray, columns: np.ndarray) -> Float[np.ndarray, "nodes rows columns"]:
        at = np.ix_(rows, columns)
        within = scales.within[:, None, None] * of.within[at]
        return of.fixed[at] + within + scales.own[:, None, None] * of.repeats[at]

    noise = scales.own * of.noise
    variance = np.diagonal(part(others, others), axis1=1, axis2=2) + noise[:, None]
    if not len(known):
        return residual[others], half_width(variance, scales.weight)
    prior, across, error = part(known, known), part(known, others), residual[known]
    weight = np.ones((len(noise), len(known)))
    for _ in range(_REWEIGHTED):
        inverse = np.linalg.inv(prior + (noise[:, None] / weight)[:, :, None] * np.eye(len(known)))
        own = (inverse @ error) * noise[:, None] / weight
        weight = (OUTLIERS + 1) / (OUTLIERS + own**2 / noise[:, None])
    total = prior + (noise[:, None] / weight)[:, :, None] * np.eye(len(known))
    inverse = np.linalg.inv(total)
    # a weight is gamma of its degrees of freedom: its prior counts for the node
    log = -0.5 * (inverse @ error) @ error - 0.5 * np.linalg.slogdet(total)[1]
    log += OUTLIERS / 2 * (np.log(weight) - weight + 1).sum(axis=1) + np.log(scales.weight)
    likely = np.exp(log - log.max())
    likely /= likely.sum()
    shift = np.einsum("nko,nk->no", across, inverse @ error)
    variance = variance - np.einsum("nko,nkl,nlo->no", across, inverse, across)
    mean = likely @ shift
    # nodes' means differ little beside their spreads: their scatter counts as variance
    spread = np.maximum(variance, 0.0) + likely @ (shift - mean) ** 2
    return residual[others] - mean, half_width(spread, likely)


def widened(
    of: Covariances, scales: Scales, residual: Float[np.ndarray, " runs"], index: Int[np.ndarray, " own"]
) -> Float[np.ndarray, " own"]:
    """By what the half-width of every run's interval, none being known, would just hold it."""
    left, half = given(of, scales, residual, index[:0], index)
    return np.abs(left) / half


def few_runs(
    of: Covariances, scales: Scales, residual: Float[np.ndarray, " runs"], index: Int[np.ndarray, " own"]
) -> dict[int, FewRuns]:
    """By the number of a source's runs that are given (`FEW`), how well its others are predicted."""
    rng, found = np.random.default_rng(0), {}
    for k in FEW:
        if len(index) <= k:
            continue
        told = []
        for _ in range(_DRAWS if k else 1):
            order = rng.permutation(len(index))
            left, half = given(of, scales, residual, index[order[:k]], index[order[k:]])
            told.append((np.abs(np.expm1(-left)).mean(), (np.abs(left) <= half).mean(), np.median(np.exp(2 * half))))
        error, inside, width = np.mean(told, axis=0).tolist()
        found[k] = FewRuns(error=error, inside=inside, width=width)
    return found
