"""Prior of a site before any of its runs, from published runs: a hierarchical model of measured
over predicted time.

A site's clocks, fabric, hosts and software make classes of events take longer or shorter than the
physics says. The log of such a factor is a sum of four terms: one common to all sites, one of the
framework, one of the device, and one of the site itself. Each is normal around 0 with a variance of
its own (Gelman and Hill 2007, chapter 12). A run's log(measured / predicted) is the sum of the
factors, weighted by the shares of its step, and of terms of its layout, its settings and the run
itself. `perfmodel.validation` fits the variances to the record; here are the factors of a site
given the record: a posterior for each framework and architecture.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from math import exp
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.files import parse_json, read_checked
from perfmodel.prediction.sites._adjustment import (
    HOST_FACTORS,
    KERNEL_FACTORS,
    LINK_FACTORS,
    Adjustment,
)
from perfmodel.prediction.sites.constants import teams_of
from perfmodel.prediction.sites.known_runs import (
    NOTHING_UNKNOWN,
    Coverage,
    LayoutKernel,
    Scales,
    half_width,
    scales,
)
from perfmodel.spec import ConvNet, Device, Framework, Mlp, Model
from perfmodel.spec.unet import UNet


@dataclass(frozen=True)
class Seen:
    """Frameworks, devices, years and models in the runs that a population was fitted to."""

    frameworks: frozenset[str] = frozenset()
    """Names of frameworks."""
    architectures: frozenset[str] = frozenset()
    """Architectures of devices."""
    years: frozenset[int] = frozenset()
    """Years of the software."""
    model_kinds: frozenset[str] = frozenset()
    """Kinds of models (`model_kind`)."""

    def unknown(
        self, framework: str, architecture: str, year: int, model_kind: str, *, generic: str
    ) -> dict[str, float]:
        """Value of each uncertainty driver for a site, before a run's settings are known.

        Args:
            framework: name of the framework.
            architecture: architecture of the device.
            year: year of the software; 0 where nobody says it.
            model_kind: result of `model_kind`; empty where it is open.
            generic: name that stands for no framework.
        """
        named = framework != generic
        return {
            "framework_unnamed": float(not named),
            "framework_unseen": float(named and framework not in self.frameworks),
            "device_unseen": float(architecture not in self.architectures),
            "year_unseen": float(year != 0 and year not in self.years),
            "model_unseen": float(bool(model_kind) and model_kind not in self.model_kinds),
        }

    def to_dict(self) -> dict[str, list[Any]]:
        return {
            "frameworks": sorted(self.frameworks),
            "architectures": sorted(self.architectures),
            "years": sorted(self.years),
            "model_kinds": sorted(self.model_kinds),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, list[Any]]) -> "Seen":
        return cls(**{name: frozenset(values) for name, values in content.items()})


def model_kind(model: Model) -> str:
    """The kind of a model, for statistics of sites."""
    if isinstance(model, ConvNet):
        return "convolutions"
    if isinstance(model, UNet):
        return "diffusion U-Net"
    if isinstance(model, Mlp):
        return "multilayer perceptron"
    if model.norms.adaln is not None:
        return "diffusion transformer"
    if model.experts is not None:
        return "mixture of experts"
    hybrid = model.hybrid
    if any(part is not None for part in (hybrid.mamba, hybrid.delta_net, hybrid.time_mix)):
        return "state-space layers"
    if model.decoder_layers:
        return "encoder and decoder"
    return "decoder" if model.attention.causal else "encoder"


# --- the population of sites
# ---------------------------------------------------------------------------


CLASSES: Final[tuple[str, ...]] = (
    "products",
    "attention",
    "memory",
    "intra_node",
    "inter_node",
    "host",
    "other",
)
"""Classes of a step's seconds, each with one factor of the site: matrix products; attention;
kernels bound by memory; collectives inside a node and between nodes, as far as they are exposed;
the host, where the device waits for it; the seconds that no event takes (waits for the slowest
rank, kernels slowed by communication, copies, stragglers)."""
DEGREES: Final[tuple[str, ...]] = ("unstated", "extrapolated", "bubble")
"""Drivers that make a step less certain but are not classes of its seconds: share of a run's
settings that had to be assumed; share of the critical path that is extrapolated; share of the step
that pipelines idle."""
GAUSS_90: Final = 1.6448536269514722
"""95 % quantile of the normal distribution: half-width of a 90 % interval in standard
deviations."""
NOISE: Final = "own"
"""Name of run-to-run noise, the source of error that no two layouts share (the name is stored in
results)."""
FILE_NAME: Final = "population.json"
"""File of the fitted numbers."""
CARD_NAME: Final = "population.md"
"""File that describes how they were fitted."""
GENERIC: Final = Framework().name
"""Name that means no particular framework."""
_PRODUCTS: Final = ("gemm", "bmm", "conv", "moe")
"""Op families of the class `products`."""


def class_of(parameter: str) -> str:
    """The one of `CLASSES` that a parameter (of `PARAMETERS`) affects."""
    if parameter in _PRODUCTS:
        return "products"
    if parameter in HOST_FACTORS:
        return "host"
    tier = parameter.partition(".")[0]
    if tier in CLASSES:
        return tier
    return "memory" if parameter in KERNEL_FACTORS else "other"


class LogInterval(NamedTuple):
    """The 90 % interval of the log of a time, around its prediction."""

    half_width: float
    """Half of the interval's width."""
    sources: dict[str, float]
    """Standard deviations of the log by source (`Uncertainty.by_source`)."""

    @property
    def lower(self) -> float:
        """Lower end, as a factor on the time."""
        return exp(-self.half_width)

    @property
    def upper(self) -> float:
        """Upper end, as a factor on the time."""
        return exp(self.half_width)


