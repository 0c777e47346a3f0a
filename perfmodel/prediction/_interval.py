"""The 90 % interval of a prediction, and its uncertainty by source; errors that layouts share
cancel between them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.normal import normal_cdf
from perfmodel.prediction._evaluate import step_derivatives
from perfmodel.prediction._explain import CriticalPath
from perfmodel.prediction._prediction import Prediction
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._step_costs import layout_coordinates
from perfmodel.prediction.sites import (
    CLASSES,
    GAUSS_90,
    NOISE,
    Adjustment,
    FittedRuns,
    LogInterval,
    SitePrior,
    factors_of,
)
from perfmodel.prediction.sites.known_runs import CovarianceTerms, half_width, widened
from perfmodel.spec import Layout


def step_interval(
    problem: StepProblem, layout: Layout, path: CriticalPath, degrees: Mapping[str, float]
) -> LogInterval:
    """The 90 % interval of a step time.

    Args:
        path: events on the critical path.
        degrees: amount of each of `DEGREES` in the step.
    """
    # Of several kinds of nodes the least known one decides.
    if problem.kinds:
        by_kind = [_before_runs(kind, path, degrees) for kind in problem.kinds]
        return max(by_kind, key=attrgetter("half_width"))
    known = problem.adjustment
    if known is not None and known.runs is not None:
        before = _before_runs(problem, path, degrees)
        return _given_runs(problem, known, known.runs, layout, path, log(before.upper))
    return _before_runs(problem, path, degrees)


def _before_runs(
    problem: StepProblem, path: CriticalPath, degrees: Mapping[str, float]
) -> LogInterval:
    """The interval of a site without runs, from the published record."""
    unknown = {
        "settings_unstated": degrees["unstated"],
        "extrapolated": degrees["extrapolated"],
        "contradictions": float(problem.site.contradictions),
    }

    # Half-width of the 90 % interval of the step time that each op family contributes, relative to
    # it. Errors inside a family are taken to be the same: they add up rather than cancel.
    half_width_s: dict[str, float] = defaultdict(float)
    for op, seconds, half in zip(
        path.ops, path.seconds.tolist(), path.half_width.tolist(), strict=True
    ):
        half_width_s[op.family] += seconds * half
    family_half_widths = {name: value / path.total_s for name, value in half_width_s.items()}
    return problem.site_prior.interval(path.class_shares, family_half_widths, degrees, unknown)


def _given_runs(
    problem: StepProblem,
    adjustment: Adjustment,
    runs: FittedRuns,
    layout: Layout,
    path: CriticalPath,
    before: float,
) -> LogInterval:
    """The interval of a site with runs of its own.

    Args:
        before: half-width of the interval before any run.
    """
    # How the log step time moves with each parameter that the runs fitted.
    derivatives = step_derivatives(problem, [layout], adjustment.names)
    slopes = derivatives.by_parameter / derivatives.step_s[:, None]

    # Four things are uncertain: the parameters; events of this step that are less certain than
    # those of the runs (parameters that no run touched count in full); the difference of layouts
    # this far from the runs; and the noise of one run.
    beyond = _events_beyond_runs(adjustment, path, derivatives.step_s[0])
    events = {f"events: {name}": sd for name, sd in beyond}
    points = np.array([layout_coordinates(problem.setting, layout)])
    signal = runs.joint(slopes, points, np.array([[*events.values()]]))[:, 0, 0]
    half_given_runs = half_width(signal + runs.noise_variance, runs.known.scales.weight)
    half = float(widened(half_given_runs, runs.coverage_factor, np.array(before)))

    # Independent combinations of parameters are the columns of a root of their covariance.
    values, vectors = np.linalg.eigh(runs.posterior)
    loads = slopes[0] @ (vectors * np.sqrt(np.maximum(values, 0.0)))
    fit = {f"fit: {i}": float(load) for i, load in enumerate(loads)}
    return LogInterval(half, events | fit | {NOISE: adjustment.noise})


def _events_beyond_runs(
    adjustment: Adjustment, path: CriticalPath, step_s: float
) -> list[tuple[str, float]]:
    """Standard deviations from events whose own intervals are wider than those of the runs'
    events."""
    half_widths = dict(adjustment.half_width)
    share: dict[str, float] = {}
    for op, seconds, half in zip(
        path.ops, path.seconds.tolist(), path.half_width.tolist(), strict=True
    ):
        name = factors_of(op)[1]
        beyond = max(0.0, half**2 - half_widths.get(name, 0.0) ** 2) ** 0.5
        share[name] = share.get(name, 0.0) + seconds * beyond / step_s
    return [(name, value / GAUSS_90) for name, value in share.items()]


class SharedErrors(NamedTuple):
    """Standard deviations of the logs of layouts' step times, by source of error."""

    sources: list[str]
    """Names of the sources that all layouts share."""
    shared_sd: Float[np.ndarray, "layouts sources"]
    noise_sd: Float[np.ndarray, " layouts"]
    """Standard deviations from run-to-run noise, which layouts do not share."""


