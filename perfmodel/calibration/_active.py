"""Few measurements, well chosen: measure, fit, see what the step time still hangs on, measure that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from perfmodel.calibration._beliefs import Base, Beliefs, condition
from perfmodel.calibration._choose import choose, step_variance
from perfmodel.calibration._steps import HALF_WIDTH, Steps
from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.spec import Device, Op

if TYPE_CHECKING:
    import pandas as pd

Measure = Callable[[Sequence[Op]], Mapping[Op, float]]
"""Measures ops and returns seconds of each that could be measured."""
Progress = Callable[["Round"], None]

BATCH = 8
"""Measurements between two fits at first; later a quarter of those made, as one more tells less."""


@dataclass(frozen=True, eq=False)
class Round:
    """What was known after so many measurements."""

    measurements: int
    step_time_s: Float[np.ndarray, " layouts"]
    half_width: Float[np.ndarray, " layouts"]
    """Of the 90 % interval of each layout's step time, as a share of it."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The outcome of active selection."""

    rounds: tuple[Round, ...]
    beliefs: Beliefs
    reason: str
    """Why it stopped: `target reached`, `budget used`, or `all measured`."""
    failed: tuple[Op, ...]
    """Chosen ops that could not be measured."""

    @property
    def measured(self) -> Mapping[Op, float]:
        """Op to seconds."""
        return self.beliefs.measured

    def to_frame(self) -> "pd.DataFrame":
        """One row per round: measurements, and the widest interval over the layouts."""
        import pandas as pd

        rows = [{"measurements": r.measurements, "half_width": float(r.half_width.max())} for r in self.rounds]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame(), f"{self.reason} after {self.rounds[-1].measurements} measurements")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        last = self.rounds[-1]
        return {
            "measurements": last.measurements,
            "reason": self.reason,
            "failed": len(self.failed),
            "half_width": last.half_width.tolist(),
            "step_time_s": last.step_time_s.tolist(),
            "rounds": self.to_frame().to_dict("records"),
        }


def select(
    steps: Steps,
    pool: Sequence[Op],
    measure: Measure,
    *,
    base: Base,
    device: Device,
    target_half_width: float,
    budget: int | None = None,
    batch: int = BATCH,
    measured: Mapping[Op, float] | None = None,
    progress: Progress = lambda state: None,
) -> Selection:
    """Measure until every layout's step time is known well enough.

    Repeats: fit the kriging to what is measured; evaluate the layouts' timelines, whose gradient weighs the
    disagreement about every event; choose the next batch of the pool by what it takes off the step times'
    variance (`choose`); measure it.

    Args:
        steps: the layouts of interest.
        pool: what can be measured: those layouts' events, or a grid of shapes around them.
        measure: measures a batch.
        base: prices before anything is measured.
        target_half_width: half-width of the 90 % interval of every step time, as a share, at which to stop.
        budget: measurements at most, those in `measured` counted; the whole pool if not given.
        measured: seconds of ops measured before.
        progress: called after every fit.

    Raises:
        PerfModelError: for an empty pool, or a target, budget or batch that makes no sense.
    """
    if not pool:
        raise PerfModelError("nothing to choose from: no event of these layouts can be measured here")
    if not 0 < target_half_width < 1:
        raise PerfModelError(f"the target interval must be a share between 0 and 1, got {target_half_width:g}")
    if batch < 1 or (budget is not None and budget < 1):
        raise PerfModelError(f"budget and batch must be at least 1, got {budget} and {batch}")
    known = dict(measured or {})
    open_ops = [op for op in dict.fromkeys(pool) if op not in known]
    failed: list[Op] = []
    rounds: list[Round] = []
    beliefs: Beliefs | None = None
    while True:
        beliefs = condition(base, device, known, beliefs)
        state = steps.at(beliefs)
        located = beliefs.locate(state.ops)
        spread = HALF_WIDTH * np.sqrt(step_variance(beliefs, located, state.shares))
        rounds.append(Round(len(known), state.step_time_s, np.hypot(spread, state.rest_half_width)))
        progress(rounds[-1])
        if rounds[-1].half_width.max() <= target_half_width:
            return Selection(tuple(rounds), beliefs, "target reached", tuple(failed))
        if budget is not None and len(known) >= budget:
            return Selection(tuple(rounds), beliefs, "budget used", tuple(failed))
        count = max(batch, len(known) // 4)
        count = count if budget is None else min(count, budget - len(known))
        chosen = choose(beliefs, located, state.shares, beliefs.locate(open_ops), count) if open_ops else []
        if not chosen:
            return Selection(tuple(rounds), beliefs, "all measured", tuple(failed))
        wanted = [open_ops[i] for i in chosen]
        found = measure(wanted)
        known |= {op: found[op] for op in wanted if op in found}
        failed += [op for op in wanted if op not in found]
        open_ops = [op for op in open_ops if op not in set(wanted)]
