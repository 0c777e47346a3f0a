"""Widens the interval of a run according to how little is known about it.

The model of sites (`_population`) says how far runs lie from their predictions where frameworks, devices and settings
are like those of the published record. A run of which less is known errs by more. From the half-width that the model
gives, in log time, the interval's is

    exp(base + sum over drivers of log_per_unit * how much of that driver the run has) * half-width ** power,

fitted to runs whose whole framework, device generation, year or kind of model was left out of everything
(`perfmodel.validation`), and scaled so that intervals hold nine tenths of the runs of teams left out (split conformal
prediction, Lei et al., JASA 113, 2018, with a scale that depends on the run: their section 5.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
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
        "contradictions": "statements about the run that contradict one another (0 or 1)",
    }
)
"""Drivers of the width, and what each counts."""
NOTHING_UNKNOWN: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True)
class Coverage:
    """Model of the half-width that covers 90 % of runs, given what is known about them."""

    base: float = 0.0
    """Log of the factor of a run of which everything is known."""
    power: float = 1.0
    """Power of the half-width that the model of sites gives: above 1 where that differs less between runs than errors
    do."""
    log_per_unit: Mapping[str, float] = field(default_factory=dict)
    """By driver of `UNKNOWNS`, never negative: knowing less makes no interval narrower."""

    def half_width(self, of_model: float, unknown: Mapping[str, float] = NOTHING_UNKNOWN) -> float:
        """Half-width of the interval of a log step time.

        Args:
            of_model: the half-width that the model of sites gives.
            unknown: how much of each driver the run has; those that are left out count 0.
        """
        log_factor = self.base + sum(self.log_per_unit.get(name, 0.0) * value for name, value in unknown.items())
        return exp(log_factor) * of_model**self.power

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `population.json`."""
        return {"base": self.base, "power": self.power, "log_per_unit": dict(self.log_per_unit)}


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
