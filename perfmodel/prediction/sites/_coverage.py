"""Widens the interval of a run according to how little is known about it.

The model of sites (`_population`) says how far runs lie from their predictions where frameworks, devices and settings
are like those of the published record. A run of which less is known errs by more, for reasons that have nothing to do
with one another, so that their squares add. From the half-width that the model gives, in log time, the interval's is
the root of

    (exp(base) * half-width ** power) ** 2 + sum over drivers of added ** 2 * saturated(how much the run has of it),

fitted to runs whose whole framework, device generation, year or kind of model was left out of everything
(`perfmodel.validation`), and scaled so that intervals hold nine tenths of the runs of teams left out (split conformal
prediction, Lei et al., JASA 113, 2018, with a scale that depends on the run: their section 5.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from types import MappingProxyType
from typing import Any, Final

from perfmodel.spec import ConvNet, Mlp, Model

UNKNOWNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "framework_unnamed": "no framework is named (0 or 1)",
        "framework_unseen": "a framework is named of which the record has no run (0 or 1)",
        "device_unseen": "the record has no run on this generation of devices (0 or 1)",
        "year_unseen": "the record has no run of this year's software (0 or 1)",
        "model_unseen": "the record has no run of this kind of model (0 or 1)",
        "settings_unstated": "share of the run's settings that had to be assumed",
        "extrapolated": "share of the critical path that is timed beyond what was measured",
        "contradictions": "how much what is said of the run contradicts itself (0 to 1)",
    }
)
"""Drivers of the width, and what each counts."""
NOTHING_UNKNOWN: Final[Mapping[str, float]] = MappingProxyType({})
HALF_SATURATED: Final = 0.25
"""Share of a driver at which its effect is some half of the whole. With published runs in view: how far they lie off
grows with the first fifth of the critical path that nobody measured, and hardly beyond; 0.1 to 0.5 do as well."""


@dataclass(frozen=True)
class Coverage:
    """Model of the half-width that covers 90 % of runs, given what is known about them."""

    base: float = 0.0
    """Log of the factor of a run of which everything is known."""
    power: float = 1.0
    """Power of the half-width that the model of sites gives: below 1 where that differs more between runs than errors
    do."""
    added: Mapping[str, float] = field(default_factory=dict)
    """Half-width that the whole of each driver in `UNKNOWNS` adds, in quadrature: less knowledge never narrows an
    interval."""

    def half_width(self, of_model: float, unknown: Mapping[str, float] = NOTHING_UNKNOWN) -> float:
        """Half-width of the interval of a log step time.

        Args:
            of_model: the half-width that the model of sites gives.
            unknown: how much of each driver the run has; those that are left out count 0.
        """
        known = exp(self.base) * of_model**self.power
        squares = [self.added.get(name, 0.0) ** 2 * saturated(value) for name, value in unknown.items()]
        beyond = sum(squares)
        # Without any driver it is the first part to the last digit.
        return sqrt(known**2 + beyond) if beyond else known

    def scaled(self, log_factor: float) -> "Coverage":
        """Coverage whose half-widths are exp(`log_factor`) times these."""
        added = {name: exp(log_factor) * value for name, value in self.added.items()}
        return replace(self, base=self.base + log_factor, added=added)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `population.json`."""
        return {"base": self.base, "power": self.power, "added": dict(self.added)}


def saturated(share: Any) -> Any:
    """Effect of a share of a driver on the square of a half-width, relative to that of all of it: 0 for 0, 1 for 1, and
    concave between them.

    Args:
        share: a number or an array.
    """
    return share * (1 + HALF_SATURATED) / (share + HALF_SATURATED)


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
    if isinstance(model, Mlp):
        return "multilayer perceptron"
    if model.norms.adaln is not None:
        return "diffusion transformer"
    if model.experts is not None:
        return "mixture of experts"
    if model.hybrid.mamba is not None or model.hybrid.delta_net is not None:
        return "state-space layers"
    if model.decoder_layers:
        return "encoder and decoder"
    return "decoder" if model.attention.causal else "encoder"
