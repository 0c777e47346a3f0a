"""The step of some layouts as a function of what is believed of its events."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from perfmodel.calibration._beliefs import Beliefs
from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels
from perfmodel.ops import Op
from perfmodel.prediction import EventShares, StepProblem, event_shares, priced_events
from perfmodel.spec import Layout

HALF_WIDTH = 1.645
"""Standard deviations on either side of a 90 % interval."""


@dataclass(frozen=True, eq=False)
class StepShares:
    """Step time of every layout, and how it depends on the events."""

    step_time_s: Float[np.ndarray, " layouts"]
    ops: tuple[Op, ...]
    """Distinct events that measuring could settle."""
    shares: Float[np.ndarray, "layouts ops"]
    """d log(step time) / d log(event time)."""
    rest_half_width: Float[np.ndarray, " layouts"]
    """Half-width of the 90 % interval, as a share of the step time, that the other events cause."""


class Steps(Protocol):
    """Whatever tells step times from beliefs about events."""

    def at(self, beliefs: Beliefs) -> StepShares:
        """Steps with every event at its expected time."""
        ...


@dataclass(frozen=True)
class Believed:
    """Prices of kernels or collectives by belief, but for those that stay as they are."""

    beliefs: Beliefs
    other: PricesKernels | PricesCollectives
    unmeasured: frozenset[Op] = frozenset()
    """Ops that `other` prices."""

    def times(self, where: Any, ops: Sequence[Op]) -> EventTimes:
        """Expected times on the beliefs' device with their 90 % intervals."""
        stays = np.array([op in self.unmeasured for op in ops], bool)
        time_s, lo_s, hi_s = np.zeros((3, len(ops)))
        names = np.full(len(ops), "", object)
        for mask, price in ((~stays, self._believed), (stays, partial(self.other.times, where))):
            if mask.any():
                part = price([op for op, use in zip(ops, mask, strict=True) if use])
                time_s[mask], lo_s[mask], hi_s[mask], names[mask] = part.time_s, part.lo_s, part.hi_s, part.provenance
        return EventTimes(time_s, lo_s, hi_s, tuple(names.tolist()))

    def _believed(self, ops: Sequence[Op]) -> EventTimes:
        beliefs = self.beliefs
        log_time, half = beliefs.log_time(ops), HALF_WIDTH * np.sqrt(beliefs.variance(beliefs.locate(ops)))
        low, middle, high = np.exp([log_time - half, log_time, log_time + half])
        names = tuple("measured" if op in beliefs.measured else "learned" for op in ops)
        return EventTimes(middle, low, high, names)


@dataclass(frozen=True)
class LayoutSteps:
    """Steps of a model's layouts."""

    step_problem: StepProblem
    layouts: tuple[Layout, ...]
    unmeasured: frozenset[Op] = frozenset()
    """Events that stay at the problem's own prices."""

    def at(self, beliefs: Beliefs) -> StepShares:
        """Every layout evaluated with its events at their expected times."""
        kernels, collectives = self.step_problem.kernels, self.step_problem.collectives
        priced = self.step_problem.repriced(
            Believed(beliefs, kernels, self.unmeasured), Believed(beliefs, collectives, self.unmeasured)
        )
        found = [event_shares(priced, layout) for layout in self.layouts]
        index: dict[Op, int] = {}
        for share in found:
            for op in share.ops:
                if op not in self.unmeasured:
                    index.setdefault(op, len(index))
        shares = np.zeros((len(found), len(index)))
        for row, share in zip(shares, found, strict=True):
            for op, seconds in zip(share.ops, share.critical_s.tolist(), strict=True):
                if op in index:
                    row[index[op]] += seconds / share.step_time_s
        rest = np.array([self._rest(share) for share in found])
        return StepShares(np.array([share.step_time_s for share in found]), tuple(index), shares, rest)

    def _rest(self, share: EventShares) -> float:
        """Half-width that events at the problem's own prices cause, errors of a family common to all."""
        where = [i for i, op in enumerate(share.ops) if op in self.unmeasured]
        ops = [share.ops[i] for i in where]
        if not ops:
            return 0.0
        times = priced_events(self.step_problem, ops)
        half = (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)
        families: dict[str, float] = {}
        for op, value in zip(ops, (share.critical_s[where] * half).tolist(), strict=True):
            families[op.family] = families.get(op.family, 0.0) + value
        return float(np.sqrt(sum(v**2 for v in families.values())) / share.step_time_s)
