"""Fits `perfmodel.prediction.sites.Coverage`: the width of intervals of little-known runs.

Every run is predicted with its team left out, and again with its whole framework, device
generation, year and kind of model left out. Its error over the half-width that the model of sites
gives then says how much wider the interval has to be, and what that depends on. The fit minimises
the interval score itself, which is least where intervals are wide for runs with large errors and
narrow for the others. Intervals are then scaled so that they hold nine tenths of the runs of teams
left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize
from scipy.special import expit

from perfmodel.prediction import GAUSS_90
from perfmodel.prediction.sites import UNKNOWNS, Coverage, saturated

INSIDE: Final = 0.9
"""Share of runs inside their intervals."""
_SMOOTHED: Final = 0.02
"""Width, in log error, over which the interval score is smoothed, so that it has a gradient."""
_POWER: Final = 0.5
_POWER_SD: Final = 0.1
"""Mean and standard deviation of the power, which count as one source: half-widths between those
that the model of sites gives and one for all runs of which as much is known. Published runs alone
say that one would do; but what a user measures makes the model's own half-width narrower, which has
to count."""
_ADDED_SD: Final = 0.5
"""Standard deviation of the half-width of each driver around 0, as `_POWER_SD`."""
_START_ADDED: Final = 0.1
"""Half-width of a driver from which the fit starts: at 0 the score has no slope."""
_LEAST_ADDED: Final = 5e-3
"""Smallest half-width of a driver that is stored."""
_MOST_ADDED: Final = 3.0
"""Largest half-width of a driver."""
_MOST_LOG: Final = 3.0
"""Largest log of the factor on the model's half-width."""
_BISECTIONS: Final = 40
_WHOLE_GROUP_WEIGHT: Final = 0.25
"""Weight of the errors with a whole group left out, of four kinds, relative to those with a team
left out."""
_LOOKED_AT_WEIGHT: Final = 0.5
"""Weight of sources whose errors were in view when facts were looked up: not all of these facts can
be undone."""
TEAM: Final = "team"
"""Label of runs for which only their team was left out."""


@dataclass(frozen=True, eq=False)
class LeftOutRuns:
    """Runs predicted by a model fitted without them."""

    left_out: np.ndarray
    """Group that was left out for each run: `TEAM`, or one of `WHOLE_GROUPS`."""
    source: np.ndarray
    error: Float[np.ndarray, " runs"]
    """log(measured / predicted)."""
    half_width: Float[np.ndarray, " runs"]
    """Half-width that the model of sites gives."""
    unknown: Float[np.ndarray, "runs drivers"]
    """Amount of each of `UNKNOWNS` that the run has, after what was left out."""
    open_deviation: Float[np.ndarray, " runs"]
    """Standard deviation of the log step time over the possible completions of the run, which
    predictions include."""
    looked_at: Bool[np.ndarray, " runs"]
    """Whether facts were ever looked up with the errors of the run's source in view."""

    def take(self, chosen: Bool[np.ndarray, " runs"]) -> "LeftOutRuns":
        """The runs at some positions."""
        return LeftOutRuns(
            **{field.name: getattr(self, field.name)[chosen] for field in fields(self)}
        )

    @classmethod
    def joined(cls, parts: Sequence["LeftOutRuns"]) -> "LeftOutRuns":
        """Join several sets of runs into one."""
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.concatenate([getattr(part, field.name) for part in parts])
        return cls(**columns)

    @property
    def weight(self) -> Float[np.ndarray, " runs"]:
        """Weights of runs: equal per source with its team left out; lower with whole groups left
        out, and for sources seen during development."""
        names = np.char.add(np.char.add(self.left_out.astype(str), " "), self.source.astype(str))
        _, place, count = np.unique(names, return_inverse=True, return_counts=True)

        # A source counts once in each kind of fold: divide by the number of its runs there.
        fold_weight = np.where(self.left_out == TEAM, 1.0, _WHOLE_GROUP_WEIGHT)
        return fold_weight * np.where(self.looked_at, _LOOKED_AT_WEIGHT, 1.0) / count[place]


