"""What runs say of a device: parameters with priors, posteriors and contradictions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.display import folded, frame_html, paragraph
from perfmodel.prediction import Adjustment

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class FittedParameter:
    """One parameter before and after the runs; factors as logs, losses as amounts (`PARAMETERS`)."""

    name: str
    prior_sd: float
    """Its prior is normal around 0, cut off below 0 for losses."""
    value: float
    """Expected value."""
    lo: float
    """Lower end of the 90 % interval."""
    hi: float
    measured_kernels: int | None
    """Kernels of the device that the prior rests on; None for what no kernel table measures."""
    runs: int
    """Runs whose step one standard deviation of the prior moves by 0.5 % or more."""
    informed: bool
    """Whether the runs narrowed it by a tenth or more."""
    contradiction: str = ""
    """In words, where the value lies outside the prior's 90 % interval."""

    @property
    def sigmas(self) -> float:
        """Distance from the prior's centre, in its standard deviations."""
        return self.value / self.prior_sd


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """The fit of one device's runs."""

    device: str
    runs: int
    parameters: tuple[FittedParameter, ...]
    adjustment: Adjustment
    """What predictions use."""
    error_before: float
    """Mean of |predicted / measured - 1| over the runs, from the cost models alone."""
    error_after: float
    """The same of these very runs after the fit: no measure of accuracy."""
    beyond: str = ""
    """In words, where the runs as a whole are outside what predictions allow."""
    unexplained: tuple[tuple[str, float], ...]
    """Runs that no parameter explains, worst first, and how much longer they took than the parameters say."""

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Where runs and tables disagree, in words."""
        return tuple(text for text in (self.beyond, *(p.contradiction for p in self.parameters)) if text)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device,
            "runs": self.runs,
            "error_before": self.error_before,
            "error_after": self.error_after,
            "noise": self.adjustment.noise,
            "unexplained": dict(self.unexplained),
            "contradictions": list(self.contradictions),
            "parameters": [vars(p) | {"sigmas": p.sigmas} for p in self.parameters],
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per parameter: name, prior_sd, value, lo, hi, measured_kernels, runs, informed, contradiction."""
        import pandas as pd

        return pd.DataFrame([vars(p) for p in self.parameters])

    def _repr_html_(self) -> str:
        errors = f"mean error {self.error_before:.1%} before, {self.error_after:.1%} after the fit to these runs"
        facts = paragraph(f"{self.device}, {self.runs} runs", errors, *self.contradictions)
        return facts + folded("parameters", frame_html(self.to_frame()), opened=True)


def mean_error(log_errors: np.ndarray) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.abs(np.expm1(log_errors)).mean())
