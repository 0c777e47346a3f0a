"""Finds the runs, or the profile, that help most to choose the fastest layout, by their expected
reduction of regret.

Log step times are distributed about the predictions as searches have them (`joint_errors`): jointly
normal for every node of the scales by which a site's runs scatter, x = mean + loads w with w
standard normal. A run shows one of them, with the noise between repeats, which no choice depends
on. It also tells which nodes are likely: a run that lies far off more probably comes from a site
that scatters much than from one whose layouts are all far off. Whoever has seen it takes the layout
of the least posterior mean, whose expectation from before is the present one, so that no
measurement is ever expected to do harm (the knowledge gradient: Frazier, Powell and Dayanik,
INFORMS Journal on Computing 21, 2009, for correlated beliefs). One run tells of its layout and of
its site at once, and not which of both: what tells two layouts apart is often a run of each, so
that pairs are weighed too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.calibration import LEAST_SHARE, NAMED_SD
from perfmodel.display import shorten_reprs
from perfmodel.planning.layouts._robust import TINY, mixture_draws, square_root
from perfmodel.prediction import Prediction, StepProblem, joint_errors
from perfmodel.prediction.composition import shared_errors
from perfmodel.prediction.sites import CLASSES, KERNEL_FACTORS, SitePrior, class_of

TOLD: Final = tuple(name for name in CLASSES if name != "other")
"""Most classes of events whose seconds a profile shows separately; the rest follows from them and
the step."""
KINDS: Final = ("run", "profile", "two runs")
"""Kinds of measurements. Among measurements of equal value the first kind is ranked first: it needs
a single run and no profiler."""
_ALIKE: Final = 0.01
"""Savings within this share of the present regret count as equal."""


@dataclass(frozen=True, eq=False)
class Observation:
    """A possible measurement: slopes w + noise, with w the standard normal sources of error."""

    kind: str
    """Kind of measurement, one of `KINDS`."""
    places: tuple[int, ...]
    """Places of the layouts that are run."""
    slopes: Float[np.ndarray, "nodes observations sources"]
    """Change of every measured figure per unit of every source of error, at every node of the
    site's scales."""
    noise: Float[np.ndarray, "nodes observations"]
    """Standard deviations of the part that the sources do not explain."""


@dataclass(frozen=True, kw_only=True)
class MeasurementValue:
    """The value of one measurement for the choice between layouts."""

    kind: str
    """Kind of measurement, one of `KINDS`."""
    places: tuple[int, ...]
    """Places of the layouts that are run, among those that are chosen from."""
    regret: float
    """Expected log of the chosen layout's step time relative to the shortest one, if the choice is
    made after the measurement."""
    moves: float
    """Probability that the measurement changes which layout is chosen."""
    instead: int | None
    """The layout that is most likely chosen then; None if the choice stays the same."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasurementValues:
    """Possible measurements before a choice between layouts, with their values."""

    layouts: tuple[Prediction, ...]
    regret: float
    """Regret (`MeasurementValue.regret`) expected if the layout with the shortest predicted step is
    chosen now."""
    best: Float[np.ndarray, " layouts"]
    """Probability of each layout to be the fastest."""
    worth: tuple[MeasurementValue, ...]
    """Measurements, the one with the largest saving per run first; ties are ordered by `KINDS`,
    then by layout."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; regrets in seconds per step."""
        # Inside, regrets are shares of the fastest step.
        step_s = min((p.step_time_s for p in self.layouts), default=0.0)
        rows = []
        for measurement in self.worth:
            instead = measurement.instead
            row = {
                "measure": measurement.kind,
                "ranks": [place + 1 for place in measurement.places],
                "layouts": [self.layouts[place].layout_notation for place in measurement.places],
                "regret_now_s": self.regret * step_s,
                "regret_after_s": measurement.regret * step_s,
                "saved_s": (self.regret - measurement.regret) * step_s,
                "choice_moves": measurement.moves,
                "mostly_to_rank": None if instead is None else instead + 1,
                "mostly_to": None if instead is None else self.layouts[instead].layout_notation,
            }
            rows.append(row)
        ranked = [
            {
                "layout": p.layout_notation,
                "step_time_s": p.step_time_s,
                "probability_best": best,
            }
            for p, best in zip(self.layouts, self.best.tolist(), strict=True)
        ]
        return {
            "regret_now_s": self.regret * step_s,
            "measurements": rows,
            "layouts": ranked,
        }