@dataclass(frozen=True, eq=False)
class SitePrior:
    """Prior of one site and its runs, in log time."""

    mean: Float[np.ndarray, " classes"]
    """Mean of the logs of the factors of `CLASSES`."""
    covariance: Float[np.ndarray, "classes classes"]
    """Covariance of the logs of the factors."""
    degrees: Float[np.ndarray, " degrees"]
    """Standard deviation that a site adds per unit of each of `DEGREES`."""
    events: float
    """Factor from the half-widths of events to those of a step."""
    layout_kernel: LayoutKernel
    """Covariance of layouts beyond the factors."""
    noise: float
    """Standard deviation of the noise of one run."""
    scatter: tuple[float, float]
    """Standard deviations over sites of the logs of the two scales of `Scales`."""
    coverage: Coverage
    """Model that scales half-widths to intervals that hold 90 % of the runs of left-out teams."""
    unknown: Mapping[str, float]
    """Value of each driver of `coverage` before the settings of a run are known."""
    noise_inflation: float
    """Noise inflation: multiplies the noise variance of known runs when others are predicted from
    them, so that a few runs seldom make a site's predictions worse."""
    coverage_factor: float
    """Coverage factor: multiplies half-widths once some runs of the site are known, so that 90 % of
    the others lie inside."""

    @cached_property
    def scales(self) -> Scales:
        """Nodes of the two scales of the variances of one site's runs."""
        return scales(self.scatter)

    @cached_property
    def root(self) -> Float[np.ndarray, "classes classes"]:
        """Lower triangular root of the covariance."""
        return np.linalg.cholesky(self.covariance + 1e-12 * np.eye(len(self.covariance)))

    def half_width(
        self,
        shares: Mapping[str, float],
        more: float = 0.0,
        unknown: Mapping[str, float] = NOTHING_UNKNOWN,
    ) -> float:
        """Half-width of the 90 % interval of a run's log step time.

        Args:
            shares: shares of the step by class.
            more: variance from its events' own errors and the site's settings.
            unknown: amount of each driver of `coverage` in the run, besides the site's.
        """
        # Factors move the step as far as it spends on their classes. A site's scatter is unknown:
        # the interval is that of a mixture over the nodes of its scales, then scaled to its nominal
        # coverage.
        loads = np.array([shares.get(name, 0.0) for name in CLASSES]) @ self.root
        shared = self.layout_kernel.amplitude**2 + more
        single = self.layout_kernel.nugget**2 + self.noise**2
        scales = self.scales
        variance = loads @ loads + shared * scales.within + single * scales.single
        model_half_width = float(half_width(variance, scales.weight))
        return self.coverage.half_width(model_half_width, {**self.unknown, **unknown})

    def interval(
        self,
        shares: Mapping[str, float],
        event_half_widths: Mapping[str, float] = NOTHING_UNKNOWN,
        degrees: Mapping[str, float] = NOTHING_UNKNOWN,
        unknown: Mapping[str, float] = NOTHING_UNKNOWN,
    ) -> LogInterval:
        """The 90 % interval of a time that is composed of events, and its sources.

        All times that are composed of events get their interval here: steps, requests to a server,
        imported programs.

        Args:
            shares: shares of the time by class.
            event_half_widths: half-width of the 90 % interval of the time that errors of events
                contribute, relative to it, by what has errors in common.
            degrees: amount of each of `DEGREES` in the time; those that are left out count 0.
            unknown: see `half_width`.
        """
        # Events' own intervals, which are those of kernels, widened as far as steps show.
        event_sd = {
            name: self.events * half_width / GAUSS_90
            for name, half_width in event_half_widths.items()
        }

        # Factors of the site, as far as the time is spent on each class. Independent combinations
        # are the columns of a root of their covariance.
        loads = np.array([shares.get(name, 0.0) for name in CLASSES]) @ self.root
        class_sd = dict(zip(CLASSES, loads.tolist(), strict=True))

        # Unstated settings, extrapolation and bubbles make a time less certain.
        degree_sd = {}
        for name, sd in zip(DEGREES, self.degrees.tolist(), strict=True):
            degree_sd[name] = sd * degrees.get(name, 0.0)

        # The half-width has the covariance of the classes itself: the rest comes on top.
        variance_beyond = sum(sd**2 for sd in (*event_sd.values(), *degree_sd.values()))
        half = self.half_width(shares, variance_beyond, unknown)
        sources = {f"events: {name}": sd for name, sd in event_sd.items()}
        sources |= {f"site: {name}": sd for name, sd in (class_sd | degree_sd).items()}
        return LogInterval(half, sources | {NOISE: self.noise})

    def expected(self, device: Device) -> Adjustment:
        """The parameters of runs at the mean of the factors."""
        mean_of_class: dict[str, float] = dict(zip(CLASSES, self.mean.tolist(), strict=True))
        names = (*KERNEL_FACTORS, *LINK_FACTORS, *HOST_FACTORS)
        return Adjustment(
            device=device.name,
            values=tuple((name, mean_of_class[class_of(name)]) for name in names),
        )


