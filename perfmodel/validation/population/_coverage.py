"""Fits `perfmodel.prediction.sites.Coverage`: the width of intervals for runs about which little is known.

Every run is predicted with its team left out, and again with its whole framework, device generation, year and kind of
model left out. Its error over the half-width that the model of sites gives then says how much wider the interval has
to be, and what that depends on. The scale of the errors is fitted as that of Student's t, which a few runs far off do
not rule; intervals are then scaled so that they hold nine tenths of the runs of teams left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from perfmodel.prediction import GAUSS_90
from perfmodel.prediction.sites import UNKNOWNS, Coverage

INSIDE: Final = 0.9
"""Share of runs inside their intervals."""
_DEGREES_OF_FREEDOM: Final = 4.0
"""Degrees of freedom of Student's t, as `perfmodel.prediction.sites.known_runs.OUTLIERS`."""
_PRIOR_SD: Final = 0.5
"""Standard deviation of the power around 1 and of each log factor around 0, which count as one source."""
_MOST_LOG: Final = 3.0
"""Largest log factor of a driver."""
_BISECTIONS: Final = 40
_WHOLE_GROUP_WEIGHT: Final = 0.25
"""Weight of the errors with a whole group left out, of four kinds, relative to those with a team left out."""
_LOOKED_AT_WEIGHT: Final = 0.5
"""Weight of sources whose errors were in view when facts were looked up: not all of these facts can be undone."""
TEAM: Final = "team"
"""Name of what was left out where it was no whole group."""


@dataclass(frozen=True, eq=False)
class LeftOutRuns:
    """Runs predicted by a model fitted without them."""

    left_out: np.ndarray
    """`TEAM`, or which of `WHOLE_GROUPS`, for every run."""
    source: np.ndarray
    error: Float[np.ndarray, " runs"]
    """log(measured / predicted)."""
    half_width: Float[np.ndarray, " runs"]
    """That the model of sites gives."""
    unknown: Float[np.ndarray, "runs drivers"]
    """How much of each of `UNKNOWNS` the run has, given what was left out."""
    open_deviation: Float[np.ndarray, " runs"]
    """Standard deviation of the log step time between all that the run may have been, which predictions add."""
    looked_at: Bool[np.ndarray, " runs"]
    """Whether facts were ever looked up with the errors of the run's source in view."""

    def take(self, chosen: Bool[np.ndarray, " runs"]) -> "LeftOutRuns":
        """The selected runs."""
        return LeftOutRuns(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence["LeftOutRuns"]) -> "LeftOutRuns":
        """Concatenate runs."""
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.concatenate([getattr(part, field.name) for part in parts])
        return cls(**columns)

    @property
    def weight(self) -> Float[np.ndarray, " runs"]:
        """Weights of runs: equal per source with its team left out; lower with whole groups left out, and for sources
        seen during development."""
        names = np.char.add(np.char.add(self.left_out.astype(str), " "), self.source.astype(str))
        _, place, count = np.unique(names, return_inverse=True, return_counts=True)

        # A source counts once in each kind of fold: divide by the number of its runs there.
        of_fold = np.where(self.left_out == TEAM, 1.0, _WHOLE_GROUP_WEIGHT)
        return of_fold * np.where(self.looked_at, _LOOKED_AT_WEIGHT, 1.0) / count[place]


def fit_coverage(runs: LeftOutRuns) -> Coverage:
    """Fit widths so that intervals cover 90 % of the runs of left-out teams, and are wide where errors are large."""
    if not len(runs.error):
        return Coverage()
    names = tuple(UNKNOWNS)

    # Log of the error's scale, linear in the log of the model's half-width and in the drivers of
    # uncertainty.
    log_half = np.log(np.maximum(runs.half_width, 1e-9) / GAUSS_90)
    features = np.column_stack([np.ones(len(log_half)), log_half, runs.unknown])

    # Prior: the width that the model gives (power 1), and no effect of any driver.
    centre = np.array([0.0, 1.0, *np.zeros(len(names))])
    precision = np.array([0.0, *np.full(1 + len(names), _PRIOR_SD**-2)])
    weight, freedom = runs.weight, _DEGREES_OF_FREEDOM

    def objective(
        x: Float[np.ndarray, " coefficients"],
    ) -> tuple[float, Float[np.ndarray, " coefficients"]]:
        """Negative log likelihood with its prior, and the gradient."""
        variance = np.exp(2 * (features @ x))
        total = variance + runs.open_deviation**2
        squared = runs.error**2 / total
        loss = 0.5 * np.log(total) + (freedom + 1) / 2 * np.log1p(squared / freedom)

        # Gradient of the Student loss by the log scale; only the part of the variance that is the
        # site's depends on it.
        slope = (1 - (freedom + 1) * squared / (freedom + squared)) * variance / total
        off = x - centre
        penalised = float(weight @ loss + 0.5 * precision @ off**2)
        return penalised, features.T @ (weight * slope) + precision * off

    # Drivers only widen intervals: something unknown never makes a prediction surer.
    bounds = [(-_MOST_LOG, _MOST_LOG), (0.0, 3.0), *[(0.0, _MOST_LOG)] * len(names)]
    x = minimize(objective, centre, jac=True, method="L-BFGS-B", bounds=bounds).x
    of_driver = {}
    for name, value in zip(names, x[2:], strict=True):
        if value >= 5e-4:
            of_driver[name] = round(float(value), 3)
    shape = Coverage(power=round(float(x[1]), 3), log_per_unit=of_driver)
    # Sources that nobody had looked at say what a stranger meets, the others only where there are none.
    strangers = (runs.left_out == TEAM) & ~runs.looked_at
    held_against = strangers if strangers.any() else runs.left_out == TEAM
    return replace(shape, base=_conformal_base(shape, runs.take(held_against)))


def _conformal_base(shape: Coverage, runs: LeftOutRuns) -> float:
    """The base with which intervals hold `INSIDE` of runs by weight, by bisection: wider ones hold more. The lowest
    that is tried where what runs leave open holds so many already."""
    narrow, wide = -_MOST_LOG, _MOST_LOG
    for _ in range(_BISECTIONS):
        middle = (narrow + wide) / 2
        half = covered_half_widths(replace(shape, base=middle), runs)
        inside = float(runs.weight @ (np.abs(runs.error) <= half))
        if inside >= INSIDE * runs.weight.sum():
            wide = middle
        else:
            narrow = middle
    # Rounded up, so that the stored figure still holds the share.
    return float(np.ceil(wide * 1000) / 1000)


def covered_half_widths(coverage: Coverage, runs: LeftOutRuns) -> Float[np.ndarray, " runs"]:
    """Half-widths of runs' intervals, given their unknown facts."""
    log_factor = coverage.base + runs.unknown @ [coverage.log_per_unit.get(name, 0.0) for name in UNKNOWNS]
    of_site = np.exp(log_factor) * runs.half_width**coverage.power
    return np.hypot(of_site, GAUSS_90 * runs.open_deviation)


def conformal_scale(over: Float[np.ndarray, " runs"], weight: Float[np.ndarray, " runs"]) -> float:
    """Factor on half-widths with which they hold `INSIDE` of runs by weight (split conformal prediction, Lei et al.,
    JASA 113, 2018, section 2.2, with weights).

    Args:
        over: how far every run lies off, in half-widths.
        weight: what every run counts.
    """
    if not len(over):
        return 1.0

    # The weighted quantile of the errors in half-widths.
    order = np.argsort(over)
    place = int(np.searchsorted(np.cumsum(weight[order]), INSIDE * weight.sum()))
    return round(float(over[order][min(place, len(over) - 1)]), 3)
