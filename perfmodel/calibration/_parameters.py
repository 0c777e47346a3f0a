"""Prior and posterior of the parameters.

The prior comes from the published record of sites and from the kernel tables. A parameter is its
class's factor at the site (`perfmodel.prediction.sites.SitePrior`), which all parameters of the
class share, plus a deviation of its own, as wide as the intervals of its events. A profile
(`Correction`) takes the place of both. Runs update it as the model of sites has it
(`perfmodel.prediction.sites.FittedRuns`), around tangents of the timeline (Gauss-Newton).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.calibration._corrections import Correction
from perfmodel.cost import EventTimes
from perfmodel.cost.learn import measured_kinds
from perfmodel.cost.learn.rows import rows_from_ops
from perfmodel.ops import Collective, Op
from perfmodel.prediction import GAUSS_90, StepProblem, layout_batches
from perfmodel.prediction.composition import event_classes
from perfmodel.prediction.sites import (
    CLASSES,
    HOST_FACTORS,
    KERNEL_FACTORS,
    LOSSES,
    FittedRuns,
    SitePrior,
    class_of,
    factors_of,
)
from perfmodel.spec import Layout

WIDTHS: Final = {
    "tp_overlap_loss": 0.2,
    "dp_overlap_loss": 0.2,
    "straggling": 0.01,
    "step_overhead_s": 0.05,
}
"""Prior standard deviations of parameters that neither tables nor published runs determine: GPUs of
one type differ by a per cent in speed (Sinha et al., SC22: mostly 1 to 2 %); an overlapped
collective may cost its neighbours some tenths of its time; loaders and loggers take about 10 ms."""
_LEAST: Final = 0.01
"""Least standard deviation of the part that a parameter does not share with its class. Assumed."""


@dataclass(frozen=True)
class Prior:
    """A normal prior."""

    name: str
    sd: float
    measured: int | None
    """Number of measured kernels of this device behind the prior; None if no kernel table measures
    the parameter."""
    half_width: float
    """Log half-width of the 90 % intervals of the events that the parameter moves, 0 if it moves
    none."""
    centre: float = 0.0
    """Expected value: 0 means that the tables are right; published runs or a profile may move
    it."""
    own_sd: float = 0.0
    """The part of `sd` that the parameter shares with no other."""

    @property
    def lowest(self) -> float:
        """The lower limit: losses are never negative."""
        return 0.0 if self.name in LOSSES else -np.inf


def corrected(known: Sequence[Prior], profiled: Sequence[Correction]) -> list[Prior]:
    """Replace priors with a profile's measured values; parameters that no run affects come only
    from the profile."""
    by_name = {correction.name: correction for correction in profiled}
    after_profile = []
    for prior in known:
        correction = by_name.pop(prior.name, None)
        after_profile.append(prior if correction is None else _profiled(prior, correction))
    # The remaining corrections have no prior: no run depends on them, and only the profile
    # constrains them.
    for correction in by_name.values():
        after_profile.append(
            Prior(
                name=correction.name,
                sd=correction.sd,
                measured=None,
                half_width=0.0,
                centre=correction.value,
                own_sd=correction.sd,
            )
        )
    return after_profile


def _profiled(prior: Prior, correction: Correction) -> Prior:
    """The prior given a profile, which overrides published runs."""
    centre = max(correction.value, prior.lowest)
    return replace(prior, centre=centre, sd=correction.sd, own_sd=correction.sd)


def covariance_of(
    parameter_priors: Sequence[Prior], site_prior: SitePrior
) -> Float[np.ndarray, "parameters parameters"]:
    """Prior covariance of the parameters: each has an independent variance, and the factors of a
    class share another at a site. A parameter that a profile determined keeps only its own
    variance."""
    # Parameters of one class share the class's factor at the site. Those that a profile measured
    # do not: `own_sd` is all of their `sd`.
    classes = [CLASSES.index(class_of(prior.name)) for prior in parameter_priors]
    shared = np.array([prior.own_sd < prior.sd for prior in parameter_priors], float)
    class_covariance = site_prior.covariance[np.ix_(classes, classes)] * shared[:, None] * shared
    return class_covariance + np.diag([prior.own_sd**2 for prior in parameter_priors])


def priors(
    models: Sequence[tuple[StepProblem, Sequence[Layout]]], base: Path | None, device: str
) -> list[Prior]:
    """Priors of host costs and losses, and of parameters that move an event of the runs."""
    # A parameter is as uncertain as the events that it moves, weighted by their time in these
    # runs.
    weight: dict[str, float] = defaultdict(float)
    spread: dict[str, float] = defaultdict(float)
    dtypes: dict[str, set[str]] = defaultdict(set)
    for model, layouts in models:
        for op, seconds, half in _events(model, layouts):
            for name in dict.fromkeys(factors_of(op)):
                weight[name] += seconds
                spread[name] += seconds * half
            if not isinstance(op, Collective):
                dtypes[factors_of(op)[0]] |= {kind.dtype for kind in rows_from_ops([op]).kinds}

    # All run at one site. A parameter's factor is its class's there and, besides, its own.
    site_prior = models[0][0].site_prior
    half_width = {name: spread[name] / weight[name] for name in weight if weight[name] > 0}
    parameter_priors = []
    for name, half in [*half_width.items(), *((name, 0.0) for name in HOST_FACTORS)]:
        own_sd = max(site_prior.events * half / GAUSS_90, _LEAST)
        place = CLASSES.index(class_of(name))
        measured = _measured(base, device, name, dtypes[name]) if name in KERNEL_FACTORS else None
        parameter_priors.append(
            Prior(
                name=name,
                sd=float(np.hypot(own_sd, site_prior.covariance[place, place] ** 0.5)),
                measured=measured,
                half_width=half,
                centre=float(site_prior.mean[place]),
                own_sd=own_sd,
            )
        )

    # Losses move no event: their widths are assumed, and each is its own.
    for name in LOSSES:
        width = WIDTHS[name]
        parameter_priors.append(
            Prior(
                name=name,
                sd=width,
                measured=None,
                half_width=0.0,
                own_sd=width,
            )
        )
    return parameter_priors


def _measured(base: Path | None, device: str, name: str, dtypes: set[str]) -> int:
    """Number of measured kernels of the device, in the runs' dtypes, behind a factor."""
    # Batched products are measured in the tables of products, and are a factor of their own.
    kinds = measured_kinds(base, device, "gemm" if name == "bmm" else name)
    measured = 0
    for kind, n in kinds.items():
        if kind.dtype in dtypes and (kind.op == "bmm") == (name == "bmm"):
            measured += n
    return measured