@dataclass(frozen=True, eq=False)
class SitePopulation:
    """Posteriors from the published record, optionally without a group of sources."""

    common: Mapping[str, Any]
    """Numbers that are the same for every site, by the names of `SitePrior`."""
    posteriors: Mapping[str, Mapping[str, list[float]]]
    """`mean` and the lower triangle of `covariance`, by `key`."""
    seen: Seen = field(default_factory=Seen)
    """Frameworks, devices, years and models of the runs that it was fitted to."""

    def site_prior(
        self, framework: Framework, device: Device, model: Model | None = None
    ) -> SitePrior:
        """Prior of a site with this framework and device.

        Args:
            model: the model that the site trains; None where that is open.
        """
        name, architecture = framework.name, device.architecture
        kind = "" if model is None else model_kind(model)
        unknown = self.seen.unknown(name, architecture, framework.since, kind, generic=GENERIC)

        # No framework is physics alone, which is the median. The record's offset from it makes
        # physics less certain.
        if name == GENERIC:
            prior = self._prior([key("", architecture)], unknown)
            shift = np.outer(prior.mean, prior.mean)
            return replace(prior, mean=0 * prior.mean, covariance=prior.covariance + shift)

        # A framework or device without runs in the record is treated like the average of all.
        return self._prior([key(name, architecture), key(name, ""), key("", architecture)], unknown)

    def _prior(self, names: Sequence[str], unknown: Mapping[str, float]) -> SitePrior:
        """The first of some posteriors (by `key`) that exists, else that of the whole record, as a
        site's prior."""
        posterior = next((name for name in names if name in self.posteriors), key("", ""))
        fitted = self.posteriors[posterior]
        size = len(CLASSES)
        # Covariances are stored by their lower triangle.
        lower = np.zeros((size, size))
        lower[np.tril_indices(size)] = fitted["covariance"]
        common = self.common
        return SitePrior(
            mean=np.array(fitted["mean"]),
            covariance=lower + np.tril(lower, -1).T,
            degrees=np.array(common["degrees"]),
            events=common["events"],
            layout_kernel=LayoutKernel(
                amplitude=common["near"], length_scale=common["length"], nugget=common["layout"]
            ),
            noise=common["noise"],
            scatter=tuple(common["scatter"]),
            coverage=Coverage(**common["coverage"]),
            unknown=unknown,
            noise_inflation=common["doubt"],
            coverage_factor=common["held_given"],
        )