def fit_coverage(runs: LeftOutRuns) -> Coverage:
    """Fit widths so that intervals cover 90 % of the runs of left-out teams, and are wide where
    errors are large."""
    if not len(runs.error):
        return Coverage()
    names = tuple(UNKNOWNS)
    log_half = np.log(np.maximum(runs.half_width, 1e-9))
    drivers = saturated(runs.unknown)
    weight = runs.weight
    error = np.abs(runs.error)
    penalty = np.array([0.0, _POWER_SD**-2, *np.full(len(names), _ADDED_SD**-2)])
    centre = np.array([0.0, _POWER, *np.zeros(len(names))])

    def objective(
        x: Float[np.ndarray, " coefficients"],
    ) -> tuple[float, Float[np.ndarray, " coefficients"]]:
        """Interval score with prior, and its gradient; `x`: base, power, added half-widths."""
        known = np.exp(2 * (x[0] + x[1] * log_half))
        half = np.sqrt(known + drivers @ x[2:] ** 2 + (GAUSS_90 * runs.open_deviation) ** 2)

        # Width, and what the error lies outside times two over the share that may (Gneiting and
        # Raftery, JASA 102, 2007, equation 43), with its kink rounded off.
        outside = (error - half) / _SMOOTHED
        per_miss = 2 / (1 - INSIDE)
        score = 2 * half + per_miss * _SMOOTHED * np.logaddexp(0.0, outside)
        by_half = weight * (2 - per_miss * expit(outside)) / half
        gradient = np.array(
            [
                by_half @ known,
                (by_half * known) @ log_half,
                *(by_half @ drivers * x[2:]),
            ]
        )
        off = x - centre
        return float(weight @ score + 0.5 * penalty @ off**2), gradient + penalty * off

    # Drivers only widen intervals: something unknown never makes a prediction surer.
    start = np.array([np.log(_START_ADDED), _POWER, *np.full(len(names), _START_ADDED)])
    bounds = [(-_MOST_LOG, _MOST_LOG), (0.0, 3.0), *[(0.0, _MOST_ADDED)] * len(names)]
    x = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    added = {
        name: float(value)
        for name, value in zip(names, x[2:], strict=True)
        if value >= _LEAST_ADDED
    }
    shape = Coverage(base=float(x[0]), power=round(float(x[1]), 3), added=added)
    # Sources that nobody had looked at show the errors that a stranger meets; the others count only
    # where there are none.
    strangers = (runs.left_out == TEAM) & ~runs.looked_at
    held_against = strangers if strangers.any() else runs.left_out == TEAM
    return _rounded_up(shape.scaled(_conformal_factor(shape, runs.take(held_against))))


def _conformal_factor(shape: Coverage, runs: LeftOutRuns) -> float:
    """Log of the factor on half-widths at which intervals hold the weighted share `INSIDE` of runs,
    by bisection; the lowest factor if the open settings alone already cover that share."""
    narrow = -_MOST_LOG
    wide = _MOST_LOG
    for _ in range(_BISECTIONS):
        middle = (narrow + wide) / 2
        half = covered_half_widths(shape.scaled(middle), runs)
        inside_share = float(runs.weight @ (np.abs(runs.error) <= half))
        if inside_share >= INSIDE * runs.weight.sum():
            wide = middle
        else:
            narrow = middle
    return wide


def _rounded_up(coverage: Coverage) -> Coverage:
    """Coverage with three decimals, rounded up so that the stored figures still hold the share."""
    added = {name: float(np.ceil(value * 1000) / 1000) for name, value in coverage.added.items()}
    return replace(coverage, base=float(np.ceil(coverage.base * 1000) / 1000), added=added)


def covered_half_widths(coverage: Coverage, runs: LeftOutRuns) -> Float[np.ndarray, " runs"]:
    """Half-widths of runs' intervals, given their unknown facts."""
    known = np.exp(coverage.base) * runs.half_width**coverage.power
    added = np.array([coverage.added.get(name, 0.0) for name in UNKNOWNS])
    site_half_width = np.sqrt(known**2 + saturated(runs.unknown) @ added**2)
    return np.hypot(site_half_width, GAUSS_90 * runs.open_deviation)


def conformal_scale(over: Float[np.ndarray, " runs"], weight: Float[np.ndarray, " runs"]) -> float:
    """Factor by which half-widths are multiplied to hold the weighted share `INSIDE` of the runs
    (split conformal prediction, Lei et al., JASA 113, 2018, section 2.2, with weights).

    Args:
        over: distance of every run from its prediction, in half-widths.
        weight: weight of every run.
    """
    if not len(over):
        return 1.0

    # The weighted quantile of the errors in half-widths.
    order = np.argsort(over)
    place = int(np.searchsorted(np.cumsum(weight[order]), INSIDE * weight.sum()))
    return round(float(over[order][min(place, len(over) - 1)]), 3)
