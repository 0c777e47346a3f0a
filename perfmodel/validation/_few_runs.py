"""What some runs of a site say of its others, under the model of sites."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction import Parts, Scales, half_width, known_runs, widened

FEW: Final = (0, 1, 2, 3, 5, 8)
"""Runs of a source that the card says the worth of."""
OTHERS: Final = -1
"""Stands for all runs of a source but the one predicted: what no update by fewer can be expected to reach."""
_DRAWS: Final = 20


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
class Covariances(Parts):
    """Of runs' residuals."""

    noise: float
    """Variance of one run's own."""
    doubt: float = 1.0
    """`Belief.doubt`."""


def given(
    of: Covariances,
    scales: Scales,
    residual: Float[np.ndarray, " runs"],
    known: Int[np.ndarray, " known"],
    others: Int[np.ndarray, " others"],
) -> tuple[Float[np.ndarray, " others"], Float[np.ndarray, " others"]]:
    """What is left of the residuals of some runs after others of their source (`known_runs`), and the half-widths of
    their 90 % intervals."""
    found = known_runs(of.take(known, known), np.full(len(known), of.doubt * of.noise), residual[known], scales)
    across, weight = of.take(known, others), found.scales.weight
    variance = np.diagonal(found.covariance(of.take(others, others), across), axis1=1, axis2=2)
    half = half_width(np.maximum(variance, 0.0) + found.scales.own[:, None] * of.noise, weight)
    return residual[others] - weight @ found.shift(across), half


@dataclass(frozen=True, eq=False)
class Draw:
    """A source's other runs once some are known."""

    left: Float[np.ndarray, " others"]
    """What is left of their residuals (`given`)."""
    half: Float[np.ndarray, " others"]
    """Half-widths of their 90 % intervals."""
    others: Int[np.ndarray, " others"]
    """Their places among the source's runs."""


Draws = dict[int, list[Draw]]
"""By the number of a source's runs that are known."""


def draws(
    of: Covariances, scales: Scales, residual: Float[np.ndarray, " runs"], index: Int[np.ndarray, " own"]
) -> Draws:
    """Of each of `FEW` that leaves runs to predict, the known ones drawn at random, each in turn where it is one, and
    of `OTHERS`."""
    rng, found, size = np.random.default_rng(0), {}, len(index)
    turns = [np.roll(np.arange(size), -at) for at in range(size)]

    def draw(order: Int[np.ndarray, " own"], k: int) -> Draw:
        left, half = given(of, scales, residual, index[order[:k]], index[order[k:]])
        return Draw(left, half, order[k:])

    for k in FEW:
        if size > k:
            drawn = {0: turns[:1], 1: turns}.get(k) or [rng.permutation(size) for _ in range(_DRAWS)]
            found[k] = [draw(order, k) for order in drawn]
    if size > 1:
        found[OTHERS] = [draw(order, size - 1) for order in turns]
    return found


def mean_error(draws: list[Draw]) -> float:
    """Mean relative error over draws."""
    return float(np.mean([np.abs(np.expm1(-draw.left)).mean() for draw in draws]))


def few_runs(drawn: Draws, before: Float[np.ndarray, " own"], held_given: float) -> dict[int, FewRuns]:
    """By the number of a source's runs that are known, how well its others are predicted, half-widths as predictions
    have them (`widened`).

    Args:
        drawn: draws of the known runs.
        before: half-widths of the intervals of the source's runs while none of them is known.
        held_given: as in `Belief`.
    """
    found = {}
    for k, each in drawn.items():
        inside_and_width = []
        for draw in each:
            unknown = before[draw.others]
            wide = widened(draw.half, held_given, unknown) if k else unknown
            inside_and_width.append(((np.abs(draw.left) <= wide).mean(), np.median(np.exp(2 * wide))))
        inside, width = np.mean(inside_and_width, axis=0).tolist()
        found[k] = FewRuns(error=mean_error(each), inside=inside, width=width)
    return found
