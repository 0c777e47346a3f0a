"""Active selection: measures the events that reduce the uncertainty of the step time most."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float

from perfmodel.calibration.beliefs import NOISE, Base, Beliefs, Events, condition, take
from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.ops import Op
from perfmodel.spec import Device

if TYPE_CHECKING:
    import pandas as pd

HALF_WIDTH = 1.645
"""Standard deviations on either side of a 90 % interval."""


@dataclass(frozen=True, eq=False)
class StepShares:
    """Step time of each layout, with its sensitivity to events."""

    step_time_s: Float[np.ndarray, " layouts"]
    ops: tuple[Op, ...]
    """Distinct events whose times a measurement can determine."""
    shares: Float[np.ndarray, "layouts ops"]
    """Elasticities: d log(step time) / d log(event time)."""
    rest_half_width: Float[np.ndarray, " layouts"]
    """Half-width of the 90 % interval due to all other events, as a share of the step time."""


class Steps(Protocol):
    """Protocol: computes step times from beliefs about events."""

    def at(self, beliefs: Beliefs) -> StepShares:
        """Step times with each event at its expected time."""
        ...


def step_variance(
    beliefs: Beliefs, ops: Events, shares: Float[np.ndarray, "layouts ops"]
) -> Float[np.ndarray, " layouts"]:
    """Variance of each layout's log step time: s^T C s, C the covariance of log event times.

    Args:
        ops: the events, in the order of `shares`' columns.
        shares: s = d log(step time) / d log(event time), the timeline's gradient.
    """
    return np.einsum("li,ij,lj->l", shares, beliefs.covariance(ops, ops), shares)


def choose(
    beliefs: Beliefs,
    ops: Events,
    shares: Float[np.ndarray, "layouts ops"],
    pool: Events,
    count: int,
) -> list[int]:
    """Choose up to `count` candidates of `pool`, greedily.

    Measuring candidate c, of variance v and noise n, reduces a layout's variance by (s^T C_c)^2 /
    (v + n), where C_c is the covariance of the layout's events with c (Cohn, Ghahramani and Jordan,
    JAIR 4, 1996, for a weighted sum). The reductions of all layouts are added. Each candidate is
    chosen as if the earlier ones were measured already, which keeps a batch diverse.
    """
    return _greedy(beliefs, pool, count, shares @ beliefs.covariance(ops, pool))


def most_uncertain(beliefs: Beliefs, pool: Events, count: int) -> list[int]:
    """Choose up to `count` candidates only by their uncertainty, as a baseline for `choose`."""
    return _greedy(beliefs, pool, count, None)


def _greedy(
    beliefs: Beliefs,
    pool: Events,
    count: int,
    step_covariance: Float[np.ndarray, "layouts pool"] | None,
) -> list[int]:
    """Choose candidates one after another, each with the largest gain after the ones before it.

    Args:
        step_covariance: covariance of the log step times with each candidate's log time; None:
            candidates are chosen by their own variance.
    """
    variance = beliefs.variance(pool)
    chosen: list[int] = []
    columns: list[Float[np.ndarray, " pool"]] = []
    for _ in range(min(count, len(variance))):
        # The variance that measuring a candidate removes: its own, or that of the step times.
        gain = variance.copy()
        if step_covariance is not None:
            gain = (step_covariance**2).sum(axis=0) / (variance + np.exp(NOISE))

        # A candidate is chosen once.
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            break

        # Condition on the chosen one as if it were measured: a column of the pivoted Cholesky
        # factor.
        root = np.sqrt(variance[best] + np.exp(NOISE))
        with_best = beliefs.covariance(pool, take(pool, best))[:, 0]
        column = with_best - sum(past * past[best] for past in columns)
        column = column / root
        if step_covariance is not None:
            step_covariance = step_covariance - np.outer(step_covariance[:, best] / root, column)
        variance = np.maximum(variance - column**2, 1e-12)
        chosen.append(best)
        columns.append(column)
    return chosen


Measure = Callable[[Sequence[Op]], Mapping[Op, float]]
"""Measures ops and returns seconds of each that could be measured."""
Progress = Callable[["Round"], None]

BATCH = 8
"""Number of measurements before the first fits. Later fits follow after a quarter of all
measurements so far, because each further one adds less."""


@dataclass(frozen=True, eq=False)
class Round:
    """The state of knowledge after some measurements."""

    measurements: int
    step_time_s: Float[np.ndarray, " layouts"]
    half_width: Float[np.ndarray, " layouts"]
    """Half-width of the 90 % interval of each layout's step time, as a share of it."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The outcome of active selection."""

    rounds: tuple[Round, ...]
    beliefs: Beliefs
    reason: str
    """Reason why the selection stopped: `target reached`, `budget used`, or `all measured`."""
    failed: tuple[Op, ...]
    """Chosen ops that could not be measured."""

    @property
    def measured(self) -> Mapping[Op, float]:
        """Seconds of each op."""
        return self.beliefs.measured

    def to_frame(self) -> "pd.DataFrame":
        """Return one row per round: measurements so far, and the widest interval."""
        import pandas as pd

        rows = [
            {"measurements": r.measurements, "half_width": float(r.half_width.max())}
            for r in self.rounds
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return frame_html(
            self.to_frame(), f"{self.reason} after {self.rounds[-1].measurements} measurements"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        last = self.rounds[-1]
        return {
            "measurements": last.measurements,
            "reason": self.reason,
            "failed": len(self.failed),
            "half_width": last.half_width.tolist(),
            "step_time_s": last.step_time_s.tolist(),
            "rounds": self.to_frame().to_dict("records"),
        }


def _check(pool: Sequence[Op], target_half_width: float, budget: int | None, batch: int) -> None:
    """Raise `PerfModelError` for an empty pool, or figures that make no sense."""
    if not pool:
        raise PerfModelError(
            "no event of these layouts can be measured on this machine; give other layouts or another backend"
        )
    if not 0 < target_half_width < 1:
        raise PerfModelError(
            f"the target interval must be a share between 0 and 1, got {target_half_width:g}"
        )
    if batch < 1 or (budget is not None and budget < 1):
        raise PerfModelError(f"budget and batch must be at least 1, got {budget} and {batch}")


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
    """Measure until each layout's step time is known precisely enough.

    Repeats: fit the kriging to what is measured; evaluate the layouts' timelines, whose gradient
    weighs the disagreement about every event; choose the batch of the pool that reduces the
    variance of the step times most (`choose`); measure it.

    Args:
        steps: the layouts of interest.
        pool: kernels and collectives that can be measured: those layouts' events, or a grid of
            shapes around them.
        measure: measures a batch.
        base: prices before anything is measured.
        target_half_width: half-width of the 90 % interval of every step time, as a share, at which
            to stop.
        budget: measurements at most, those in `measured` counted; the whole pool if not given.
        measured: seconds of ops measured before.
        progress: called after every fit.

    Raises:
        PerfModelError: for an empty pool, or a target, budget or batch that makes no sense.
    """
    _check(pool, target_half_width, budget, batch)
    measured_s = dict(measured or {})
    open_ops = [op for op in dict.fromkeys(pool) if op not in measured_s]

    # Fit, look at the step times, stop or measure the next batch.
    failed: list[Op] = []
    rounds: list[Round] = []
    beliefs: Beliefs | None = None
    while True:
        beliefs = condition(base, device, measured_s, beliefs)

        # The timelines are evaluated anew after each fit: as times move, so does the critical
        # path and with it the share of every event.
        state = steps.at(beliefs)
        located = beliefs.locate(state.ops)
        spread = HALF_WIDTH * np.sqrt(step_variance(beliefs, located, state.shares))
        rounds.append(
            Round(len(measured_s), state.step_time_s, np.hypot(spread, state.rest_half_width))
        )
        progress(rounds[-1])
        if rounds[-1].half_width.max() <= target_half_width:
            return Selection(tuple(rounds), beliefs, "target reached", tuple(failed))
        if budget is not None and len(measured_s) >= budget:
            return Selection(tuple(rounds), beliefs, "budget used", tuple(failed))

        # The more measurements there are, the less one more adds, so batches grow with their
        # number.
        count = max(batch, len(measured_s) // 4)
        count = count if budget is None else min(count, budget - len(measured_s))
        chosen: list[int] = []
        if open_ops:
            chosen = choose(beliefs, located, state.shares, beliefs.locate(open_ops), count)
        if not chosen:
            return Selection(tuple(rounds), beliefs, "all measured", tuple(failed))
        batch_ops = [open_ops[i] for i in chosen]
        measured_now = measure(batch_ops)
        measured_s |= {op: measured_now[op] for op in batch_ops if op in measured_now}

        # Events that could not be measured are not tried again; otherwise the loop would choose
        # them forever.
        failed += [op for op in batch_ops if op not in measured_now]
        open_ops = [op for op in open_ops if op not in set(batch_ops)]


def selection_text(selection: Selection) -> str:
    """Format each round's measurements and widest interval, and why the selection stopped."""
    last = selection.rounds[-1]
    lines = [
        f"{r.measurements:5} measurements: step times within {r.half_width.max():.1%}"
        for r in selection.rounds
    ]
    lines.append(f"{selection.reason} after {last.measurements} measurements")
    if selection.failed:
        lines.append(f"{len(selection.failed)} chosen events could not be measured undisturbed")
    return "\n".join(lines)