def telling(problem: StepProblem, predictions: Sequence[Prediction]) -> MeasurementValues:
    """Value runs, pairs of runs and profiles by how much they help to choose the fastest layout.

    Args:
        problem: problem of the predictions. If parameters were already fitted to runs, only further
            runs are valued, because `fit_profile` would start from the tables again.
        predictions: layouts to choose from, as a search ranks them.
    """
    # The signal is what layouts' errors have in common with each other and with later runs. Noise
    # between runs is taken off: it would average out, and no choice depends on it.
    mean = np.log([p.step_time_s for p in predictions])
    joint = joint_errors(problem, predictions)
    site_prior = problem.site_prior
    noise_sd = np.sqrt(site_prior.noise_inflation * joint.noise)
    signal = joint.covariance - joint.noise[:, :, None] * np.eye(len(mean))
    before_runs = problem.adjustment is None or problem.adjustment.runs is None
    loads = _loads(problem, predictions, signal) if before_runs else square_root(signal)

    # A profile splits the step by class of event, so it separates sources of error that one run
    # cannot.
    observations = runs_and_pairs(loads, noise_sd, int(mean.argmin()))
    if before_runs:
        names = shared_errors(predictions).sources
        observations += [
            _profile(run, names, site_prior) for run in observations if run.kind == "run"
        ]
    return value_measurements(mean, loads, observations, joint.weight, tuple(predictions))


def runs_and_pairs(
    loads: Float[np.ndarray, "nodes layouts sources"],
    noise: Float[np.ndarray, "nodes layouts"],
    first: int,
) -> list[Observation]:
    """Return single runs of each layout, then pairs of the first layout with each other one."""
    layouts = range(loads.shape[1])
    singles = [(i,) for i in layouts]
    comparisons = [(first, i) for i in layouts if i != first]
    observations = [
        Observation("run", single, loads[:, single], noise[:, single]) for single in singles
    ]
    observations += [
        Observation("two runs", pair, loads[:, pair], noise[:, pair]) for pair in comparisons
    ]
    return observations


def _loads(
    problem: StepProblem,
    predictions: Sequence[Prediction],
    signal: Float[np.ndarray, "nodes layouts layouts"],
) -> Float[np.ndarray, "nodes layouts sources"]:
    """Return a root of the layouts' noiseless covariance, shared sources of error first."""
    # Per node, errors of kernels and links scatter by the node's scale; those of the site do not.
    # The part of the covariance that shared sources do not explain belongs to single layouts and
    # gets a separate square root.
    names, shared, _ = shared_errors(predictions)
    within = problem.site_prior.scales.within
    is_site_class = np.array([name.removeprefix("site: ") in CLASSES for name in names], bool)
    scaled = shared * np.sqrt(np.where(is_site_class, 1.0, within[:, None]))[:, None]
    return np.concatenate(
        [scaled, square_root(signal - scaled @ scaled.transpose(0, 2, 1))], axis=2
    )


def _profile(run: Observation, names: Sequence[str], site_prior: SitePrior) -> Observation:
    """Return the profile of a run's layout: its step, and seconds of each class of events."""
    # How strongly each site class moves the step is its share of the step's time. The slopes are
    # these shares times the root of the site's covariance, so that solving gives the shares back.
    slopes = run.slopes[:, 0]
    place = {name: i for i, name in enumerate(names)}
    site = [place[f"site: {name}"] for name in CLASSES]
    share = dict(
        zip(CLASSES, np.linalg.solve(site_prior.root.T, slopes[0, site]).tolist(), strict=True)
    )
    tier = max("intra_node", "inter_node", key=share.__getitem__)
    rows = [slopes]
    noise = [run.noise[:, 0]]
    for i, name in enumerate(CLASSES):
        if name not in TOLD or share[name] < LEAST_SHARE:
            continue

        # Each class that takes a noticeable share is one observation: its seconds move with the
        # site's class and with the families of its own kernels or links.
        row = np.zeros_like(slopes)
        row[:, site] = share[name] * site_prior.root[i]
        for source, at in place.items():
            kind, _, family = source.partition(": ")
            event_class = class_of(family) if family in KERNEL_FACTORS else tier
            if kind == "events" and name == event_class:
                row[:, at] = slopes[:, at]
        rows.append(row)
        noise.append(np.full(len(slopes), NAMED_SD * share[name]))
    return Observation("profile", run.places, np.stack(rows, axis=1), np.stack(noise, axis=1))


