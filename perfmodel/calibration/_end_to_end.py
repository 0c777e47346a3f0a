"""Fits the cost models' parameters to measured runs, through the timeline."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.calibration._corrections import Correction
from perfmodel.calibration._parameters import (
    Posterior,
    Prior,
    corrected,
    covariance_of,
    fitted,
    priors,
)
from perfmodel.calibration._runs import Observations, Run, check_units
from perfmodel.display import Report, folded, frame_html, paragraph, shows_progress
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_bytes
from perfmodel.prediction import GAUSS_90
from perfmodel.prediction.sites import (
    CLASSES,
    KERNEL_FACTORS,
    LINK_FACTORS,
    LOSSES,
    Adjustment,
    FittedRuns,
    SitePrior,
    save_adjustments,
)
from perfmodel.units import plural, relative, span

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class FittedParameter:
    """One parameter before and after the fit; factors as logs, losses as amounts (`PARAMETERS`)."""

    name: str
    prior_sd: float
    """Standard deviation of the prior, which is normal around 0, and cut off below 0 for losses."""
    value: float
    """Value expected after the fit."""
    lo: float
    """Lower end of the 90 % interval."""
    hi: float
    measured_kernels: int | None
    """Number of measured kernels of the device behind the prior; None if no kernel table measures
    the parameter."""
    runs: int
    """Runs whose step one standard deviation of the prior moves by 0.5 % or more."""
    informed: bool
    """Whether the runs narrowed its interval by a tenth or more."""
    contradiction: str = ""
    """Sentence that says so if the value lies outside the prior's 90 % interval; empty
    otherwise."""

    @property
    def sigmas(self) -> float:
        """Distance from the prior's centre, in its standard deviations."""
        return self.value / self.prior_sd


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """The fit to one device's runs."""

    device: str
    runs: int
    parameters: tuple[FittedParameter, ...]
    adjustment: Adjustment
    """Adjustment that predictions use."""
    error_before: float
    """Mean of |predicted / measured - 1| over the runs, from the cost models alone."""
    error_after: float
    """Mean error of the same runs after the fit, which is not a measure of accuracy."""
    overall_factor: float = 1.0
    """Factor on the step times of all layouts; it differs from 1 if the runs agree with each other
    but not with published runs."""
    beyond: str = ""
    """Warning that the runs as a whole are faster or slower than predictions allow; empty if they
    are not."""
    unexplained: tuple[tuple[str, float], ...]
    """Runs that no parameter explains, worst first, with the excess of measured over fitted
    time."""

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Sentences about disagreements between runs and tables."""
        sentences = [self.beyond]
        for parameter in self.parameters:
            sentences.append(parameter.contradiction)
        return tuple(sentence for sentence in sentences if sentence)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device,
            "runs": self.runs,
            "error_before": self.error_before,
            "error_after": self.error_after,
            "overall_factor": self.overall_factor,
            "noise": self.adjustment.noise,
            "unexplained": dict(self.unexplained),
            "contradictions": list(self.contradictions),
            "parameters": [vars(p) | {"sigmas": p.sigmas} for p in self.parameters],
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per parameter: name, prior_sd, value, lo, hi, measured_kernels, runs, informed,
        contradiction."""
        import pandas as pd

        return pd.DataFrame([vars(p) for p in self.parameters])

    def _repr_html_(self) -> str:
        errors = f"mean error {self.error_before:.1%} before, {self.error_after:.1%} after the fit to these runs"
        facts = paragraph(f"{self.device}, {self.runs} runs", errors, *self.contradictions)
        return facts + folded("parameters", frame_html(self.to_frame()), opened=True)


def mean_error(log_errors: np.ndarray) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.abs(np.expm1(log_errors)).mean())


_FELT = 0.005
"""Least change of a step, for one standard deviation of a prior, at which a run constrains a
parameter."""
_NARROWED = 0.9
_FAR_OFF = 3.0
"""A run is named if it is more than this many standard deviations of a typical site's runs away."""