NEUTRAL: Final = SitePopulation(
    common={
        "degrees": [0.0] * len(DEGREES),
        "events": 1.0,
        "near": 0.0,
        "length": 1.0,
        "layout": 0.0,
        "noise": 0.0,
        "scatter": [0.0, 0.0],
        "coverage": {},
        "doubt": 1.0,
        "held_given": 1.0,
    },
    posteriors={
        "|": {
            "mean": [0.0] * len(CLASSES),
            "covariance": [0.0] * (len(CLASSES) * (len(CLASSES) + 1) // 2),
        }
    },
)
"""Physics alone, with uncertain events only; published runs are compared with it to fit the
model."""


def key(framework: str, architecture: str) -> str:
    """Name of the posterior of a framework and an architecture; either is empty if the record has
    no runs of it."""
    return f"{framework}|{architecture}"


@lru_cache
def _fitted() -> Mapping[str, Any]:
    """Fitted numbers by the teams that were left out ("" for none); made by
    `perfmodel fit --sites`."""
    return MappingProxyType(
        parse_json(read_checked(files("perfmodel.prediction.sites"), FILE_NAME))
    )


@lru_cache
def population(without: str = "") -> SitePopulation:
    """The population fitted to all published sources except those that share a team with
    `without`."""
    fits = _fitted()
    numbers = fits[fit_without(without, fits) if without else ""]
    return SitePopulation(
        common=numbers["common"], posteriors=numbers["of"], seen=Seen.from_dict(numbers["seen"])
    )


def fit_without(source: str, fits: Collection[str]) -> str:
    """Name the fit that uses no run of a source's teams: "" if the record has no runs of them.

    Args:
        source: a source's name; empty for nobody's.
        fits: fits by the teams that were left out, joined by `+`.

    Raises:
        PerfModelError: every fit has runs of some of its teams.
    """
    if not source:
        return ""
    # Every team of the record is left out of some fit: teams of the source that are in none have no
    # runs in it.
    teams_left_out = {name: frozenset(name.split("+")) for name in fits if name}
    fitted_teams = frozenset[str]().union(*teams_left_out.values()) & teams_of(source)
    if not fitted_teams:
        return ""
    # Among the fits that leave out all of these teams, take the one that leaves out the fewest
    # others.
    covering = [name for name, teams in teams_left_out.items() if fitted_teams <= teams]
    if not covering:
        raise PerfModelError(
            f"there is no fit of site constants that leaves out the runs of {' and '.join(sorted(fitted_teams))}; "
            "run `perfmodel fit --sites` with a source of these teams among the tables"
        )
    return min(covering, key=lambda name: (len(teams_left_out[name]), name))