def _events(model: StepProblem, layouts: Sequence[Layout]) -> Iterable[tuple[Op, float, float]]:
    """Yield each event, its seconds per pass or step, and its interval's log half-width."""
    for batch in layout_batches(model, layouts):
        for table, classes in zip(batch.tables, event_classes(model, batch), strict=True):
            # A pass runs an event as often as each block has it; events between blocks run once a
            # step.
            counts = np.einsum("bpo,b->o", table.counts, np.array(table.repeats, float))
            yield from _counted_events(table.ops, table.times, counts)
            yield from _counted_events(classes.ops, classes.times, np.ones(len(classes.ops)))


def _counted_events(
    ops: Sequence[Op], times: EventTimes, counts: Float[np.ndarray, " events"]
) -> Iterable[tuple[Op, float, float]]:
    """Events that run `counts` times, each with all seconds and its log half-width."""
    half_width = np.log(np.maximum(times.hi_s, 1e-12) / np.maximum(times.lo_s, 1e-12)) / 2
    return zip(ops, (counts * times.time_s).tolist(), half_width.tolist(), strict=True)


Vector = Float[np.ndarray, " parameters"]
ErrorsAndGradient = Callable[
    [Vector],
    tuple[Float[np.ndarray, " observations"], Float[np.ndarray, "observations parameters"]],
]

_TANGENTS: Final = 12
_ENOUGH: Final = 1e-3
"""Change of parameters, in standard deviations of their priors, that ends the iteration."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """The parameters given the runs."""

    values: Vector
    """Expected parameters minus the centres of their priors."""
    runs: FittedRuns
    """Runs linearised at `values`; parameters at a bound are treated as known exactly."""
    errors: Float[np.ndarray, " observations"]
    """Log of predicted over measured time at `values`."""
    gradient: Float[np.ndarray, "observations parameters"]


def fitted(errors_and_gradient: ErrorsAndGradient, runs: FittedRuns, lowest: Vector) -> Posterior:
    """Parameters x given the log errors e(x) of runs.

    e is replaced by its tangent, under which all is normal for every node of the site's scales, and
    again from the parameters expected there. If a change of the critical path makes the parameters
    oscillate, the result is the point where the errors agree best with those that the tangent
    predicts.

    Args:
        errors_and_gradient: x -> (e, de/dx), of log predicted over measured time.
        runs: record of the runs without `error` and `slopes`.
        lowest: lower bounds of x.
    """
    sd = np.sqrt(np.diag(runs.covariance))
    x = np.zeros(len(sd))
    tried: list[tuple[float, Posterior]] = []
    for attempt in range(_TANGENTS):
        errors, gradient = errors_and_gradient(x)

        # Linearise at x: e(y) = e(x) + G (y - x), so that G x - e(x) is what the runs observed of
        # G y.
        linearised, expected = _conditioned_on_tangent(
            runs, gradient @ x - errors, gradient, lowest
        )
        largest_step = float((np.abs(expected - x) / sd).max(initial=0.0))
        tried.append((largest_step, Posterior(x, linearised, errors, gradient)))
        if largest_step < _ENOUGH:
            break
        # Half steps, once whole ones have not settled.
        x = x + (expected - x) / (1 if attempt < _TANGENTS // 2 else 2)
    return min(tried, key=lambda pair: pair[0])[1]


def _conditioned_on_tangent(
    runs: FittedRuns,
    error: Float[np.ndarray, " observations"],
    gradient: np.ndarray,
    lowest: Vector,
) -> tuple[FittedRuns, Vector]:
    """Condition the parameters on linearised runs, with those that would fall below their bounds
    held at the bounds.

    Args:
        error: what the runs observed of `gradient` @ parameters.
        gradient: derivative of the log errors with respect to the parameters, [observations,
            parameters].
        lowest: lower bound of each parameter.

    Returns:
        Record of the linearised runs, and the expected parameters.
    """
    at_bound = np.zeros(len(lowest), bool)
    prior = np.array(runs.covariance)
    # A parameter at its bound is known exactly, which moves the others, so the bounds are found one
    # after another.
    while True:
        fixed = np.where(at_bound, lowest, 0.0)
        free = prior * ~at_bound[:, None] * ~at_bound
        conditioned = replace(
            runs,
            slopes=tuple(map(tuple, gradient.tolist())),
            error=tuple((error - gradient @ fixed).tolist()),
            covariance=tuple(map(tuple, free.tolist())),
        )
        expected = conditioned.values + fixed
        below = (expected < lowest) & ~at_bound
        if not below.any():
            return conditioned, expected
        at_bound |= below