def shared_errors(
    predictions: Sequence[Prediction | Mapping[str, float]],
) -> SharedErrors:
    """Errors shared by layouts, and run-to-run noise.

    Args:
        predictions: predictions of the layouts, or their `Uncertainty.by_source`.
    """
    by_layout = [p.uncertainty.by_source if isinstance(p, Prediction) else p for p in predictions]
    names = sorted(set().union(*by_layout) - {NOISE})
    shared = np.zeros((len(by_layout), len(names)))
    for layout, sources in enumerate(by_layout):
        shared[layout] = [sources.get(name, 0.0) for name in names]
    noise = np.array([sources.get(NOISE, 0.0) for sources in by_layout])
    return SharedErrors(names, shared, noise)


@dataclass(frozen=True, eq=False)
class Joint:
    """Joint distribution of log step times around their predictions: a mixture of normals."""

    covariance: Float[np.ndarray, "nodes layouts layouts"]
    """Covariance under each normal (`Scales`)."""
    weight: Float[np.ndarray, " nodes"]
    """Probability of each normal of the mixture."""
    noise: Float[np.ndarray, "nodes layouts"]
    """Variance of run-to-run noise, which the covariances include."""

    def below(
        self, gap: Float[np.ndarray, "layouts layouts"]
    ) -> Float[np.ndarray, "layouts layouts"]:
        """Probability that the error of log(row / column) is below `gap`."""
        variance = np.diagonal(self.covariance, axis1=1, axis2=2)
        difference_variance = variance[:, :, None] + variance[:, None] - 2 * self.covariance
        z = gap / np.sqrt(np.maximum(difference_variance, 1e-12))
        return np.tensordot(self.weight, normal_cdf(z), 1)


def joint_errors(problem: StepProblem, predictions: Sequence[Prediction]) -> Joint:
    """Joint distribution of the step times of some layouts of one problem.

    Differences between sites cancel between layouts that spend the same time on the affected
    events. The further scatter of one site's layouts is unknown, but common to all of them
    (`Scales`).
    """
    known = problem.adjustment
    names, shared, noise_sd = shared_errors(predictions)
    points = np.array([layout_coordinates(problem.setting, p.layout) for p in predictions])
    if known is None or known.runs is None:
        return joint_of(problem.site_prior, names, shared, noise_sd, points)
    runs = known.runs
    from_events = [name.startswith("events: ") for name in names]
    derivatives = step_derivatives(problem, [p.layout for p in predictions], known.names)
    slopes = derivatives.by_parameter / derivatives.step_s[:, None]
    signal = runs.joint(slopes, points, shared[:, from_events])
    noise = np.repeat(runs.noise_variance[:, None], len(points), axis=1)
    return Joint(signal + noise[:, :, None] * np.eye(len(points)), runs.known.scales.weight, noise)


def joint_of(
    site_prior: SitePrior,
    names: Sequence[str],
    shared: Float[np.ndarray, "layouts sources"],
    noise_sd: Float[np.ndarray, " layouts"],
    points: Float[np.ndarray, "layouts coordinates"],
) -> Joint:
    """`joint_errors` before any run.

    Args:
        names, shared, noise_sd: results of `shared_errors`.
        points: coordinates of the layouts.
    """
    is_of_site = np.array([name.removeprefix("site: ") in CLASSES for name in names], bool)
    site_errors = shared[:, is_of_site]
    layout_errors = shared[:, ~is_of_site]
    scales, layout_kernel = site_prior.scales, site_prior.layout_kernel
    within = layout_errors @ layout_errors.T + layout_kernel.shared(points, points)
    single = layout_kernel.alone(points, points) + np.diag(noise_sd**2)
    covariance = CovarianceTerms(site_errors @ site_errors.T, within, single).under(scales)
    return Joint(covariance, scales.weight, scales.single[:, None] * noise_sd**2)
