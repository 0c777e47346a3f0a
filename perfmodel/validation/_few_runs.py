"""What some runs of a site say of its others, under the model of sites."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction import Parts, Scales, half_width, known_runs

FEW: Final = (0, 1, 2, 3, 5, 8)
"""Runs of a source that the card says the worth of."""
_DRAWS: Final = 10


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


def given(
    of: Covariances,
    scales: Scales,
    residual: Float[np.ndarray, " runs"],
    known: Int[np.ndarray, " known"],
    others: Int[np.ndarray, " others"],
) -> tuple[Float[np.ndarray, " others"], Float[np.ndarray, " others"]]:
    """What is left of the residuals of some runs after others of their source (`known_runs`), and the half-widths of
    their 90 % intervals."""
    noise = np.full(len(known), of.noise)
    found = known_runs(of.take(known, known), noise, residual[known], scales)
    across, weight = of.take(known, others), found.scales.weight
    variance = np.diagonal(found.covariance(of.take(others, others), across), axis1=1, axis2=2)
    half = half_width(np.maximum(variance, 0.0) + found.scales.own[:, None] * of.noise, weight)
    return residual[others] - weight @ found.shift(across), half


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
