"""The layouts that a search explains, in their order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from perfmodel.planning.layouts._objective import Goal
from perfmodel.prediction import Prediction

SAME = 1e-9
"""Relative difference of step times below which a cut is that of an even layout."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Explained layouts that satisfy the constraints, the best first (`ranking`)."""

    predictions: tuple[Prediction, ...]
    value: Float[np.ndarray, " layouts"]
    """Of the objective, as it is minimised."""
    bound_s: Float[np.ndarray, " layouts"]
    """No layout of the degrees, micro-batch and schedule of this one takes a shorter step."""

    @property
    def step_s(self) -> Float[np.ndarray, " layouts"]:
        """Step times."""
        return np.array([p.step_time_s for p in self.predictions])

    def at(self, places: Sequence[int] | Int[np.ndarray, " some"]) -> "Ranking":
        """Some of them, in another order."""
        chosen = np.array(places, np.int64)
        return replace(
            self,
            predictions=tuple(self.predictions[i] for i in chosen),
            value=self.value[chosen],
            bound_s=self.bound_s[chosen],
        )

    def with_cut(self, cuts: "Ranking") -> "Ranking":
        """These and layouts whose stages were cut anew, without those that take as long as one here."""
        step_s = list(self.step_s)
        new: list[int] = []
        for place, cut_s in enumerate(cuts.step_s):
            if not any(abs(cut_s / other_s - 1) < SAME for other_s in step_s):
                new.append(place)
                step_s.append(cut_s)
        added = cuts.at(new)
        return Ranking(
            self.predictions + added.predictions,
            np.concatenate([self.value, added.value]),
            np.concatenate([self.bound_s, added.bound_s]),
        ).in_order()

    def in_order(self) -> "Ranking":
        """By the objective, layouts of one value by their step time."""
        return self.at(np.lexsort((self.step_s, self.value)))


def ranking(goal: Goal, predictions: Sequence[Prediction], bounds_s: Sequence[float]) -> Ranking:
    """Those of some layouts that satisfy the goal's constraints, in its order."""
    value = goal.value(goal.of(predictions)) if predictions else np.zeros(0)
    ranked = Ranking(tuple(predictions), value, np.array(bounds_s, np.float64))
    return ranked.at(np.flatnonzero(np.isfinite(value))).in_order()


def quantities_of(goal: Goal, prediction: Prediction) -> dict[str, float]:
    """What objective and constraints name of a layout, and its money and energy where the tariff tells them."""
    names = set(goal.objective.formula.names).union(*(constraint.names for constraint in goal.constraints))
    tariff = goal.tariff
    priced = tariff.price_per_device_hour is not None
    listed = tariff.price_per_device_hour == goal.step_problem.cluster.device.usd_per_hour
    names |= {"cost"} if priced and (tariff.tokens or not listed) else set()  # a list price tells little by itself
    names |= {"energy_j"} if tariff.power_w is not None and tariff.idle_power_w is not None else set()
    names |= {"train_time_s"} if tariff.tokens is not None else set()
    quantity = goal.of([prediction])
    return {name: float(np.ravel(quantity(name).lo)[0]) for name in sorted(names)}