def value_measurements(
    mean: Float[np.ndarray, " layouts"],
    loads: Float[np.ndarray, "nodes layouts sources"],
    observations: Sequence[Observation],
    weight: Float[np.ndarray, " nodes"],
    layouts: tuple[Prediction, ...] = (),
) -> MeasurementValues:
    """Value each measurement by the expected regret that it saves.

    The model of log step times is mean + loads w, with standard normal w.

    Args:
        mean: predicted log step times.
        loads: change of the log step times per unit of every source w, at every node of the site's
            scales.
        observations: the measurements.
        weight: prior weights of the nodes.
        layouts: the predictions, for display.
    """
    # Present regret: expected step of today's choice minus the expected shortest step if all were
    # known.
    truth_least, best = expected_least(
        mean, mixture_draws(square_root(loads @ loads.transpose(0, 2, 1)), weight)
    )
    now = float(mean.min())
    first = int(mean.argmin())
    values = []
    for measurement in observations:
        # Draw possible results of the measurement and update the means by Bayes' rule. The choice
        # is then the layout with the least posterior mean.
        surprises = mixture_draws(np.linalg.cholesky(_shown_covariance(measurement)), weight)
        expected, chosen = expected_least(
            mean, expected_given(loads, measurement, surprises, weight)
        )
        moves = 1.0 - float(chosen[first])
        chosen[first] = 0.0
        instead = int(chosen.argmax()) if moves > 0 else None
        regret = max(min(expected, now) - truth_least, 0.0)
        values.append(
            MeasurementValue(
                kind=measurement.kind,
                places=measurement.places,
                regret=regret,
                moves=moves,
                instead=instead,
            )
        )
    regret = max(now - truth_least, 0.0)

    # Savings per run that differ by less than a hundredth of the present regret count as equal, so
    # that cheaper kinds and better layouts come first.
    resolution = max(_ALIKE * regret, TINY)
    values.sort(
        key=lambda value: (
            -round((regret - value.regret) / len(value.places) / resolution),
            KINDS.index(value.kind),
            value.places,
        )
    )
    return MeasurementValues(layouts=layouts, regret=regret, best=best, worth=tuple(values))


def expected_given(
    loads: Float[np.ndarray, "nodes layouts sources"],
    observation: Observation,
    surprises: Float[np.ndarray, "draws observations"],
    weight: Float[np.ndarray, " nodes"],
) -> Float[np.ndarray, "draws layouts"]:
    """Return shifts of the posterior means of log step times, for draws of the surprise."""
    covariance = _shown_covariance(observation)
    inverse = np.linalg.inv(covariance)

    # Kalman gain of every node of the mixture.
    gain = loads @ observation.slopes.transpose(0, 2, 1) @ inverse

    # Posterior weights of the nodes: prior weight times normal density of the surprise, scaled
    # by the largest so that exponentials do not underflow.
    squares = ((surprises @ inverse) * surprises).sum(axis=2)
    log = np.log(weight)[:, None] - 0.5 * (squares + np.linalg.slogdet(covariance)[1][:, None])
    likely = np.exp(log - log.max(axis=0))
    likely /= likely.sum(axis=0)
    return np.einsum("nd,nld->dl", likely, gain @ surprises.T, optimize=True)


def _shown_covariance(
    observation: Observation,
) -> Float[np.ndarray, "nodes observations observations"]:
    """Return the covariance of a measurement's outcomes, at every node."""
    slopes, noise = observation.slopes, observation.noise
    parameter_covariance = slopes @ slopes.transpose(0, 2, 1)
    noise_covariance = (noise**2 + TINY)[:, :, None] * np.eye(noise.shape[1])
    return parameter_covariance + noise_covariance


def expected_least(
    mean: Float[np.ndarray, " layouts"], drawn: Float[np.ndarray, "draws layouts"]
) -> tuple[float, Float[np.ndarray, " layouts"]]:
    """Return the expected minimum of mean plus draws, and how often each layout has it.

    Draws come in mirrored pairs, so that shifts common to all layouts cancel and the expected
    minimum never exceeds the minimum of `mean`.
    """
    all_draws = mean + np.concatenate([drawn, -drawn])
    mean_least = float(all_draws.min(axis=1).mean())
    times_least = np.bincount(all_draws.argmin(axis=1), minlength=len(mean))
    return mean_least, times_least / len(all_draws)


shorten_reprs(__name__)