@shows_progress("fit to runs")
def calibrate_end_to_end(
    runs: Sequence[Run],
    *,
    out: Path | str | None = None,
    base: Path | str | None = None,
    strict: bool = False,
    profiled: Sequence[Correction] = (),
    progress: Report | None = None,
) -> dict[str, EndToEnd]:
    """Fit the physical parameters of the step time to measured runs, device by device.

    The parameters (`perfmodel.prediction.sites.PARAMETERS`) are log factors of kernel families, of
    latency and inverse bandwidth of each network tier, and of host costs; and losses: overlap,
    stragglers, overhead per step. Their priors come from the tables and the published record. The
    update is that of the model of sites (`FittedRuns`), linearised with gradients through the
    timeline.

    Args:
        runs: measured runs; a dozen layouts say more than a dozen repeats of one.
        out: calibration directory to leave the parameters in, for `calibration=` of every
            prediction.
        base: calibration directory whose cost models the runs correct; the shipped one by default.
        strict: refuse runs that contradict the tables.
        profiled: parameters that a profile determined before (`fit_profile`), if all runs are of
            one kind of device.

    Returns:
        The fit of each device.

    Raises:
        PerfModelError: no runs, a run that cannot be laid out, a step that is not in seconds, or
            under `strict` a contradiction.
    """
    if not runs:
        raise PerfModelError(
            "end-to-end calibration: there are no runs to fit to; give measured step times"
        )

    # Parameters belong to a device, so runs on other devices do not constrain them.
    by_device: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_device[run.cluster.device.name].append(run)
    folder = None if base is None else Path(base)
    fits: dict[str, EndToEnd] = {}
    for device, device_runs in by_device.items():
        fits[device] = _fit(device, device_runs, folder, profiled, progress)
    contradictions = []
    for fit in fits.values():
        contradictions += fit.contradictions

    # Refused before anything is written, so that no folder holds parameters that were not wanted.
    if strict and contradictions:
        raise PerfModelError(
            f"{'; '.join(contradictions)}; check the runs and the tables, or leave --strict out"
        )
    if out is not None:
        _copy_weights(folder, Path(out))
        save_adjustments(Path(out), {device: fitted.adjustment for device, fitted in fits.items()})
    return fits


def _copy_weights(base: Path | None, out: Path) -> None:
    """Copy the weights of the cost models that the parameters correct."""
    if base is None or base.resolve() == out.resolve():
        return
    for path in sorted(base.glob("*.safetensors")):
        write_bytes(out / path.name, path.read_bytes())


def _fit(
    device: str,
    runs: Sequence[Run],
    base: Path | None,
    profiled: Sequence[Correction],
    progress: Report | None,
) -> EndToEnd:
    """Fit the parameters of one device to its runs."""
    observed = Observations(runs, base)

    # Priors from tables and the published record, and a profile's corrections in their place.
    layouts = []
    for group in observed.groups:
        layouts.append((group.problem, [runs[i].layout for i in group.runs]))
    before_profile = priors(layouts, base, device)
    site_prior = observed.groups[0].problem.site_prior
    parameter_priors = corrected(before_profile, profiled)
    names = tuple(prior.name for prior in parameter_priors)
    centre = np.array([prior.centre for prior in parameter_priors])

    # The fit moves parameters from the centres of their priors, x = 0, so that bounds move with
    # them.
    start = Adjustment(device=device, values=tuple((name, 0.0) for name in names))
    before = observed.log_errors(start)[: len(runs)]
    check_units(runs, np.exp(before) * [run.measured_s for run in runs])

    # Bayesian update with the site model's covariance between runs, at tangents of the timeline.
    posterior = fitted(
        lambda x: observed.log_errors_and_gradient(start.at(names, centre + x), names, progress),
        FittedRuns(
            at=tuple(map(tuple, observed.coordinates.tolist())),
            slopes=(),
            error=(),
            weight=tuple(observed.weight.tolist()),
            covariance=tuple(map(tuple, covariance_of(parameter_priors, site_prior).tolist())),
            layout_kernel=site_prior.layout_kernel,
            noise=site_prior.noise,
            scatter=site_prior.scatter,
            noise_inflation=site_prior.noise_inflation,
            coverage_factor=site_prior.coverage_factor,
        ),
        np.array([prior.lowest for prior in parameter_priors]) - centre,
    )
    parameters = _parameters(parameter_priors, posterior, site_prior, len(runs), device)
    profiled_names = {correction.name for correction in profiled}

    # Predictions use the parameters and what the runs show of nearby layouts (`posterior.runs`).
    adjustment = Adjustment(
        device=device,
        values=tuple(zip(names, (centre + posterior.values).tolist(), strict=True)),
        informed=frozenset(p.name for p in parameters if p.informed or p.name in profiled_names),
        half_width=tuple(
            (prior.name, prior.half_width) for prior in parameter_priors if prior.half_width
        ),
        runs=posterior.runs,
    )

    beyond = posterior.errors[: len(runs)]
    offset = posterior.runs.mean(observed.coordinates)
    return EndToEnd(
        device=device,
        runs=len(runs),
        parameters=parameters,
        adjustment=adjustment,
        error_before=mean_error(before),
        error_after=mean_error(beyond + offset),
        overall_factor=float(np.exp(posterior.runs.overall)),
        beyond=_beyond(before, site_prior),
        unexplained=_unexplained(runs, beyond, site_prior),
    )


