"""Errors for other runs of a site after some of its runs are known, under the model of sites."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction.sites.known_runs import (
    CovarianceTerms,
    Scales,
    half_width,
    known_runs,
    widened,
)

FEW: Final = (0, 1, 2, 3, 5, 8)
"""Numbers of runs of a source for which the card reports the gain."""
OTHERS: Final = -1
"""Stands for all runs of a source except the predicted one, which bounds the gain from fewer known
runs."""
_DRAWS: Final = 20


@dataclass(frozen=True, kw_only=True)
class FewRuns:
    """Errors for a source's other runs when some are known, as means over random draws."""

    error: float
    """Mean relative error."""
    inside: float
    """Share of them inside their 90 % interval."""
    width: float
    """Median of the interval's upper end over its lower."""


@dataclass(frozen=True, eq=False)
class Covariances(CovarianceTerms):
    """Covariances of runs' residuals."""

    noise: float
    """Variance that is independent for each run."""
    noise_inflation: float = 1.0
    """Factor on the variance, from `SitePrior.noise_inflation`."""


def others_given_known(
    covariances: Covariances,
    scales: Scales,
    residual: Float[np.ndarray, " runs"],
    known: Int[np.ndarray, " known"],
    unknown: Int[np.ndarray, " others"],
) -> tuple[Float[np.ndarray, " others"], Float[np.ndarray, " others"]]:
    """Condition unknown runs on the known ones of their source (`known_runs`).

    Returns:
        Residuals of the unknown runs less what the known ones explain, and half-widths of their 90
        % intervals.
    """
    # Their noise is inflated, as predictions inflate it, so that few known runs seldom make a site
    # worse.
    conditioned = known_runs(
        covariances.take(known, known),
        np.full(len(known), covariances.noise_inflation * covariances.noise),
        residual[known],
        scales,
    )

    # The known runs shift the mean of the others and narrow their covariance, separately for each
    # node of the scale mixture. `weight` says how likely each node is after them.
    across = covariances.take(known, unknown)
    weight = conditioned.scales.weight
    variance = np.diagonal(
        conditioned.covariance(covariances.take(unknown, unknown), across), axis1=1, axis2=2
    )
    half = half_width(
        np.maximum(variance, 0.0) + conditioned.scales.single[:, None] * covariances.noise,
        weight,
    )
    return residual[unknown] - weight @ conditioned.shift(across), half


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw of known runs, and the prediction of the others."""

    residual: Float[np.ndarray, " others"]
    """Residuals of the other runs after the update by the known runs (`others_given_known`)."""
    half: Float[np.ndarray, " others"]
    """Half-widths of their 90 % intervals."""
    unknown: Int[np.ndarray, " others"]
    """Indices of the other runs among the source's runs."""


Draws = dict[int, list[Draw]]
"""Draws by the number of a source's runs that are known."""


def draws(
    covariances: Covariances,
    scales: Scales,
    residual: Float[np.ndarray, " runs"],
    index: Int[np.ndarray, " own"],
) -> Draws:
    """Draw known runs for each possible number in `FEW`, and for `OTHERS`.

    A single known run is each in turn; several are drawn at random.
    """
    rng = np.random.default_rng(0)
    draws_by_known = {}
    size = len(index)

    # Rotations put each run in front once.
    turns = [np.roll(np.arange(size), -shift) for shift in range(size)]

    def draw(order: Int[np.ndarray, " own"], k: int) -> Draw:
        left_over, half = others_given_known(
            covariances, scales, residual, index[order[:k]], index[order[k:]]
        )
        return Draw(left_over, half, order[k:])

    for k in FEW:
        if size > k:
            drawn = {0: turns[:1], 1: turns}.get(k) or [
                rng.permutation(size) for _ in range(_DRAWS)
            ]
            draws_by_known[k] = [draw(order, k) for order in drawn]
    if size > 1:
        draws_by_known[OTHERS] = [draw(order, size - 1) for order in turns]
    return draws_by_known


def mean_error(draws: list[Draw]) -> float:
    """Mean relative error over draws."""
    return float(np.mean([np.abs(np.expm1(-draw.residual)).mean() for draw in draws]))


def few_runs(
    drawn: Draws, before: Float[np.ndarray, " own"], coverage_factor: float
) -> dict[int, FewRuns]:
    """Prediction errors for a source's other runs, by the number of known runs. Half-widths are as
    in predictions (`widened`).

    Args:
        drawn: draws of the known runs.
        before: half-widths of the intervals of the source's runs while none of them is known.
        coverage_factor: as in `SitePrior`.
    """
    figures = {}
    for k, draws_of_k in drawn.items():
        inside_and_width = []
        for draw in draws_of_k:
            # Known runs may not widen an interval beyond what it was without them.
            half_before = before[draw.unknown]
            half = widened(draw.half, coverage_factor, half_before) if k else half_before
            inside_share = (np.abs(draw.residual) <= half).mean()
            width = np.median(np.exp(2 * half))
            inside_and_width.append((inside_share, width))
        mean_inside, mean_width = np.mean(inside_and_width, axis=0).tolist()
        figures[k] = FewRuns(error=mean_error(draws_of_k), inside=mean_inside, width=mean_width)
    return figures
