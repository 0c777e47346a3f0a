"""What a search found, with the proof of how good it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import search_html
from perfmodel.layout_search._candidates import Candidates
from perfmodel.layout_search._impossible import Impossible
from perfmodel.layout_search._improve import Improvement
from perfmodel.layout_search._robust import Robustness
from perfmodel.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Ranked layouts and the account of all others."""

    evaluated: int
    """Layouts scored by full schedule evaluation."""
    feasible: int
    """Layouts that fit into memory; those not evaluated have a lower bound above the best found."""
    seconds: float
    layouts: tuple[Prediction, ...]
    """The best first."""
    objective: str = "step_time"
    """What is minimised, or maximised (`OBJECTIVES`, or a formula)."""
    values: tuple[float, ...] = ()
    """The objective of each of them."""
    quantities: tuple[dict[str, float], ...] = ()
    """What else objective and constraints name, and money and energy where the tariff tells them, of each."""
    lower_bound: float = 0.0
    """No value of the objective in the space is better."""
    constraints: tuple[str, ...] = ()
    impossible: Impossible | None = None
    """Why there is no layout, and what would make one possible."""
    robust: str = ""
    """By what layouts are ordered instead of by the objective, if anything."""
    robustness: Robustness | None = None
    """How sure the ranking is, given what predictions may err by."""
    method: str = "enumerate"
    """How the layouts were found."""
    why: str = ""
    """Why by that method."""
    improvements: tuple[Improvement, ...] = ()
    """Layouts whose stages were cut anew, with what that gained and how far from the best cut it is at most."""
    bounds_s: tuple[float, ...]
    """A lower bound on the step time of each of them, from its passes and collectives alone."""
    rejected: dict[str, int]
    """Reason -> number of combinations."""
    step_time_s: Float[np.ndarray, " evaluated"]
    """Step times of all evaluated layouts, the best first (ascending, unless the objective is another)."""
    number: Int[np.ndarray, " evaluated"]
    """Their numbers among the candidates."""
    candidates: Candidates
    """Every layout with its memory and bound."""
    lower_bound_s: float
    """No layout of the space that fits is faster than this."""
    batches: "tuple[SearchResult, ...]" = ()
    """One search for each global batch, where several were tried; `candidates`, `number` and `step_time_s` are
    those of the batch of the best layout."""
    complete: bool = True
    """False where the search was interrupted: the best so far."""

    @property
    def gap(self) -> float:
        """How much worse (relative) the best layout may be than the best of the space."""
        return self._gap(self.values[0]) if self.layouts else 0.0

    def _gap(self, value: float) -> float:
        return abs(value - self.lower_bound) / abs(self.lower_bound) if self.lower_bound else 0.0

    @property
    def certificate(self) -> str:
        """`exact`: the best layout is proved to be the best of the space under this model; or how far off."""
        if not self.complete:
            return f"within {self.gap:.2%} of the best"
        if cut := next(
            (i for i in self.improvements if self.layouts and i.result.layout == self.layouts[0].layout), None
        ):
            return f"exact for even stages; the cut within {cut.result.gap:.2%} of the best cut of its layout"
        return "exact"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are part of the command-line contract."""
        layouts = [
            p.to_dict()
            | {"lower_bound_s": bound_s, "gap": self._gap(value), "objective_value": value, "quantities": quantities}
            | (self.robustness.of(i) if self.robustness else {})
            for i, (p, bound_s, value, quantities) in enumerate(
                zip(self.layouts, self.bounds_s, self.values, self.quantities, strict=True)
            )
        ]
        return {
            "evaluated": self.evaluated,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "layouts": layouts,
            "rejected": self.rejected,
            "objective": self.objective,
            "constraints": list(self.constraints),
            "lower_bound": self.lower_bound,
            "impossible": self.impossible and self.impossible.to_dict(),
            "robust": self.robust,
            "probability_better": self.robustness.better.tolist() if self.robustness else [],
            "method": self.method,
            "why": self.why,
            "improvements": [improvement.to_dict() for improvement in self.improvements],
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "certificate": self.certificate,
            "complete": self.complete,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per ranked layout."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layout": str(p.layout), "step_time_s": p.step_time_s, "lo_s": p.step_time_lo_s,
                    "hi_s": p.step_time_hi_s, "mfu": p.mfu, "bubble_fraction": p.bubble_fraction,
                    "peak_bytes": p.memory.peak, "tokens_per_s_per_device": p.tokens_per_s_per_device,
                }
                for p in self.layouts
            ]
        )  # fmt: skip

    def frame(self) -> "pd.DataFrame":
        """One row per layout that fits: its fields, `peak_bytes`, `bound_s`, and `step_time_s` where evaluated."""
        frame = self.candidates.frame()
        step_s = np.full(len(self.candidates.bound_s), np.nan)
        step_s[self.number] = self.step_time_s
        return frame.assign(step_time_s=step_s[frame["number"].to_numpy()])

    def _repr_html_(self) -> str:
        return search_html(self.to_dict())