def _unexplained(
    runs: Sequence[Run], beyond: np.ndarray, site_prior: SitePrior
) -> tuple[tuple[str, float], ...]:
    """Runs whose unexplained error lies far outside a site's usual scatter, farthest first."""
    layout_kernel = site_prior.layout_kernel
    usual_sd = np.sqrt(layout_kernel.amplitude**2 + layout_kernel.nugget**2 + site_prior.noise**2)
    unexplained = []
    for i in np.argsort(-np.abs(beyond)).tolist():
        if abs(beyond[i]) > _FAR_OFF * usual_sd:
            unexplained.append((runs[i].name, float(np.expm1(-beyond[i]))))
    return tuple(unexplained)


def _parameters(
    parameter_priors: Sequence[Prior],
    posterior: Posterior,
    site_prior: SitePrior,
    runs: int,
    device: str,
) -> tuple[FittedParameter, ...]:
    """Parameters before and after the runs; bounds do not lower their uncertainty."""
    # At its bound the posterior would have no width at all, which is more than the runs say.
    prior_covariance = covariance_of(parameter_priors, site_prior)
    unbounded = replace(posterior.runs, covariance=tuple(map(tuple, prior_covariance.tolist())))
    sd = np.sqrt(np.diag(unbounded.posterior))
    return tuple(
        _parameter(
            prior, float(posterior.values[i]), float(sd[i]), posterior.gradient[:runs, i], device
        )
        for i, prior in enumerate(parameter_priors)
    )


def _parameter(
    prior: Prior, moved: float, sd: float, gradient: np.ndarray, device: str
) -> FittedParameter:
    """Return one parameter before and after the runs; they moved it by `moved`, and `sd` is its
    posterior standard deviation."""
    value = prior.centre + moved
    beyond_prior = abs(moved) > GAUSS_90 * prior.sd

    # A run informs a parameter only if the parameter's plausible range moves the step noticeably.
    felt = int((np.abs(gradient) * prior.sd >= _FELT).sum())
    return FittedParameter(
        name=prior.name,
        prior_sd=prior.sd,
        value=value,
        lo=max(prior.lowest, value - GAUSS_90 * sd),
        hi=value + GAUSS_90 * sd,
        measured_kernels=prior.measured,
        runs=felt,
        informed=sd < _NARROWED * prior.sd,
        contradiction=_contradiction(prior, value, felt, device) if beyond_prior else "",
    )


def _beyond(log_errors: np.ndarray, site_prior: SitePrior) -> str:
    """A sentence if most runs took longer or shorter than the published record allows."""
    # Compare the median run with the interval of an unknown site that spends its step evenly on
    # all classes.
    median_error = float(np.median(-log_errors))
    everything = dict.fromkeys(CLASSES, 1 / len(CLASSES))
    middle = float(np.mean(site_prior.mean))
    half = site_prior.half_width(everything)
    if abs(median_error - middle) <= half:
        return ""
    usual_span = span(f"{expm1(middle - half):+.0%}", f"{expm1(middle + half):+.0%}")
    is_slower = median_error > middle
    advice = (
        "a fault would be fitted like the cluster's own speed, so look for one with 'perfmodel check'"
        if is_slower
        else "a wrong batch, model or number of devices would be fitted as if the cluster were this fast, so compare "
        "each run's settings with its log ('perfmodel check')"
    )
    return (
        f"your runs are much {'slower' if is_slower else 'faster'} than comparable published ones: "
        f"{relative(expm1(median_error))} relative to the cost models (median of {len(log_errors)} "
        f"{plural('run', len(log_errors))}), while 90 % of sites are within {usual_span}; {advice}"
    )


def _contradiction(prior: Prior, value: float, runs: int, device: str) -> str:
    """The contradiction in words: the shift, and the evidence against it."""
    # Each kind of parameter contradicts something else: losses against an assumption, kernels
    # against tables of the device, links against collectives.
    edge = GAUSS_90 * prior.sd
    if prior.name in LOSSES:
        return f"runs contradict the assumptions: {prior.name} {value:.3g}, expected below {edge:.3g} ({runs} runs)"
    shift = expm1(value)
    shift_text = f"{prior.name} {abs(shift):.0%} {'slower' if shift > 0 else 'faster'}"
    allowed = f"90 % prior {span(f'{expm1(-edge):+.0%}', f'{expm1(edge):+.0%}')}, {runs} runs"
    if prior.name in KERNEL_FACTORS:
        against = f"{prior.measured:,} measured kernels of {device}"
        return f"runs contradict the kernel tables: {shift_text} than {against} ({allowed})"
    source = "collective tables" if prior.name in LINK_FACTORS else "assumptions"
    return f"runs contradict the {source}: {shift_text} ({allowed})"
